"""Fewer bytes for the same tensors: what may be lost, and what is made up for later."""

from offbeat.compression.bfloat16 import BFloat16
from offbeat.compression.blob import is_coded, saved_bytes, uncompressed_bytes
from offbeat.compression.compression import Compression, decode
from offbeat.compression.int8 import Int8
from offbeat.compression.top_k import TopK

__all__ = ["BFloat16", "Compression", "Int8", "TopK", "decode", "is_coded", "saved_bytes", "uncompressed_bytes"]
