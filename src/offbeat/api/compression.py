"""How the messages of a strategy are compressed, for its `compression` field."""

from offbeat.core.compression import BFloat16, Compression, Int8, TopK

__all__ = ["BFloat16", "Compression", "Int8", "TopK"]
