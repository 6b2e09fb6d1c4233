"""Faults: which rank fails, how and when. Times are in seconds since the run began."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from offbeat.core.configuration import Family
from offbeat.core.randomness import stream
from offbeat.core.validation import require, require_not_negative, require_positive


class Fault(Family, ABC):
    """A fault that happens once. Shorthand: `crash:1:30`, `pause:2:10:5`, `partition:1+2:30:10`."""

    at_seconds: float

    @property
    @abstractmethod
    def affected(self) -> tuple[int, ...]:
        """The ranks that it happens to."""

    def __post_init__(self) -> None:
        require_not_negative(self, "at_seconds")
        require(
            len(self.affected) > 0 and all(rank >= 0 for rank in self.affected),
            f"{type(self).__name__} needs ranks that count from 0, but was given {list(self.affected)}",
        )


@dataclass(frozen=True)
class RankFault(Fault):
    """The base class of faults of a single rank."""

    rank: int
    """the rank it happens to"""
    at_seconds: float
    """seconds after the run began"""

    @property
    def affected(self) -> tuple[int, ...]:
        return (self.rank,)


@dataclass(frozen=True)
class Crash(RankFault, name="crash"):
    """The process of the rank ends and its state is lost; it may be restarted as a new incarnation."""

    back_after_seconds: float | None = None
    """seconds until it is restarted; none: never"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(self, "back_after_seconds")


@dataclass(frozen=True)
class _Temporary(RankFault):
    seconds: float
    """seconds that it lasts"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "seconds")


@dataclass(frozen=True)
class Pause(_Temporary, name="pause"):
    """The process of the rank is suspended and then continues; messages to it wait."""


@dataclass(frozen=True)
class Hang(_Temporary, name="hang"):
    """The computation of the rank hangs, as on a stalled file system; its process and its links are alive."""


@dataclass(frozen=True)
class Partition(Fault, name="partition"):
    """A network partition: these ranks can reach each other, but no other rank."""

    ranks: tuple[int, ...]
    """the ranks on one side of the partition"""
    at_seconds: float
    """seconds after the run began"""
    seconds: float
    """seconds that it lasts"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "seconds")

    @property
    def affected(self) -> tuple[int, ...]:
        return self.ranks


@dataclass(frozen=True)
class Corrupt(_Temporary, name="corrupt"):
    """Gradients of rounds that end in this time are not finite, as after a memory error or an overflow."""


def failures(
    workers: int,
    mtbf_seconds: float,
    recovery_seconds: float,
    until_seconds: float,
    seed: int = 0,
    first_rank: int = 1,
) -> tuple[Crash, ...]:
    """Random crashes for `Cluster(faults=...)`, in the order of time, independent for each rank.

    workers: number of ranks that can fail
    mtbf_seconds: mean time between failures of a rank, exponentially distributed
    recovery_seconds: time from a crash to the restart, after which the rank may fail again
    until_seconds: end of the time in which crashes are drawn
    seed: seed of the random times
    first_rank: the lowest rank that can fail; 1 if rank 0 is a hub that does not fail
    """
    require(
        workers >= 0 and mtbf_seconds > 0 and recovery_seconds >= 0,
        f"failures() needs an mtbf_seconds greater than 0 and a recovery_seconds of 0 or more, "
        f"but was given {mtbf_seconds:g} and {recovery_seconds:g}, for {workers} workers",
    )
    crashes = []
    for rank in range(first_rank, first_rank + workers):
        random = stream(seed, "failures", rank)
        at = float(random.exponential(mtbf_seconds))
        while at < until_seconds:
            crashes.append(Crash(rank, at, recovery_seconds))
            at += recovery_seconds + float(random.exponential(mtbf_seconds))
    return tuple(sorted(crashes, key=lambda crash: crash.at_seconds))
