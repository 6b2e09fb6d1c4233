"""A cluster: speed of workers, links and faults. The simulator follows it; live runs inject its delays.

Workers count from 0 and are the ranks that compute; ranks are processes, including a hub. Speeds belong to workers,
faults to ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.random import Generator

from offbeat.cluster.faults import Fault
from offbeat.cluster.stragglers import SECONDS_PER_SAMPLE, NoStragglers, Speed, StragglerModel, Trace
from offbeat.core.configuration import Configuration
from offbeat.core.notebook_html import ShownAsHtml
from offbeat.core.validation import check_types, require, require_not_negative, require_positive


@dataclass(frozen=True)
class Link(Configuration):
    """The network connection of a rank. A message takes `transmit_seconds` to send, then `latency_seconds` to arrive.

    Every received message is delayed by another |N(0, 1)| · `delay_std_seconds`, so messages may arrive out of order.
    """

    latency_seconds: float = 0.0
    """seconds from the last byte sent to the last byte received"""
    bytes_per_second: float | None = None
    """bandwidth in bytes per second; none: unlimited"""
    delay_std_seconds: float = 0.0
    """scale, in seconds, of the random delay of each received message"""

    def __post_init__(self) -> None:
        require_not_negative(self, "latency_seconds", "delay_std_seconds")
        require_positive(self, "bytes_per_second")

    def transmit_seconds(self, nbytes: int) -> float:
        """The time that the link is busy with a message of this size."""
        return 0.0 if self.bytes_per_second is None else nbytes / self.bytes_per_second

    def draw_delay(self, rng: Generator) -> float:
        """The random delay of one received message, in seconds."""
        return abs(float(rng.standard_normal())) * self.delay_std_seconds


@dataclass(frozen=True)
class WorkerOverride(Configuration):
    """Settings of some workers that differ from those of the cluster; none: those of the cluster."""

    workers: tuple[int, ...]
    """which workers, counted from 0"""
    seconds_per_sample: float | None = None
    """seconds per sample of a gradient"""
    seconds_per_call: float | None = None
    """additional seconds per micro-batch"""
    straggle: StragglerModel | None = None
    """straggler model of the rounds"""
    link: Link | None = None
    """network connection"""
    seconds_per_round: float | None = None
    """additional seconds per round"""
    speed_trace: Trace | None = None
    """recorded variation of the speed over time"""
    is_remote: bool = False
    """whether evaluations run on another machine, and take no core from these workers"""

    def __post_init__(self) -> None:
        require_not_negative(self, "seconds_per_sample", "seconds_per_call", "seconds_per_round")
        require(
            len(self.workers) > 0 and all(worker >= 0 for worker in self.workers),
            f"WorkerOverride.workers needs workers that count from 0, but is {list(self.workers)}",
        )


class EvaluationSlowdown(NamedTuple):
    """The factors by which an evaluation beside rounds takes longer, and rounds beside an evaluation."""

    evaluation: float
    round: float


@dataclass(frozen=True)
class Cluster(Configuration, ShownAsHtml):
    """Speed of workers and links, stragglers and faults."""

    seconds_per_sample: float = SECONDS_PER_SAMPLE
    """seconds per sample of a gradient"""
    seconds_per_call: float = 0.0
    """additional seconds per micro-batch"""
    seconds_per_update: float = 0.0
    """seconds per update of the parameters"""
    straggle: StragglerModel = NoStragglers()
    """straggler model of the rounds: none, niagara, cedar, lognormal:0.5, ..."""
    factors: tuple[float, ...] = ()
    """slow-down factors of worker 0, 1, ...; 1 for the rest"""
    workers: tuple[WorkerOverride, ...] = ()
    """settings of some workers that differ"""
    link: Link = Link()
    """network connection of every rank"""
    faults: tuple[Fault, ...] = ()
    """faults: crash:RANK:SECONDS, pause:RANK:SECONDS:SECONDS, ..."""
    crash_seen_seconds: float = 1.0
    """seconds until peers detect a closed connection"""
    silence_seconds: float = 10.0
    """seconds without a message after which a peer counts as lost"""
    seconds_per_round: float = 0.0
    """additional seconds per round: copying parameters in, sending the gradient"""
    speed_trace: Trace | None = None
    """recorded variation of the speed over time; none: it is constant"""
    measured: bool = False
    """whether speeds and links were measured on this machine; live runs then inject stragglers only"""
    size: int | None = None
    """default number of workers; none: any number"""
    seconds_per_evaluation: float = 0.0
    """seconds of one core that an evaluation takes; 0: none"""
    seconds_per_worker_update: float | None = None
    """seconds per update by a rank that computes, too, as in gossip; none: `seconds_per_update`"""
    cores: int | None = None
    """cores that workers and evaluations share; none: evaluations have one of their own"""

    def __post_init__(self) -> None:
        check_types(self)
        require_not_negative(self, "seconds_per_sample", "seconds_per_call", "seconds_per_update", "seconds_per_round")
        require_not_negative(self, "crash_seen_seconds", "seconds_per_evaluation", "seconds_per_worker_update")
        require_positive(self, "silence_seconds", "size", "cores")
        require(
            self.seconds_per_sample + self.seconds_per_call > 0,
            "a cluster where computing takes no time cannot be simulated; give seconds_per_sample or "
            "seconds_per_call more than 0",
        )
        require(
            all(factor > 0 for factor in self.factors),
            f"Cluster.factors must all be greater than 0, but are {list(self.factors)}",
        )

    def speed(self, worker: int) -> Speed:
        """The speed of a worker, including its slow-down factor."""
        factor = self.factors[worker] if worker < len(self.factors) else 1.0
        update = self.seconds_per_worker_update
        return Speed(
            seconds_per_sample=factor * self._setting("seconds_per_sample", worker),
            seconds_per_call=factor * self._setting("seconds_per_call", worker),
            seconds_per_update=factor * (self.seconds_per_update if update is None else update),
            straggle=self._setting("straggle", worker),
            seconds_per_round=factor * self._setting("seconds_per_round", worker),
            speed_trace=self._setting("speed_trace", worker),
        )

    def natural_speed(self, worker: int) -> Speed:
        """The speed of a worker without what live runs inject to slow it down.

        If the speeds were measured, that is its own speed without its slow-down factor; otherwise the speed of the
        cluster. Costs per round and recorded variation are never injected, so they are its own.
        """
        own = self.measured
        return Speed(
            seconds_per_sample=self._setting("seconds_per_sample", worker) if own else self.seconds_per_sample,
            seconds_per_call=self._setting("seconds_per_call", worker) if own else self.seconds_per_call,
            seconds_per_round=self._setting("seconds_per_round", worker),
            speed_trace=self._setting("speed_trace", worker),
        )

    def is_remote(self, worker: int) -> bool:
        """Whether a worker is on another machine than evaluations."""
        return any(worker in override.workers and override.is_remote for override in self.workers)

    def evaluation_slowdown(self, workers: int) -> EvaluationSlowdown:
        """How evaluations and the rounds of so many workers slow each other down, if each gets the same share of cores.

        Rounds are as slow as they are because the workers share the cores already.
        """
        sharing = sum(not self.is_remote(worker) for worker in range(workers))
        if self.cores is None or not sharing:
            return EvaluationSlowdown(1.0, 1.0)
        beside = max(1.0, (sharing + 1) / self.cores)
        return EvaluationSlowdown(beside, beside / max(1.0, sharing / self.cores))

    def link_of(self, worker: int | None) -> Link:
        """The link of a worker; None is the hub."""
        link: Link = self.link if worker is None else self._setting("link", worker)
        return link

    def link_between(self, a: int | None, b: int | None) -> Link:
        """The link between two ranks: that of the worker; between two workers, the worse of both. None is the hub."""
        ends = [self.link_of(worker) for worker in (a, b) if worker is not None] or [self.link]
        limits = [end.bytes_per_second for end in ends if end.bytes_per_second is not None]
        return Link(
            latency_seconds=max(end.latency_seconds for end in ends),
            bytes_per_second=min(limits) if limits else None,
            delay_std_seconds=max(end.delay_std_seconds for end in ends),
        )

    def check(self, processes: int, workers: int) -> None:
        """Raise ConfigurationError if the cluster names workers or ranks that a run of this size does not have."""
        require(
            len(self.factors) <= workers,
            f"the cluster gives {len(self.factors)} factors for {_counted(workers, 'worker')}; "
            "give at most one factor per worker",
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

    def _setting(self, name: str, worker: int) -> Any:
        """The value of a field for a worker; the last override takes precedence."""
        overrides = [getattr(override, name) for override in self.workers if worker in override.workers]
        return next((value for value in reversed(overrides) if value is not None), getattr(self, name))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith('s') else 's'}"


def _are(count: int, what: str) -> str:
    return f"{'is' if count == 1 else 'are'} {_counted(count, what)}"
