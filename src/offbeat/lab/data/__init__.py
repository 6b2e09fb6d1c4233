"""Data sets of images: downloaded once, decoded into memory-mapped arrays that processes share, checked at every use.

`CATALOGUE` lists them; `load` opens the arrays of one that is in the cache. Imports only `offbeat.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.lab.data.catalogue import CATALOGUE, DatasetEntry

if TYPE_CHECKING:
    from offbeat.lab.data.arrays import Dataset, LabeledImages, load

__all__ = ["CATALOGUE", "Dataset", "DatasetEntry", "LabeledImages", "load"]


def __getattr__(name: str) -> Any:
    """Import numpy only on use: `offbeat data list` is faster without it."""
    if name in __all__:
        from offbeat.lab.data import arrays

        return getattr(arrays, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
