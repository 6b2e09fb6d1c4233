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
from offbeat.core.validation import require, require_field, require_positive


class Split(Family, ABC):
    """How the training examples are divided among the workers."""

    @abstractmethod
    def indices(self, targets: Tensor, worker: int, workers: int, seed: int) -> Indices:
        """The indices of the examples of a worker.

        targets: the targets of all examples
        worker: the worker; one beyond `workers`, which joined later, has the examples of worker modulo workers
        workers: the number of workers at the start
        seed: the seed of the run
        """


@dataclass(frozen=True)
class Shared(Split, name="shared"):
    """Every worker draws from all examples, each in its own order."""

    def indices(self, targets: Tensor, worker: int, workers: int, seed: int) -> Indices:
        return _all_indices(len(targets))


@dataclass(frozen=True)
class Sharded(Split, name="sharded"):
    """Every worker has its own random part; sizes differ by at most one."""

    def indices(self, targets: Tensor, worker: int, workers: int, seed: int) -> Indices:
        _require_enough(len(targets), workers)
        shuffled = stream(seed, "split").permutation(len(targets))
        return np.sort(shuffled[worker % workers :: workers])


@dataclass(frozen=True)
class ByLabel(Split, name="by-label"):
    """Every worker has its own part with few labels: the shards of federated averaging.

    The examples are sorted by label and cut into `labels` shards per worker, which are assigned at random. A shard may
    contain two labels, or more if workers × labels is less than the number of classes: every example is assigned.
    """

    labels: int = 2
    """approximate number of labels per worker"""

    def __post_init__(self) -> None:
        require_positive(self, "labels")

    def indices(self, targets: Tensor, worker: int, workers: int, seed: int) -> Indices:
        labels = _labels(targets, self.name)
        _require_enough(len(targets), workers)
        rng = stream(seed, "split")
        shuffled = rng.permutation(len(targets))
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        shards_each = min(self.labels, len(targets) // workers)
        shards = np.array_split(by_label, workers * shards_each)
        assigned = rng.permutation(len(shards))
        first = worker % workers * shards_each
        return np.sort(np.concatenate([shards[i] for i in assigned[first : first + shards_each]]))


@dataclass(frozen=True)
class ByGroup(Split, name="by-group"):
    """Every worker has its own whole groups: plays, presidents or decades of a text, labels of images.

    The groups are dealt out at random, to each worker as many, or one less. Parts are as uneven as the groups are.
    """

    def indices(self, targets: Tensor, worker: int, workers: int, seed: int) -> Indices:
        labels = _labels(targets, self.name)
        groups, group_of = np.unique(labels, return_inverse=True)
        require(
            len(groups) >= workers,
            f"{len(groups)} groups cannot be divided among {workers} workers; use the split 'sharded' or fewer workers",
        )
        dealt = stream(seed, "split").permutation(len(groups))
        return np.flatnonzero(np.isin(group_of, dealt[worker % workers :: workers]))


@dataclass(frozen=True)
class Dirichlet(Split, name="dirichlet"):
    """Every worker has its own part, with a random share of each label.

    The shares of a label follow a Dirichlet distribution: with a small `alpha`, few workers have most of a label, and
    parts differ in size; with a large one, parts are nearly alike. Every example is assigned, and every worker has at
    least one: a worker without any gets one from the worker with the most.
    """

    alpha: float = 0.3
    """how alike the labels of workers are: below 1 little, above 10 much"""

    def __post_init__(self) -> None:
        require_positive(self, "alpha")
        require_field(self, "alpha", math.isfinite(self.alpha), f"must be finite, but is {self.alpha!r}; use 'sharded'")

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
        _fill_empty_parts(owner, workers)
        return np.flatnonzero(owner == worker % workers)


def _fill_empty_parts(owner: Indices, workers: int) -> None:
    """Assign to each worker without examples the first example of the worker with the most."""
    held = np.bincount(owner, minlength=workers)
    for empty in np.flatnonzero(held == 0):
        largest = int(np.argmax(held))
        owner[np.flatnonzero(owner == largest)[0]] = empty
        held[largest] -= 1
        held[empty] = 1


def _labels(targets: Tensor, name: str) -> Indices:
    require(
        targets.dim() == 1 and is_whole(targets),
        f"the split '{name}' needs one whole number per example as its target; for other targets use 'sharded'",
    )
    return targets.numpy(force=True)


@functools.lru_cache(maxsize=8)
def _all_indices(count: int) -> Indices:
    """One read-only array for all workers, since copies for a thousand would be most of the memory of a simulation."""
    indices = np.arange(count, dtype=np.int64)
    indices.flags.writeable = False
    return indices


def _require_enough(examples: int, workers: int) -> None:
    require(
        examples >= workers,
        f"{examples} examples cannot be divided among {workers} workers; use the split 'shared' or fewer workers",
    )
