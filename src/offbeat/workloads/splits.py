"""Which examples each worker draws from."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from offbeat.configuration import Family, option
from offbeat.randomness import stream
from offbeat.validation import require, require_positive
from offbeat.workloads.examples import Indices, is_whole


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
    """Everyone has a part of its own with few labels in it.

    The examples are sorted by label and cut into `labels` pieces per worker, which are dealt out at random. A
    piece may straddle two labels, and where workers × labels is less than the number of classes, pieces hold
    several: every example belongs to someone.
    """

    labels: int = option(2, "about how many labels each worker sees")

    def __post_init__(self) -> None:
        require_positive(self, "labels")

    def indices(self, targets: Tensor, worker: int, workers: int, seed: int) -> Indices:
        require(
            targets.dim() == 1 and is_whole(targets),
            "the split 'by-label' needs one whole number per example as its target; for other targets use 'sharded'",
        )
        _require_enough(len(targets), workers)
        rng = stream(seed, "split")
        shuffled = rng.permutation(len(targets))
        by_label = shuffled[np.argsort(targets.numpy(force=True)[shuffled], kind="stable")]
        pieces_each = min(self.labels, len(targets) // workers)
        pieces = np.array_split(by_label, workers * pieces_each)
        dealt = rng.permutation(len(pieces))
        first = worker % workers * pieces_each
        return np.sort(np.concatenate([pieces[i] for i in dealt[first : first + pieces_each]]))


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
