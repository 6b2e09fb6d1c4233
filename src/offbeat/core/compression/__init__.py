"""Fewer bytes for the same tensors: what may be lost, and what is made up for later."""

from offbeat.core.compression.compression import Compression, decode
from offbeat.core.compression.encoded_tensor import is_coded, saved_bytes, uncompressed_bytes
from offbeat.core.compression.quantization import BFloat16, Int8
from offbeat.core.compression.top_k import TopK

__all__ = ["BFloat16", "Compression", "Int8", "TopK", "decode", "is_coded", "saved_bytes", "uncompressed_bytes"]
