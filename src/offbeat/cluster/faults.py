"""Failures by chance: machines that fail now and then, each for itself, and come back after a while."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from offbeat.core.configuration import Family
from offbeat.core.randomness import stream
from offbeat.core.validation import require, require_not_negative, require_positive


def failures(
    workers: int,
    mtbf_seconds: float,
    recovery_seconds: float,
    until_seconds: float,
    seed: int = 0,
    first_rank: int = 1,
) -> tuple[Crash, ...]:
    """Crashes for `Cluster(faults=...)`, in the order of time, of `workers` ranks from `first_rank` on.

    Each rank fails after an exponential time with this mean (MTBF), whatever the others do, is back `recovery_seconds`
    later, and may fail again from then on. `first_rank` is 1 where rank 0 is a hub that does not fail.
    """
    require(
        workers >= 0 and mtbf_seconds > 0 and recovery_seconds >= 0,
        f"failures() needs an mtbf_seconds greater than 0 and a recovery_seconds of 0 or more, "
        f"but was given {mtbf_seconds:g} and {recovery_seconds:g}, for {workers} workers",
    )
    found = []
    for rank in range(first_rank, first_rank + workers):
        random = stream(seed, "failures", rank)
        at = float(random.exponential(mtbf_seconds))
        while at < until_seconds:
            found.append(Crash(rank, at, recovery_seconds))
            at += recovery_seconds + float(random.exponential(mtbf_seconds))
    return tuple(sorted(found, key=lambda crash: crash.at_seconds))


# What goes wrong, on which rank and when. Times are seconds since the run began.


class Fault(Family, ABC):
    """One thing that goes wrong once. As a word: `crash:1:30`, `pause:2:10:5`, `partition:1+2:30:10`."""

    at_seconds: float

    @property
    @abstractmethod
    def affected(self) -> tuple[int, ...]:
        """The ranks it happens to."""

    def _check_time_and_ranks(self) -> None:
        require_not_negative(self, "at_seconds")
        require(
            len(self.affected) > 0 and all(rank >= 0 for rank in self.affected),
            f"{type(self).__name__} needs ranks that count from 0, but was given {list(self.affected)}",
        )


@dataclass(frozen=True)
class Crash(Fault, name="crash"):
    """The rank is gone with everything it held; it may come back as a new incarnation."""

    rank: int
    """the rank it happens to"""
    at_seconds: float
    """seconds after the run began"""
    back_after_seconds: float | None = None
    """seconds until it comes back; none: never"""

    def __post_init__(self) -> None:
        self._check_time_and_ranks()
        require_not_negative(self, "back_after_seconds")

    @property
    def affected(self) -> tuple[int, ...]:
        return (self.rank,)


@dataclass(frozen=True)
class Pause(Fault, name="pause"):
    """The rank stands still and then goes on where it was; messages to it wait."""

    rank: int
    """the rank it happens to"""
    at_seconds: float
    """seconds after the run began"""
    seconds: float
    """seconds that it stands still"""

    def __post_init__(self) -> None:
        self._check_time_and_ranks()
        require_positive(self, "seconds")

    @property
    def affected(self) -> tuple[int, ...]:
        return (self.rank,)


@dataclass(frozen=True)
class Partition(Fault, name="partition"):
    """These ranks reach each other, but neither reach the others nor are reached by them."""

    ranks: tuple[int, ...]
    """the ranks that are cut off together"""
    at_seconds: float
    """seconds after the run began"""
    seconds: float
    """seconds that the network is cut"""

    def __post_init__(self) -> None:
        self._check_time_and_ranks()
        require_positive(self, "seconds")

    @property
    def affected(self) -> tuple[int, ...]:
        return self.ranks


@dataclass(frozen=True)
class Corrupt(Fault, name="corrupt"):
    """Gradients of rounds that end in this span are not finite, as after a bad memory cell or an overflow."""

    rank: int
    """the rank it happens to"""
    at_seconds: float
    """seconds after the run began"""
    seconds: float
    """seconds that it lasts"""

    def __post_init__(self) -> None:
        self._check_time_and_ranks()
        require_positive(self, "seconds")

    @property
    def affected(self) -> tuple[int, ...]:
        return (self.rank,)
