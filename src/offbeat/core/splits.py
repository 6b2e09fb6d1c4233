"""Which examples each worker draws from."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from offbeat.core.configuration import Family
from offbeat.core.examples import Indices, is_whole
from offbeat.core.randomness import stream
from offbeat.core.validation import require, require_positive


class Split(Family, ABC):
    """How the training examples are shared out among the workers."""

    @abstractmethod
    def indices(self, targets: Tensor, worker: int, workers: int, seed: int) -> Indices:
        """The examples of this worker; one that joins beyond `workers` shares those of worker modulo workers."""


@dataclass(frozen=True)
class Shared(Split, name="shared"):
    """Everyone draws from everything, each in an order of its own."""

    def indices(self, targets: Tensor, worker: int, workers: int, seed: int) -> Indices:
        return _everything(len(targets))


@dataclass(frozen=True)
class Sharded(Split, name="sharded"):
    """Everyone has a random part of its own; parts differ in size by one at the most."""

    def indices(self, targets: Tensor, worker: int, workers: int, seed: int) -> Indices:
        _require_enough(len(targets), workers)
        shuffled = stream(seed, "split").permutation(len(targets))
        return np.sort(shuffled[worker % workers :: workers])


@dataclass(frozen=True)
class ByLabel(Split, name="by-label"):
    """Everyone has a part of its own with few labels in it: the shards of federated averaging.

    The examples are sorted by label and cut into `labels` pieces per worker, which are dealt out at random. A
    piece may straddle two labels, and where workers × labels is less than the number of classes, pieces hold
    several: every example belongs to someone.
    """

    labels: int = 2
    """about how many labels each worker sees"""

    def __post_init__(self) -> None:
        require_positive(self, "labels")

    def indices(self, targets: Tensor, worker: int, workers: int, seed: int) -> Indices:
        labels = _labels(targets, self.name)
        _require_enough(len(targets), workers)
        rng = stream(seed, "split")
        shuffled = rng.permutation(len(targets))
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        pieces_each = min(self.labels, len(targets) // workers)
        pieces = np.array_split(by_label, workers * pieces_each)
        dealt = rng.permutation(len(pieces))
        first = worker % workers * pieces_each
        return np.sort(np.concatenate([pieces[i] for i in dealt[first : first + pieces_each]]))


@dataclass(frozen=True)
class Dirichlet(Split, name="dirichlet"):
    """Everyone has a part of its own, and of each label a share of its own, drawn at random.

    The shares of one label follow a Dirichlet distribution: with a small `alpha` most of a label belongs to few, and
    parts differ in size; with a large one parts are nearly alike. Every example belongs to someone, and nobody has
    none: who would, gets one of whoever has the most.
    """

    alpha: float = 0.3
    """how alike the workers' labels are: below 1 little, above 10 much"""

    def __post_init__(self) -> None:
        require_positive(self, "alpha")
        require(math.isfinite(self.alpha), f"Dirichlet.alpha must be finite, but is {self.alpha!r}; use 'sharded'")

    def indices(self, targets: Tensor, worker: int, workers: int, seed: int) -> Indices:
        labels = _labels(targets, self.name)
        _require_enough(len(labels), workers)
        rng = stream(seed, "split")
        by_label = np.argsort(labels, kind="stable")
        borders = np.flatnonzero(np.diff(labels[by_label])) + 1
        owner = np.empty(len(labels), dtype=np.int64)
        for members in np.split(by_label, borders):
            shares = np.cumsum(rng.dirichlet(np.full(workers, self.alpha)))
            cuts = np.round(shares[:-1] * len(members))
            owner[rng.permutation(members)] = np.searchsorted(cuts, np.arange(len(members)), side="right")
        _give_everyone_one(owner, workers)
        return np.flatnonzero(owner == worker % workers)


def _give_everyone_one(owner: Indices, workers: int) -> None:
    """Let whoever has nothing have the first example of whoever has the most."""
    held = np.bincount(owner, minlength=workers)
    for empty in np.flatnonzero(held == 0):
        richest = int(np.argmax(held))
        owner[np.flatnonzero(owner == richest)[0]] = empty
        held[richest] -= 1
        held[empty] = 1


def _labels(targets: Tensor, name: str) -> Indices:
    require(
        targets.dim() == 1 and is_whole(targets),
        f"the split '{name}' needs one whole number per example as its target; for other targets use 'sharded'",
    )
    return targets.numpy(force=True)


@functools.lru_cache(maxsize=8)
def _everything(count: int) -> Indices:
    """One read-only array for all workers: a thousand copies of it would be most of a simulation's memory."""
    indices = np.arange(count, dtype=np.int64)
    indices.flags.writeable = False
    return indices


def _require_enough(examples: int, workers: int) -> None:
    require(
        examples >= workers,
        f"{examples} examples cannot be divided among {workers} workers; use the split 'shared' or fewer workers",
    )
