"""The share of a dataset that one of several processes trains on: `peer.shard(dataset)`."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from offbeat.core.validation import require
from offbeat.errors import ConfigurationError


class IterableShard(IterableDataset[Any]):
    """Every n-th example of an iterable dataset."""

    def __init__(self, data: IterableDataset[Any], index: int, shards: int) -> None:
        self.data, self.index, self.shards = data, index, shards

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.data), self.index, None, self.shards)


def shard_of(data: Any, index: int, shards: int) -> Any:
    """Shard `index` of `shards` disjoint ones, of the same kind as `data` where that has shards of its own.

    data: a dataset of torch or of Hugging Face, a tensor, or a tuple of tensors of the same length.

    Raises `ConfigurationError` for anything else, and for data with fewer examples than shards.
    """
    require(
        not isinstance(data, DataLoader),
        "peer.shard takes the dataset, but was given a DataLoader; type DataLoader(peer.shard(dataset), ...)",
    )
    if type(data).__module__.split(".")[0] == "datasets":  # Hugging Face: keeps its columns and formats
        return importlib.import_module("datasets.distributed").split_dataset_by_node(data, index, shards)
    if isinstance(data, IterableDataset):
        return IterableShard(data, index, shards)
    size = _size(data)
    require(
        size >= shards,
        f"{size} example{'s' if size != 1 else ''} cannot be divided among {shards} processes; start fewer of them",
    )
    if isinstance(data, Tensor):
        return data[index::shards]
    if isinstance(data, tuple):
        return tuple(part[index::shards] for part in data)
    return Subset(data, range(index, size, shards))


def _size(data: Any) -> int:
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) and part.dim() for part in data):
        sizes = {len(part) for part in data}
        require(len(sizes) == 1, f"the tensors have different lengths, {sorted(sizes)}; give them the same one")
        return sizes.pop()
    is_indexable = isinstance(data, Dataset) or (hasattr(data, "__getitem__") and not isinstance(data, str | dict))
    if not is_indexable or not hasattr(data, "__len__") or isinstance(data, tuple):
        raise ConfigurationError(
            f"peer.shard takes a dataset, or a tuple of tensors, but was given {type(data).__name__}; type "
            "peer.shard(train_set)"
        )
    return len(data)
