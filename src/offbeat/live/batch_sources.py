"""Where the micro-batches of a training loop come from: data that can be drawn by position, or whatever iterates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from offbeat.core.examples import Data, Order, data_of
from offbeat.core.splits import Shared, Split
from offbeat.errors import ConfigurationError


class BatchSource(Protocol):
    """Gives micro-batches."""

    def take(self, draw: int, samples: int) -> tuple[Any, int] | None:
        """A micro-batch of at most so many samples, and how many are in it; None where there are no more."""


class IndexedSource:
    """Data with a length: draw d of a rank is always the same sample, so what was lost can be repeated."""

    def __init__(self, data: Any, order: Order) -> None:
        self._data = data
        self._order = order

    def take(self, draw: int, samples: int) -> tuple[Any, int]:
        if isinstance(self._data, Data):
            return self._data.drawn(self._order, draw, draw + samples), samples
        indices = self._order.take(draw, draw + samples)
        return default_collate([self._data[int(index)] for index in indices]), samples


class IterableSource:
    """A DataLoader, or anything else that iterates: counted, but what was lost cannot be repeated.

    Its batches are cut to what the strategy asks for; the rest is kept for the next micro-batch. A DataLoader begins
    again where it ends; an iterator that ends, ends the loop.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self._iterator: Iterator[Any] = iter(data)
        self._again = not isinstance(data, Iterator)
        self._rest: Any = None
        self._left = 0

    def take(self, draw: int, samples: int) -> tuple[Any, int] | None:
        if not self._left and not self._fetch():
            return None
        count = min(samples, self._left)
        if count == self._left:
            batch, self._rest, self._left = self._rest, None, 0
            return batch, count
        batch, self._rest = _cut(self._rest, 0, count), _cut(self._rest, count, self._left)
        self._left -= count
        return batch, count

    def _fetch(self) -> bool:
        for attempt in range(2):
            for batch in self._iterator:
                self._rest, self._left = batch, samples_in(batch)
                if self._left:
                    return True
            if not self._again or attempt:
                break
            self._iterator = iter(self._data)
        if self._again:
            raise ConfigurationError(f"{type(self._data).__name__} gave no batch at all; give it at least one sample")
        return False


def batch_source_for(data: Any, split: Split, *, worker: int, workers: int, rank: int, seed: int) -> BatchSource:
    """What `run.batches` was given, as something that gives micro-batches."""
    if isinstance(data, Data | TensorDataset | tuple) or _is_tensors(data):
        data = data_of(data)
    elif isinstance(data, DataLoader | IterableDataset) or not _has_positions(data):
        if not isinstance(data, Iterable):
            raise ConfigurationError(
                f"run.batches was given {type(data).__name__}, but takes a pair of tensors, a dataset, a DataLoader or "
                "anything that gives batches; type run.batches(train_set)"
            )
        if not isinstance(split, Shared):
            raise ConfigurationError(
                f"a {type(data).__name__} cannot be split by offbeat; give run.batches the dataset itself, or split it "
                "in the loader by run.rank"
            )
        return IterableSource(data)
    size = len(data)
    if not size:
        raise ConfigurationError("there are no examples in the data; give at least one")
    if isinstance(split, Shared):
        indices = np.arange(size)
    else:
        targets = data.targets if isinstance(data, Data) else torch.as_tensor(getattr(data, "targets", range(size)))
        indices = split.indices(targets, worker, workers, seed)
    return IndexedSource(data, Order(indices, seed, rank))


def _is_tensors(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(isinstance(item, Tensor | np.ndarray) for item in data)


def _has_positions(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping)


def samples_in(batch: Any) -> int:
    """The length of the first tensor in it."""
    if isinstance(batch, Tensor | np.ndarray):
        return len(batch) if batch.ndim else 1
    parts: Iterable[Any] = batch.values() if isinstance(batch, Mapping) else batch if _is_series(batch) else ()
    for part in parts:
        if found := samples_in(part):
            return found
    return 0


def _cut(batch: Any, first: int, stop: int) -> Any:
    """The samples first .. stop − 1 of a batch, whatever it is made of."""
    if isinstance(batch, Mapping):
        return {key: _cut(part, first, stop) for key, part in batch.items()}
    if _is_series(batch) and batch and isinstance(batch[0], Tensor | np.ndarray | Mapping | tuple | list):
        parts = [_cut(part, first, stop) for part in batch]
        return batch._make(parts) if hasattr(batch, "_make") else type(batch)(parts)
    return batch[first:stop]


def _is_series(batch: Any) -> bool:
    return isinstance(batch, tuple | list)
