"""The probes of a calibration: short live runs, which divide its time among them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from offbeat.cluster.cluster import Cluster
from offbeat.core.actions import Seconds
from offbeat.core.strategy import Strategy
from offbeat.core.workload import NamedWorkload, Workload
from offbeat.engine.experiment import Experiment
from offbeat.lab.live_runs import train_experiment
from offbeat.launch.run_monitor import RunObserver
from offbeat.live.session_options import LiveOptions
from offbeat.records.schema import RunRecords
from offbeat.strategies.hub.hub_strategies import AsyncFixed

CALLS_PER_ROUND = 16
"""Micro-batches in the rounds that show how the speed varies: as many as in a round of fmb by default."""
LARGE_MICROBATCH_FACTOR = 4
"""The size of large micro-batches as a multiple, to separate the cost of samples from that of calls."""
REPETITIONS = 3
DELAYED_SHARES = 3
"""How many times longer rounds with injected delay are measured: they sleep most of the time."""
LINK_PROBES = 2
WARM_UP_SECONDS = 0.4
"""Left out: memory is touched for the first time, and torch loads parts of itself."""
START_SECONDS = 1.0
"""How long the processes of a probe take to start and to end, until it has been measured."""
PROBE_SECONDS_MIN = 0.8
"""The least duration of a probe; there are fewer repetitions where there is no time for it."""
ROUNDS_PER_PROBE = 5
"""Rounds of the usual shape for which a probe should have time after its warm-up."""

OnProbe = Callable[[int, int, str], None]
"""Called when a probe begins, with its number, the number of probes, and what it measures."""


@dataclass(frozen=True)
class RoundShape:
    """The division of a round: calls, and samples per call."""

    microbatch: int
    calls: int

    @property
    def samples(self) -> int:
        return self.microbatch * self.calls

    @property
    def text(self) -> str:
        """What is measured, in words."""
        return f"rounds of {self.calls} × {self.microbatch} samples"

    @property
    def strategy(self) -> AsyncFixed:
        """The strategy whose rounds have this shape."""
        return AsyncFixed(batch=self.samples, microbatch=self.microbatch)


@dataclass(frozen=True)
class ProbeKinds:
    """Which kinds of probes there are besides those of rounds, updates and links."""

    delayed: bool
    """rounds with injected delay"""
    gossip: bool
    """updates by the ranks that compute"""

    @property
    def probes(self) -> int:
        """Probes of one repetition."""
        return 4 + self.delayed + self.gossip

    @property
    def shares(self) -> int:
        """Shares of the time that one repetition takes."""
        return 4 + DELAYED_SHARES * self.delayed + self.gossip


class ProbeRunner:
    """Runs probes, which divide the time of a calibration among them.

    workers: how many workers compute.
    seconds: the time of all probes, from now on.
    kinds: which probes there are.
    live: how processes are started and connected.
    watcher: observes the processes.
    on_probe: called when a probe begins.
    """

    def __init__(
        self,
        workers: int,
        seconds: float,
        kinds: ProbeKinds,
        live: LiveOptions,
        watcher: RunObserver | None,
        on_probe: OnProbe | None,
    ) -> None:
        self.repetitions = REPETITIONS
        """How often each kind of round is measured."""
        self._kinds = kinds
        self._workers, self._watcher, self._on_probe = workers, watcher, on_probe
        # Every round is measured, so that none may be aggregated.
        self._live = dataclasses.replace(live, checkpoint_seconds=None, records_max_bytes=None)
        self._ends = time.monotonic() + seconds
        self._begun = self._shares_begun = 0
        self._start_seconds = START_SECONDS

    def run(
        self,
        workload: NamedWorkload | Workload,
        strategy: Strategy,
        what: str,
        cluster: Cluster | None = None,
        shares: int = 1,
    ) -> RunRecords:
        """Run a probe for `shares` equal shares of the time that is left."""
        if self._on_probe is not None:
            self._on_probe(self._begun + 1, self._probes(self.repetitions), what)
        seconds = max(PROBE_SECONDS_MIN, shares * self._share_seconds(self.repetitions))
        experiment = Experiment(
            workload,
            strategy,
            cluster=cluster or Cluster(),
            workers=self._workers,
            until=Seconds(seconds),
            evaluate=None,
        )
        began = time.monotonic()
        records = train_experiment(experiment, None, self._live, self._watcher).records
        self._note_start(time.monotonic() - began - seconds)
        self._begun += 1
        self._shares_begun += shares
        return records

    def choose_calls(self, seconds_per_call: float) -> int:
        """The micro-batches of usual rounds; sets how often rounds are measured.

        seconds_per_call: the time of a round of one micro-batch.
        """
        for repetitions in range(REPETITIONS, 0, -1):
            share = self._share_seconds(repetitions)
            seconds = max(PROBE_SECONDS_MIN, share) - WARM_UP_SECONDS
            self.repetitions, fitting = repetitions, int(seconds / ROUNDS_PER_PROBE / seconds_per_call)
            if share >= PROBE_SECONDS_MIN and fitting >= LARGE_MICROBATCH_FACTOR:
                break
        return max(2, min(CALLS_PER_ROUND, fitting))

    def _share_seconds(self, repetitions: int) -> float:
        """One share of the time that is left, without the time in which processes start."""
        starts = (self._probes(repetitions) - self._begun) * self._start_seconds
        shares = repetitions * self._kinds.shares + LINK_PROBES - self._shares_begun
        return (self._ends - time.monotonic() - starts) / shares

    def _probes(self, repetitions: int) -> int:
        return repetitions * self._kinds.probes + LINK_PROBES

    def _note_start(self, seconds: float) -> None:
        """Remember how long processes took to start and to end; the first time that workers elsewhere took to join."""
        if not self._begun and self._live.listen is not None:
            self._ends += max(0.0, seconds - START_SECONDS)
        elif not self._begun:
            self._start_seconds = seconds
        else:
            self._start_seconds += (seconds - self._start_seconds) / 2
