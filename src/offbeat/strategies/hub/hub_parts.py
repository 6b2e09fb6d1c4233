"""The axes of the hub family: what a worker computes, and when the hub updates.

Compute: `Samples(n)` and `Seconds(t, samples_max)` are what a worker is told; `Share(n)` and `TargetBatch(n)`
tell the hub how to choose them. Collect: `AllWorkers`, `Messages`, `Every`, `Distinct`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from offbeat.core.actions import Budget, Samples
from offbeat.core.optimizers import Optimizer
from offbeat.core.validation import require_not_negative, require_positive
from offbeat.strategies.server_node import ServerStrategy


@dataclass(frozen=True)
class Share:
    """So many samples per update over all workers, split among them as evenly as it goes."""

    samples: int

    def __post_init__(self) -> None:
        require_positive(self, "samples")


@dataclass(frozen=True)
class TargetBatch:
    """A time limit, steered so that all workers together compute so many samples per update.

    The first round is a fixed one of `first` samples each, which shows how fast the workers are.
    """

    samples: int
    first: int
    samples_max: int

    def __post_init__(self) -> None:
        require_positive(self, "samples", "first", "samples_max")


@dataclass(frozen=True)
class CollectStatus:
    """What the hub knows when it asks whether to update."""

    live: int
    """Workers that are there."""
    reported: int
    """Live workers that have reported since the last update."""
    messages: int
    """Messages since the last update, whoever sent them."""


class Collect(ABC):
    """When the hub updates."""

    in_rank_order = False
    """Whether an update sums in the order of ranks, so that it does not depend on who was first."""
    current_only = False
    """Whether gradients of older versions are dropped as late."""
    synchronous = False
    """Whether workers that wait never have a gradient of an older version applied."""

    @abstractmethod
    def ready(self, status: CollectStatus) -> bool: ...


@dataclass(frozen=True)
class AllWorkers(Collect):
    """When every live worker has reported."""

    in_rank_order = True
    synchronous = True

    def ready(self, status: CollectStatus) -> bool:
        return 0 < status.live <= status.reported


@dataclass(frozen=True)
class Messages(Collect):
    """When so many messages have arrived, several of one worker allowed; None: as many as there are workers."""

    count: int | None = None

    def __post_init__(self) -> None:
        require_positive(self, "count")

    def ready(self, status: CollectStatus) -> bool:
        return status.messages >= (self.count or max(1, status.live))


@dataclass(frozen=True)
class Distinct(Collect):
    """When so many different workers have reported on this version; whoever comes later is dropped."""

    count: int

    in_rank_order = True
    current_only = True
    synchronous = True

    def __post_init__(self) -> None:
        require_positive(self, "count")

    def ready(self, status: CollectStatus) -> bool:
        return status.live > 0 and status.reported >= min(self.count, status.live)


@dataclass(frozen=True)
class Every(Collect):
    """Every so many seconds, if at least one message is there. A timer: nothing stretches the period."""

    seconds: float

    def __post_init__(self) -> None:
        require_positive(self, "seconds")

    def ready(self, status: CollectStatus) -> bool:
        return False


@dataclass(frozen=True)
class HubSettings(ServerStrategy):
    """The fields of `Hub`: all that its nodes read."""

    compute: Budget | Share | TargetBatch = Samples(256)
    """how much each worker computes per message"""
    collect: Collect = AllWorkers()
    """when the hub updates"""
    waits: bool = True
    """Whether a worker waits for an answer before it computes again."""
    optimizer: Optimizer | None = None
    """how the hub updates; none: the one that suits the workload"""
    microbatch: int = 16
    """samples per forward and backward call"""
    staleness_max: int | None = None
    """updates; gradients staler than this are dropped and counted"""
    damping: float = 0.0
    """exponent p of the weight 1/(1+staleness)^p of a stale gradient; 0: none"""
    in_flight_max: int = 2
    """messages a worker may have on the way before it waits for its link"""
    nonfinite_max: int = 5
    """gradients in a row from one worker that may be NaN or infinite before the run fails"""
    patience_seconds: float = 60.0
    """seconds that hub and workers wait for each other before they give up"""
    checkpoint_interval_seconds: float | None = None
    """Where given, a lost worker sends everybody back to the last checkpoint; None: the others go on without it."""

    def __post_init__(self) -> None:
        require_positive(self, "microbatch", "in_flight_max", "nonfinite_max", "patience_seconds")
        require_positive(self, "checkpoint_interval_seconds")
        require_not_negative(self, "staleness_max", "damping")

    @classmethod
    def random_settings(cls, seed: int, workers: int) -> dict[str, Any]:
        return {}  # the parts are what is tested

    @property
    def staleness_bound(self) -> int | None:
        return 0 if self.waits and self.collect.synchronous else self.staleness_max
