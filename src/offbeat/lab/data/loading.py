"""`load`: the arrays of a data set that is in the cache."""

from __future__ import annotations

from offbeat.errors import ConfigurationError
from offbeat.lab.data.arrays import DataSet, opened
from offbeat.lab.data.cache import directory_of, read_manifest, sizes_fit
from offbeat.lab.data.catalogue import entry_of


def load(name: str) -> DataSet:
    """The arrays, mapped into memory. Sizes and shapes are checked each time; checksums by `offbeat data get`."""
    entry = entry_of(name)
    directory = directory_of(entry)
    manifest = read_manifest(entry)
    if manifest is None:
        state = "is damaged" if directory.exists() else "is not on this machine"
        raise ConfigurationError(f"the data set {name} {state} ({directory}); type: offbeat data get {name}")
    try:
        if sizes_fit(entry, manifest):
            return opened(entry, directory)
    except (OSError, ValueError, EOFError):
        pass
    raise ConfigurationError(f"the data set {name} is damaged ({directory}); type: offbeat data get {name}")
