"""How long a message is under way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from numpy.random import Generator

from offbeat.cluster.faults import Fault
from offbeat.cluster.stragglers import SECONDS_PER_SAMPLE, NoStragglers, Speed, StragglerModel, Trace
from offbeat.core.configuration import Configuration
from offbeat.core.validation import check_types, require, require_not_negative, require_positive


@dataclass(frozen=True)
class Link(Configuration):
    """One end's connection to the others. A message leaves for `transmit_seconds`, then travels `latency_seconds`.

    `delay_std_seconds` holds every received message |N(0, 1)| times as long; messages may overtake each other.
    """

    latency_seconds: float = 0.0
    """seconds from the last byte sent to the last byte received"""
    bytes_per_second: float | None = None
    """bandwidth in bytes per second; none: unlimited"""
    delay_std_seconds: float = 0.0
    """spread, in seconds, of the random delay of each received message"""

    def __post_init__(self) -> None:
        require_not_negative(self, "latency_seconds", "delay_std_seconds")
        require_positive(self, "bytes_per_second")

    def transmit_seconds(self, nbytes: int) -> float:
        """How long the link is busy with a message of this size."""
        return 0.0 if self.bytes_per_second is None else nbytes / self.bytes_per_second

    def draw_delay(self, rng: Generator) -> float:
        """The random delay of one received message, in seconds."""
        return abs(float(rng.standard_normal())) * self.delay_std_seconds


# One cluster: the truth for the simulator, induced delay for live runs.
#
# Workers count from 0 and are those that compute; ranks are processes, the hub among them. Speeds belong to
# workers, faults to ranks.


T = TypeVar("T")


@dataclass(frozen=True)
class WorkerOverride(Configuration):
    """What is different about some workers; a field that is none is as everywhere."""

    workers: tuple[int, ...]
    """which workers, counted from 0"""
    seconds_per_sample: float | None = None
    """seconds to differentiate one sample"""
    seconds_per_call: float | None = None
    """seconds that each micro-batch costs on top"""
    straggle: StragglerModel | None = None
    """what disturbs a round"""
    link: Link | None = None
    """its connection to the others"""
    seconds_per_round: float | None = None
    """seconds that each round costs on top"""
    speed_trace: Trace | None = None
    """how the speed varies over time, as it was recorded"""

    def __post_init__(self) -> None:
        require_not_negative(self, "seconds_per_sample", "seconds_per_call", "seconds_per_round")
        require(
            len(self.workers) > 0 and all(worker >= 0 for worker in self.workers),
            f"WorkerOverride.workers needs workers that count from 0, but is {list(self.workers)}",
        )


@dataclass(frozen=True)
class Cluster(Configuration):
    """How fast machines and links are and what goes wrong."""

    seconds_per_sample: float = SECONDS_PER_SAMPLE
    """seconds to differentiate one sample"""
    seconds_per_call: float = 0.0
    """seconds that each micro-batch costs on top"""
    seconds_per_update: float = 0.0
    """seconds that one update of the parameters takes"""
    straggle: StragglerModel = NoStragglers()
    """what disturbs a round: none, niagara, cedar, lognormal:0.5, ..."""
    factors: tuple[float, ...] = ()
    """how many times slower worker 0, 1, ... is; the rest are not"""
    workers: tuple[WorkerOverride, ...] = ()
    """what is different about some workers"""
    link: Link = Link()
    """everyone's connection to the others"""
    faults: tuple[Fault, ...] = ()
    """what goes wrong: crash:RANK:SECONDS, pause:RANK:SECONDS:SECONDS, ..."""
    crash_seen_seconds: float = 1.0
    """seconds until the others notice a closed connection"""
    silence_seconds: float = 10.0
    """seconds after which a silent peer is given up"""
    seconds_per_round: float = 0.0
    """seconds that each round costs on top: values read in, the gradient sent"""
    speed_trace: Trace | None = None
    """how the speed varies over time, as it was recorded; none: it does not"""
    measured: bool = False
    """whether speeds and links are what was measured here, which live runs do not induce"""
    size: int | None = None
    """workers that it has, for runs that do not say how many; none: any number"""

    def __post_init__(self) -> None:
        check_types(self)
        require_not_negative(self, "seconds_per_sample", "seconds_per_call", "seconds_per_update", "crash_seen_seconds")
        require_not_negative(self, "seconds_per_round")
        require_positive(self, "silence_seconds", "size")
        require(
            self.seconds_per_sample + self.seconds_per_call > 0,
            "a cluster where computing takes no time would never get anywhere; give seconds_per_sample or "
            "seconds_per_call more than 0",
        )
        require(
            all(factor > 0 for factor in self.factors),
            f"Cluster.factors must all be greater than 0, but are {list(self.factors)}",
        )

    def speed(self, worker: int) -> Speed:
        """How fast this worker is, its slow-down factor folded in."""
        mine = self._overrides(worker)
        factor = self.factors[worker] if worker < len(self.factors) else 1.0
        return Speed(
            seconds_per_sample=factor * _last((o.seconds_per_sample for o in mine), self.seconds_per_sample),
            seconds_per_call=factor * _last((o.seconds_per_call for o in mine), self.seconds_per_call),
            seconds_per_update=factor * self.seconds_per_update,
            straggle=_last((o.straggle for o in mine), self.straggle),
            seconds_per_round=factor * _last((o.seconds_per_round for o in mine), self.seconds_per_round),
            speed_trace=_last((o.speed_trace for o in mine), self.speed_trace),
        )

    def link_of(self, worker: int | None) -> Link:
        """The connection of this worker; None is the hub."""
        if worker is None:
            return self.link
        return _last((o.link for o in self._overrides(worker)), self.link)

    def link_between(self, a: int | None, b: int | None) -> Link:
        """The connection of the worker; between two workers, the worse of theirs in every respect; None is the hub."""
        ends = [self.link_of(worker) for worker in (a, b) if worker is not None] or [self.link]
        limits = [end.bytes_per_second for end in ends if end.bytes_per_second is not None]
        return Link(
            latency_seconds=max(end.latency_seconds for end in ends),
            bytes_per_second=min(limits) if limits else None,
            delay_std_seconds=max(end.delay_std_seconds for end in ends),
        )

    def check(self, processes: int, workers: int) -> None:
        """Refuse a cluster that speaks of workers or ranks that a run of this size does not have."""
        require(
            len(self.factors) <= workers,
            f"the cluster gives {len(self.factors)} factors for {_counted(workers, 'worker')}; "
            "give one factor per worker at the most",
        )
        for override in self.workers:
            require(
                max(override.workers) < workers,
                f"the cluster describes worker {max(override.workers)}, but there {_are(workers, 'worker')}, "
                "counted from 0",
            )
        for fault in self.faults:
            require(
                max(fault.affected) < processes,
                f"the fault {fault.name!r} names rank {max(fault.affected)}, but there {_are(processes, 'process')}, "
                "counted from 0",
            )

    def _overrides(self, worker: int) -> list[WorkerOverride]:
        return [override for override in self.workers if worker in override.workers]


def _last(given: Iterable[T | None], otherwise: T) -> T:
    """What was said last, so that a later override corrects an earlier one."""
    for value in given:
        otherwise = otherwise if value is None else value
    return otherwise


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('s') else 's'}"


def _are(count: int, what: str) -> str:
    return f"{'is' if count == 1 else 'are'} {_counted(count, what)}"
