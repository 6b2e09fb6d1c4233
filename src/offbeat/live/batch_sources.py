"""Sources of micro-batches for `run.batches`: indexable data, or any iterable of batches.

Loaders whose state can be saved are in `stateful_source.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from offbeat.core.examples import Data, Order, data_of
from offbeat.core.loader_states import LoaderState
from offbeat.core.splits import Shared, Split
from offbeat.errors import ConfigurationError


class BatchSource(ABC):
    """Yields the micro-batches of one rank."""

    @abstractmethod
    def take(self, draw: int, samples: int) -> tuple[Any, int] | None:
        """At most `samples` samples from position `draw` on, and how many they are; None at the end of the data."""

    def begin_round(self, draw: int, loader: LoaderState | None) -> None:  # noqa: B027  (nothing, unless overridden)
        """The next sample is the one at position `draw`; `loader` is a state at or before it, if one is known."""

    def end_round(self) -> LoaderState | None:
        """A state of the loader at or before the position that was reached; None if lost samples need none."""
        return None


class IndexedSource(BatchSource):
    """Indexable data: a draw of a rank is always the same sample, so a restarted rank repeats lost samples."""

    def __init__(self, data: Any, order: Order) -> None:
        self._data = data
        self._order = order

    def take(self, draw: int, samples: int) -> tuple[Any, int]:
        if isinstance(self._data, Data):
            return self._data.drawn(self._order, draw, draw + samples), samples
        indices = self._order.take(draw, draw + samples)
        return default_collate([self._data[int(index)] for index in indices]), samples


class IterableSource(BatchSource):
    """A DataLoader or another iterable: samples are counted, but lost ones cannot be repeated.

    Batches are sliced to the size that the strategy asks for; the rest is kept for the next micro-batch. An iterable is
    iterated again when it ends; the end of an iterator ends the loop.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._passes = Passes(data)
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
        """Get the next batch that has samples; whether there is one."""
        batch = self._passes.next_batch()
        self._rest, self._rest_samples = batch, 0 if batch is None else samples_in(batch)
        return bool(self._rest_samples)


class Passes:
    """The batches of an iterable, pass after pass over its data.

    Before each pass but the first `set_epoch` is called, where the iterable, its dataset or its sampler has it: without
    that a distributed sampler repeats its first order, and a stream that has continued in the middle of its data would
    begin each pass there.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data
        self.number = 0
        """How many passes have begun before this one."""
        self.on_begin: Callable[[], None] = lambda: None
        """Called when a pass has begun, before its first batch."""
        self._batches: Iterator[Any] | None = None
        self._restarts = not isinstance(data, Iterator)
        parts: list[Any] = [data, *(getattr(data, name, None) for name in EPOCH_HOLDERS)]
        self._epochs = [(part, _epoch_of(part)) for part in parts if hasattr(part, "set_epoch")]

    def begin(self, number: int, load: Callable[[], Any] | None = None) -> None:
        """Begin pass `number`; `load` sets the state in which the iterable begins it."""
        if number != self.number:
            for part, first in self._epochs:
                part.set_epoch(first + number)
        self.number = number
        if load is not None:
            load()
        self._batches = iter(self.data)
        self.on_begin()

    def next_batch(self) -> Any | None:
        """The next batch that has samples; None at the end of an iterator."""
        if self._batches is None:
            self.begin(self.number)
        for attempt in range(2):
            assert self._batches is not None
            for batch in self._batches:
                if samples_in(batch):
                    return batch
            if not self._restarts or attempt:
                break
            self.begin(self.number + 1)
        if self._restarts:
            raise ConfigurationError(f"{type(self.data).__name__} gave no batch at all; give it at least one sample")
        return None


EPOCH_HOLDERS = ("dataset", "sampler", "batch_sampler")
"""Attributes of a loader that may have to be told which pass begins."""


def _epoch_of(part: Any) -> int:
    epoch = getattr(part, "epoch", 0)
    return epoch if isinstance(epoch, int) else 0


def indexed_source(data: Any, split: Split, *, worker: int, workers: int, rank: int, seed: int) -> IndexedSource | None:
    """The source for tensors and datasets with a length, whose examples are drawn by index; None for other data.

    split: how the examples are divided among workers.
    worker, workers: the index of this worker, and how many there are.
    rank, seed: select the order of the examples.
    """
    if isinstance(data, Data | TensorDataset | tuple) or _is_tensors(data):
        data = data_of(data)
    elif isinstance(data, DataLoader | IterableDataset) or not _is_indexable(data):
        return None
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
