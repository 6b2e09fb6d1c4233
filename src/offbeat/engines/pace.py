"""How a round spends virtual time: a delay, then micro-batches one after the other.

The clock of a time limit starts with the round, before any delay; it is looked at between micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbeat.actions import Budget, Samples, Seconds
from offbeat.cluster.speeds import Disturbance, Speed


@dataclass(frozen=True, slots=True)
class Pace:
    """One round's disturbance at one worker's speed."""

    speed: Speed
    disturbance: Disturbance
    microbatch: int

    def seconds(self, samples: int) -> float:
        """Seconds from the start of the round until so many samples are done."""
        whole, rest = divmod(samples, self.microbatch)
        elapsed = self.disturbance.delay_seconds + whole * self._call(self.microbatch)
        return elapsed + self._call(rest) if rest else elapsed

    def samples(self, budget: Budget) -> int:
        """How many samples this budget allows."""
        if isinstance(budget, Samples):
            return budget.count
        assert isinstance(budget, Seconds)
        samples = max(1, self._calls_until(budget.seconds)) * self.microbatch
        return samples if budget.samples_max is None else min(samples, budget.samples_max)

    def samples_when_cancelled(self, elapsed: float, planned: int) -> int:
        """How many are done at the first boundary after so many seconds; none while it is still held up."""
        if elapsed < self.disturbance.delay_seconds:
            return 0
        return min(planned, self._calls_until(elapsed) * self.microbatch)

    def _calls_until(self, elapsed: float) -> int:
        """The smallest number of micro-batches that takes at least so many seconds."""
        left = elapsed - self.disturbance.delay_seconds
        each = self._call(self.microbatch)
        if left <= 0:
            return 0
        return math.ceil(left / each - 1e-9) if each > 0 else 1

    def _call(self, samples: int) -> float:
        return self.speed.microbatch_seconds(samples, self.disturbance.factor)
