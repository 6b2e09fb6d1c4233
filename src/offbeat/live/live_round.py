"""A round of the live engine: how much to compute, and the delay that is injected."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from offbeat.core.actions import Compute, Samples, Seconds
from offbeat.engine.microbatches import next_microbatch
from offbeat.live.clock import Clock
from offbeat.live.injected_delay import InjectedRoundDelay


@dataclass
class LiveRound:
    """The outstanding computation of a rank, with its injected delay."""

    action: Compute
    clock: Clock
    start: float
    """When it was accepted, in seconds of the run; the time limit of a `Seconds` budget starts then."""
    delay: InjectedRoundDelay = InjectedRoundDelay()
    hang_seconds: Callable[[float], float] = lambda now: 0.0
    """For how long the computation hangs if it goes on at a time."""
    samples: int = 0
    induced_seconds: float = 0.0
    cancelled: threading.Event = field(default_factory=threading.Event)

    def next_microbatch_size(self) -> int:
        """Samples of the next micro-batch; 0 if the round is over."""
        if self.cancelled.is_set():
            return 0
        budget, microbatch = self.action.budget, self.action.microbatch
        if isinstance(budget, Samples):
            return next_microbatch(self.samples, microbatch, budget.count)
        assert isinstance(budget, Seconds)
        if self.samples and self.clock.now() - self.start >= budget.seconds:
            return 0
        return next_microbatch(self.samples, microbatch, budget.samples_max)

    def inject_delay(self) -> None:
        """Wait for the injected delay before the first micro-batch; `Cancel` ends it."""
        self._wait(self.delay.delay_seconds, self.cancelled)

    def inject_hang(self) -> None:
        """Wait until the end of a hang that is due now; `Cancel` does not end it."""
        self._wait(self.hang_seconds(self.clock.now()), threading.Event())

    def inject_slowdown(self, seconds: float) -> None:
        """Wait for as long as this worker should be slower at a micro-batch that took `seconds`.

        As on a worker that is slow by itself, the micro-batch ends before `Cancel` takes effect.
        """
        self._wait(self.delay.slowdown_seconds(seconds), threading.Event())

    def _wait(self, seconds: float, until: threading.Event) -> None:
        if seconds > 0:
            before = self.clock.now()
            self.clock.wait(until, seconds)
            self.induced_seconds += self.clock.now() - before
