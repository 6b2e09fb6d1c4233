"""A live computation: how far it may go, and how it is held up on purpose."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from offbeat.actions import Compute, Samples, Seconds


@dataclass
class LiveRound:
    """The outstanding computation: what was asked for, since when, and how it is held up."""

    action: Compute
    start: float
    began: float
    """When it was accepted, by the machine's own clock: there the anytime clock starts."""
    delay_seconds: float
    factor: float
    call_seconds: float
    samples: int = 0
    induced_seconds: float = 0.0
    idle_seconds: float = 0.0
    cancelled: threading.Event = field(default_factory=threading.Event)

    def wanted(self) -> int:
        """How many samples the next micro-batch has; 0 where the round is over."""
        if self.cancelled.is_set():
            return 0
        budget, microbatch = self.action.budget, self.action.microbatch
        if isinstance(budget, Samples):
            return min(microbatch, budget.count - self.samples)
        assert isinstance(budget, Seconds)
        if self.samples and time.monotonic() - self.began >= budget.seconds:
            return 0
        return microbatch if budget.samples_max is None else min(microbatch, budget.samples_max - self.samples)

    def hold_up(self) -> None:
        """The induced delay before the first micro-batch."""
        self._sleep(self.delay_seconds)

    def stretch(self, seconds: float) -> None:
        """A micro-batch took so many seconds; let it have taken as much longer as this worker is slower."""
        self._sleep(seconds * (self.factor - 1.0) + self.call_seconds)

    def _sleep(self, seconds: float) -> None:
        if seconds > 0:
            before = time.monotonic()
            self.cancelled.wait(seconds)
            self.induced_seconds += time.monotonic() - before
