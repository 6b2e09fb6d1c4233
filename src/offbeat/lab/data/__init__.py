"""Real data sets: got once, decoded into arrays that all processes share, checked whenever they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.lab.data.catalogue import CATALOGUE, Entry

if TYPE_CHECKING:
    from offbeat.lab.data.arrays import DataSet, Part
    from offbeat.lab.data.loading import load

__all__ = ["CATALOGUE", "DataSet", "Entry", "Part", "load"]


def __getattr__(name: str) -> Any:
    """What needs numpy is imported when it is used: a look at what is here takes less time than that."""
    if name in __all__:
        from offbeat.lab.data import arrays, loading

        return loading.load if name == "load" else getattr(arrays, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
