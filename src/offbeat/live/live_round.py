"""A round of the live engine: how much to compute, and the delay that is injected."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from offbeat.core.actions import Compute, Samples, Seconds
from offbeat.engine.microbatches import next_microbatch
from offbeat.live.injected_delay import InjectedRoundDelay


@dataclass
class LiveRound:
    """The outstanding computation of a rank, with its injected delay."""

    action: Compute
    start: float
    start_monotonic: float
    """`time.monotonic()` when it was accepted, where the time limit of a `Seconds` budget starts."""
    delay: InjectedRoundDelay = InjectedRoundDelay()
    samples: int = 0
    induced_seconds: float = 0.0
    idle_seconds: float = 0.0
    cancelled: threading.Event = field(default_factory=threading.Event)

    def next_microbatch_size(self) -> int:
        """Samples of the next micro-batch; 0 if the round is over."""
        if self.cancelled.is_set():
            return 0
        budget, microbatch = self.action.budget, self.action.microbatch
        if isinstance(budget, Samples):
            return next_microbatch(self.samples, microbatch, budget.count)
        assert isinstance(budget, Seconds)
        if self.samples and time.monotonic() - self.start_monotonic >= budget.seconds:
            return 0
        return next_microbatch(self.samples, microbatch, budget.samples_max)

    def inject_delay(self) -> None:
        """Wait for the injected delay before the first micro-batch."""
        self._sleep(self.delay.delay_seconds)

    def inject_slowdown(self, seconds: float) -> None:
        """Wait for as long as this worker should be slower at a micro-batch that took `seconds`."""
        self._sleep(self.delay.slowdown_seconds(seconds))

    def _sleep(self, seconds: float) -> None:
        if seconds > 0:
            before = time.monotonic()
            self.cancelled.wait(seconds)
            self.induced_seconds += time.monotonic() - before
