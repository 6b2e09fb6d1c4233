"""Sources of micro-batches for `run.batches`: indexable data, or any iterable of batches."""

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
    """Yields the micro-batches of one rank."""

    def take(self, draw: int, samples: int) -> tuple[Any, int] | None:
        """At most `samples` samples from position `draw` on, and how many they are; None at the end of the data."""


class IndexedSource:
    """Indexable data: a draw of a rank is always the same sample, so a restarted rank repeats lost samples."""

    def __init__(self, data: Any, order: Order) -> None:
        self._data = data
        self._order = order

    def take(self, draw: int, samples: int) -> tuple[Any, int]:
        if isinstance(self._data, Data):
            return self._data.drawn(self._order, draw, draw + samples), samples
        indices = self._order.take(draw, draw + samples)
        return default_collate([self._data[int(index)] for index in indices]), samples


class IterableSource:
    """A DataLoader or another iterable: samples are counted, but lost ones cannot be repeated.

    Batches are sliced to the size that the strategy asks for; the rest is kept for the next micro-batch. An iterable is
    iterated again when it ends; the end of an iterator ends the loop.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self._iterator: Iterator[Any] = iter(data)
        self._restarts = not isinstance(data, Iterator)
        self._rest: Any = None
        self._rest_samples = 0

    def take(self, draw: int, samples: int) -> tuple[Any, int] | None:
        if not self._rest_samples and not self._fetch():
            return None
        count = min(samples, self._rest_samples)
        if count == self._rest_samples:
            batch, self._rest, self._rest_samples = self._rest, None, 0
            return batch, count
        batch, self._rest = _slice(self._rest, 0, count), _slice(self._rest, count, self._rest_samples)
        self._rest_samples -= count
        return batch, count

    def _fetch(self) -> bool:
        for attempt in range(2):
            for batch in self._iterator:
                self._rest, self._rest_samples = batch, samples_in(batch)
                if self._rest_samples:
                    return True
            if not self._restarts or attempt:
                break
            self._iterator = iter(self._data)
        if self._restarts:
            raise ConfigurationError(f"{type(self._data).__name__} gave no batch at all; give it at least one sample")
        return False


def batch_source_for(data: Any, split: Split, *, worker: int, workers: int, rank: int, seed: int) -> BatchSource:
    """The source of micro-batches for the argument of `run.batches`.

    data: a pair of tensors, a dataset, a DataLoader or an iterable of batches.
    split: how the examples are divided among workers.
    worker, workers: the index of this worker, and how many there are.
    rank, seed: select the order of the examples.
    """
    if isinstance(data, Data | TensorDataset | tuple) or _is_tensors(data):
        data = data_of(data)
    elif isinstance(data, DataLoader | IterableDataset) or not _is_indexable(data):
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


def _is_indexable(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping)


def samples_in(batch: Any) -> int:
    """The length of the first tensor in a batch; 0 if there is none."""
    if isinstance(batch, Tensor | np.ndarray):
        return len(batch) if batch.ndim else 1
    parts: Iterable[Any] = batch.values() if isinstance(batch, Mapping) else batch if _is_sequence(batch) else ()
    for part in parts:
        if samples := samples_in(part):
            return samples
    return 0


def _slice(batch: Any, first: int, stop: int) -> Any:
    """The samples `first` to `stop - 1` of a nested batch."""
    if isinstance(batch, Mapping):
        return {key: _slice(part, first, stop) for key, part in batch.items()}
    if _is_sequence(batch) and batch and isinstance(batch[0], Tensor | np.ndarray | Mapping | tuple | list):
        parts = [_slice(part, first, stop) for part in batch]
        return batch._make(parts) if hasattr(batch, "_make") else type(batch)(parts)
    return batch[first:stop]


def _is_sequence(batch: Any) -> bool:
    return isinstance(batch, tuple | list)
