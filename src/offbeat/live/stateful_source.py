"""A loader whose state can be saved, as a source of micro-batches: what a lost worker had drawn is drawn again.

Such a loader has `state_dict` and `load_state_dict`: torchdata's StatefulDataLoader, or a stream such as an iterable
dataset of Hugging Face. A position in its data is the number of samples that it has yielded, in all passes. Once in
each round its state is saved with the position at which it was taken; the worker sends it to its hub with the result,
and gets it back when it has to continue from an earlier position.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from offbeat.core.loader_states import STATE_BYTES_MAX, LoaderState
from offbeat.core.splits import Shared, Split
from offbeat.core.strategy import Strategy
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, ContractViolation, shortened
from offbeat.live.batch_sources import BatchSource, IterableSource
from offbeat.live.state_file import dumps, loads


@runtime_checkable
class StatefulLoader(Protocol):
    """An iterable of batches whose state can be saved and loaded."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class StatefulSource(IterableSource):
    """Batches of a loader from any position at or after one that has a state.

    Samples of a loader that does not continue exactly from its state are counted, but not repeated.

    loader: the loader.
    refuses: whether a loader that does not continue exactly is an error.
    notice: called with the sentence that says why it does not, otherwise.
    """

    def __init__(self, loader: StatefulLoader, refuses: bool, notice: Callable[[str], None]) -> None:
        super().__init__(loader)
        self._passes.on_begin = self._pass_began
        self._loader = loader
        self._refuses = refuses
        self._notice = notice
        self._draw = 0
        """The position of the next sample that `take` yields."""
        self._initial: LoaderState | None = None
        """The state in which the first round here began."""
        self._newest: LoaderState | None = None
        """A state that was taken in this round."""
        self._is_exact = True
        self._has_begun = False

    def begin_round(self, draw: int, loader: LoaderState | None) -> None:
        if not self._has_begun:
            self._begin(draw, loader)
        if not self._is_exact:
            return
        known = [state for state in (self._initial, loader) if state is not None and state.draw <= draw]
        last = max(known, key=lambda state: state.draw)
        if not last.draw <= self._draw <= draw:
            self._load(last)
        while self._draw < draw and self.take(self._draw, draw - self._draw) is not None:
            pass  # samples that the hub has, or that the state lies before
        self._newest = None

    def take(self, draw: int, samples: int) -> tuple[Any, int] | None:
        batch_and_size = super().take(draw, samples)
        self._draw += 0 if batch_and_size is None else batch_and_size[1]
        return batch_and_size

    def end_round(self) -> LoaderState | None:
        if self._is_exact and not self._rest_samples:
            self._newest = self._saved()
        return self._newest

    def _begin(self, draw: int, loader: LoaderState | None) -> None:
        """Before the first round: decide whether the loader continues exactly, and begin with its initial state."""
        self._has_begun = True
        if draw and loader is None:
            reason: str | None = "its hub has no state of it, from an earlier process of this worker"
        else:
            reason = reason_against(self._loader) if loader is None else None
        if reason is not None:
            self._is_exact = False
            kind = type(self._loader).__name__
            if self._refuses:
                raise ConfigurationError(
                    f"samples of this {kind} cannot be repeated exactly once: {reason}; leave exactly_once out to "
                    "count them alone, or give run.batches the dataset itself"
                )
            self._notice(f"samples of the {kind} are counted, but lost ones are not repeated: {reason}")
        if loader is not None:
            self._load(loader)
            self._initial = loader
        else:
            self._passes.begin(0)
            self._initial = self._newest

    def _fetch(self) -> bool:
        if self._is_exact and self._newest is None:
            self._newest = self._saved()
        return super()._fetch()

    def _pass_began(self) -> None:
        # No state of the pass before leads to this one: a loader may have drawn its order at random.
        self._newest = self._saved() if self._is_exact else None

    def _saved(self) -> LoaderState | None:
        """The state of the loader, whose next sample is the one after the rest; None if it is too large to be sent."""
        data = dumps([self._passes.number, self._loader.state_dict()])
        if len(data) > STATE_BYTES_MAX:
            return self._newest
        return LoaderState(self._draw + self._rest_samples, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _load(self, state: LoaderState) -> None:
        number, loader_state = loads(state.encoded.numpy().tobytes(), "the state of the data loader")
        self._rest, self._rest_samples, self._draw = None, 0, state.draw
        try:
            self._passes.begin(number, lambda: self._loader.load_state_dict(loader_state))
        except Exception as error:
            raise ConfigurationError(
                f"{type(self._loader).__name__} does not take the state it had at sample {state.draw} "
                f"({type(error).__name__}: {error}); create it as it was when the run began"
            ) from error


def loader_source(
    data: Any,
    split: Split,
    *,
    exactly_once: bool | None,
    strategy: Strategy,
    notice: Callable[[str], None],
) -> BatchSource:
    """The source for a DataLoader or another iterable of batches.

    exactly_once: True: an error if lost samples cannot be repeated; False: they are only counted; None: they are
        repeated where that can be done.
    strategy: the algorithm, whose nodes may keep states of loaders.
    notice: called with the sentence that says why they cannot be repeated.
    """
    kind = type(data).__name__
    if not isinstance(data, Iterable):
        raise ConfigurationError(
            f"run.batches was given {kind}, but takes a pair of tensors, a dataset, a DataLoader or anything that "
            "gives batches; type run.batches(train_set)"
        )
    require(
        isinstance(split, Shared),
        f"a {kind} cannot be split by offbeat; give run.batches the dataset itself, or split it in the loader by "
        "run.rank",
    )
    if exactly_once is not False and isinstance(data, StatefulLoader) and strategy.keeps_loaders:
        return StatefulSource(data, bool(exactly_once), notice)
    has_state = isinstance(data, StatefulLoader)
    require(
        not exactly_once or has_state,
        f"exactly_once=True needs a loader whose state can be saved, and {kind} has no state_dict; take torchdata's "
        "StatefulDataLoader (pip install torchdata), or give run.batches the dataset itself",
    )
    require(
        not exactly_once,
        f"exactly_once=True needs a hub that keeps the states of loaders, and {strategy.name or 'this strategy'} has "
        "none; give run.batches the dataset itself",
    )
    return IterableSource(data)


def reason_against(loader: StatefulLoader) -> str | None:
    """Why a loader that has not been used yet does not continue exactly from its state; None if it does.

    The first two batches are drawn again from the states before them, with the same global random numbers. Loaders of
    indexed data with processes of their own are not tried: their order is part of the state, and starting them takes
    long.
    """
    if _has_shuffle_buffer(loader):
        return "its shuffle buffer is not part of its state; shuffle its shards alone, or the data itself"
    if getattr(loader, "num_workers", 0) and hasattr(getattr(loader, "dataset", None), "_ex_iterable"):
        # datasets 5.2 returns a state that the process changes while torchdata 0.11 has not sent it yet
        return "a stream of Hugging Face continues elsewhere if other processes read it; type num_workers=0"
    with _kept_randomness() as reseed:
        batches = iter(loader)
        drawn: list[tuple[bytes, Any]] = []
        try:
            for _ in range(2):
                state = dumps(_called(loader.state_dict))
                reseed()
                drawn.append((state, next(batches, None)))
        except (ContractViolation, _StateError) as error:
            return f"its state cannot be saved, {error}"
        size = max(len(state) for state, _ in drawn)
        if size > STATE_BYTES_MAX:
            return f"its state has {size:,} bytes, and {STATE_BYTES_MAX:,} are the most"
        del batches
        if not getattr(loader, "num_workers", 0) or isinstance(getattr(loader, "dataset", None), IterableDataset):
            for state, batch in reversed(drawn):
                try:
                    _called(loader.load_state_dict, loads(state, "a state"))
                except _StateError as error:
                    return f"it does not take its own state, {error}"
                reseed()
                if not _is_equal(batch, next(iter(loader), None)):
                    return "from its state it continued with another batch"
        loader.load_state_dict(loads(drawn[0][0], "a state"))
    return None


class _StateError(Exception):
    """A loader has raised an error when its state was saved or loaded."""


def _called(method: Callable[..., Any], *arguments: Any) -> Any:
    """What a method of a loader returns; errors of loaders are of any type."""
    try:
        return method(*arguments)
    except Exception as error:
        raise _StateError(shortened(f"{type(error).__name__}: {error}")) from error


def _has_shuffle_buffer(loader: Any) -> bool:
    """Whether a stream of Hugging Face shuffles in a buffer, which is empty after `load_state_dict`."""
    parts = [getattr(part, "_ex_iterable", None) for part in (loader, getattr(loader, "dataset", None))]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        if part is not None:
            parts += [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    return False


@contextmanager
def _kept_randomness() -> Iterator[Callable[[], None]]:
    """Global random generators are as before at the end; yields what sets them to one and the same state."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def reseed() -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)

    try:
        yield reseed
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two batches hold the same values."""
    if isinstance(one, Tensor | np.ndarray) and isinstance(other, Tensor | np.ndarray):
        return np.array_equal(np.asarray(one), np.asarray(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_equal(part, other[key]) for key, part in one.items())
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other)
