"""Lossy compression of the tensors in messages, with error feedback.

Importing this package registers all members of the family `Compression`.
"""

from offbeat.core.compression.compression import Compression, decode
from offbeat.core.compression.encoded_tensor import is_encoded, saved_bytes
from offbeat.core.compression.quantization import BFloat16, Int8
from offbeat.core.compression.top_k import TopK

__all__ = ["BFloat16", "Compression", "Int8", "TopK", "decode", "is_encoded", "saved_bytes"]
