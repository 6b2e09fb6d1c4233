"""The parts of parameter-server strategies: how much a worker computes per message, and when the hub updates.

Compute: `Samples(n)` and `Seconds(t, samples_max)` are sent to workers as they are; with `Share(n)` and
`TargetBatch(n)` the hub chooses them. Collect: `AllWorkers`, `Messages`, `Every`, `Distinct`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from offbeat.core.actions import Budget, Samples
from offbeat.core.optimizers import Optimizer
from offbeat.core.validation import check_types, require_not_negative, require_positive
from offbeat.strategies.server_node import ServerStrategy


@dataclass(frozen=True)
class Share:
    """A number of samples per update over all workers, split among them as evenly as possible."""

    samples: int
    """samples per update over all workers"""

    def __post_init__(self) -> None:
        require_positive(self, "samples")


@dataclass(frozen=True)
class TargetBatch:
    """A time limit, adjusted so that all workers together compute a number of samples per update.

    The first round has a fixed number of samples, which shows how fast the workers are.
    """

    samples: int
    """samples per update over all workers"""
    first: int
    """samples per worker in the first round"""
    samples_max: int
    """samples per worker and update at the most"""

    def __post_init__(self) -> None:
        require_positive(self, "samples", "first", "samples_max")


@dataclass(frozen=True)
class CollectStatus:
    """What a `Collect` decides by."""

    live: int
    """Workers that are connected."""
    reported: int
    """Connected workers from which a message has arrived since the last update."""
    messages: int
    """Messages since the last update, from all workers."""


class Collect(ABC):
    """When the hub updates."""

    in_rank_order = False
    """Whether an update sums in the order of ranks, so that it does not depend on the order of arrival."""
    current_only = False
    """Whether gradients of older versions are dropped as late."""
    synchronous = False
    """Whether all applied gradients are of the newest version, provided that workers wait."""

    @abstractmethod
    def ready(self, status: CollectStatus) -> bool:
        """Whether to update now. Called when a message has arrived or a worker was lost."""

    def expected_staleness(self, live: int) -> float:
        """The mean staleness of gradients of `live` equally fast workers without latency."""
        return 0.0


@dataclass(frozen=True)
class AllWorkers(Collect):
    """Update when a message of every connected worker has arrived."""

    in_rank_order = True
    synchronous = True

    def ready(self, status: CollectStatus) -> bool:
        return 0 < status.live <= status.reported


@dataclass(frozen=True)
class Messages(Collect):
    """Update when a number of messages have arrived, from whichever workers."""

    count: int | None = None
    """messages per update; none: as many as there are workers"""

    def __post_init__(self) -> None:
        require_positive(self, "count")

    def ready(self, status: CollectStatus) -> bool:
        return status.messages >= (self.count or max(1, status.live))

    def expected_staleness(self, live: int) -> float:
        return max(0, live - 1) / (self.count or max(1, live))


@dataclass(frozen=True)
class Distinct(Collect):
    """Update when messages of a number of different workers have arrived; later ones of that version are dropped."""

    count: int
    """workers whose messages make an update"""

    in_rank_order = True
    current_only = True
    synchronous = True

    def __post_init__(self) -> None:
        require_positive(self, "count")

    def ready(self, status: CollectStatus) -> bool:
        return status.live > 0 and status.reported >= min(self.count, status.live)


@dataclass(frozen=True)
class Every(Collect):
    """Update at fixed times, if at least one message has arrived; updates that take long do not stretch the period."""

    seconds: float
    """seconds between updates"""

    def __post_init__(self) -> None:
        require_positive(self, "seconds")

    def ready(self, status: CollectStatus) -> bool:
        return False


@dataclass(frozen=True)
class HubSettings(ServerStrategy):
    """The fields of `Hub`, which its nodes read."""

    compute: Budget | Share | TargetBatch = Samples(256)
    """how much each worker computes per message"""
    collect: Collect = AllWorkers()
    """when the hub updates"""
    waits: bool = True
    """whether a worker waits for new parameters before it computes again"""
    optimizer: Optimizer | None = None
    """how the hub updates; none: the one that suits the workload"""
    microbatch: int = 16
    """samples per forward and backward call"""
    staleness_max: int | None = None
    """updates; gradients staler than this are dropped and counted"""
    damping: float = 1.0
    """exponent p of the factor ((1+free)/(1+staleness))^p on rate and momentum of stale gradients; 0: as published"""
    staleness_free: int | None = None
    """updates of staleness that are not damped; none: 1 for Adam and the like, 0 for SGD and for momentum"""
    in_flight_max: int = 2
    """messages a worker may have on the way before it waits for its link"""
    nonfinite_max: int = 5
    """gradients in a row from one worker that may be NaN or infinite before the run fails"""
    patience_seconds: float = 60.0
    """seconds that hub and workers wait for each other before the run fails"""
    checkpoint_interval_seconds: float | None = None
    """seconds between checkpoints that a lost worker resets all to; none: the others continue without it"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "microbatch", "in_flight_max", "nonfinite_max", "patience_seconds")
        require_positive(self, "checkpoint_interval_seconds")
        require_not_negative(self, "staleness_max", "damping", "staleness_free", "hang_factor", "hang_seconds")

    @classmethod
    def random_settings(cls, seed: int, workers: int) -> dict[str, Any]:
        return {}  # its parts are what a test chooses

    @property
    def staleness_bound(self) -> int | None:
        return 0 if self.waits and self.collect.synchronous else self.staleness_max
