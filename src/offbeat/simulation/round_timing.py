"""How a round spends virtual time: a delay, then micro-batches one after the other, then the fixed cost of a round.

A time limit starts with the round, before any delay, and is checked between micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbeat.cluster.stragglers import RoundDelay, Speed
from offbeat.core.actions import Budget, Compute, Samples, Seconds
from offbeat.engine.gradient_accumulator import GradientResult
from offbeat.engine.microbatches import divide, samples_after

UNDELAYED = RoundDelay(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """The timing of one round: its delay and the speed of its worker."""

    speed: Speed
    round_delay: RoundDelay
    microbatch: int
    position: int = 0
    """Samples that the worker has computed before, its position in the recorded speed trace."""
    natural_speed: Speed | None = None
    """The speed of the worker without injected slow-down; None: `speed`."""

    def seconds(self, samples: int) -> float:
        """Seconds from the start of the round until `samples` samples are done."""
        return self._seconds(samples, self.speed, self.round_delay)

    def induced_seconds(self, samples: int, elapsed: float) -> float:
        """By how many of its `elapsed` seconds injected delay and slow-down have prolonged a round of `samples`.

        Like live, where a machine cannot be made faster, a factor below 1 induces nothing.
        """
        delay_seconds, factor = self.round_delay
        if self.natural_speed is None and self.round_delay == UNDELAYED:
            return 0.0
        if not samples:
            return min(delay_seconds, elapsed)
        slow = self._seconds(samples, self.speed, RoundDelay(0.0, factor))
        natural = self._seconds(samples, self.natural_speed or self.speed, UNDELAYED)
        return min(delay_seconds + max(0.0, slow - natural), elapsed)

    def samples(self, budget: Budget) -> int:
        """How many samples a budget allows."""
        if isinstance(budget, Samples):
            return budget.count
        assert isinstance(budget, Seconds)
        return samples_after(max(1, self._calls_until(budget.seconds)), self.microbatch, budget.samples_max)

    def samples_when_cancelled(self, elapsed: float, planned: int) -> int:
        """Samples done at the first micro-batch boundary after `elapsed` seconds; 0 during the initial delay."""
        if elapsed < self.round_delay.delay_seconds:
            return 0
        return samples_after(self._calls_until(elapsed), self.microbatch, planned)

    def _seconds(self, samples: int, speed: Speed, delay: RoundDelay) -> float:
        """Seconds of a round of `samples` samples at this speed, with this delay."""
        whole, rest = divide(samples, self.microbatch)
        if speed.speed_trace is None:
            elapsed = delay.delay_seconds + whole * speed.microbatch_seconds(self.microbatch, delay.factor)
        else:
            calls = (self._call(self.microbatch, index * self.microbatch, speed, delay) for index in range(whole))
            elapsed = delay.delay_seconds + sum(calls)
        elapsed += speed.seconds_per_round * delay.factor
        return elapsed + self._call(rest, samples - rest, speed, delay) if rest else elapsed

    def _calls_until(self, elapsed: float) -> int:
        """The smallest number of micro-batches that takes at least `elapsed` seconds, the delay included."""
        left = elapsed - self.round_delay.delay_seconds
        each = self._call(self.microbatch, 0, self.speed, self.round_delay)
        if left <= 0:
            return 0
        if self.speed.speed_trace is not None and each > 0:
            return self._varying_calls_until(left)
        return math.ceil(left / each - 1e-9) if each > 0 else 1

    def _varying_calls_until(self, left: float) -> int:
        calls = 0
        while left > 1e-9:
            left -= self._call(self.microbatch, calls * self.microbatch, self.speed, self.round_delay)
            calls += 1
        return calls

    def _call(self, samples: int, done: int, speed: Speed, delay: RoundDelay) -> float:
        """Seconds of a micro-batch of `samples` samples after `done` samples of the round."""
        factor = delay.factor
        if speed.speed_trace is not None:
            factor *= speed.speed_trace.factor_at(self.position + done)
        return speed.microbatch_seconds(samples, factor)


@dataclass
class Computation:
    """The outstanding computation of a rank."""

    action: Compute
    timing: RoundTiming
    samples: int
    start: float
    ends: float
    parameters_version: int
    """torch's version counter of the parameters at the start, to detect a node that changes them meanwhile"""
    paused: float = 0.0
    """Seconds of the round during which the process was paused, or that evaluations took from it."""
    slowed_since: float | None = None
    """From when on the round is slower by `slowdown`, because of an evaluation; None: it is not."""
    slowdown: float = 1.0
    cancelled: bool = False
    hung_until: float = 0.0
    """When a hang of the round ends, which `Cancel` cannot end."""
    computed: tuple[int, GradientResult] | None = None
    """The gradient, if it was computed with those of other rounds, and of how many samples."""

    def lost_seconds(self, now: float) -> float:
        """Seconds from the start of the round until `now` in which nothing was computed."""
        if self.slowed_since is None:
            return self.paused
        return self.paused + max(0.0, now - self.slowed_since) * (1.0 - 1.0 / self.slowdown)

    def slow_down(self, factor: float, now: float) -> None:
        """An evaluation begins; it does not prolong the delay before the first micro-batch."""
        self.slowdown, self.slowed_since = factor, max(now, self.start + self.timing.round_delay.delay_seconds)

    def speed_up(self, now: float) -> None:
        """No evaluation is under way any more."""
        self.paused, self.slowed_since, self.slowdown = self.lost_seconds(now), None, 1.0

    def end_of(self, samples: int) -> float:
        """When so many samples are done, at the present speed."""
        end = self.start + self.paused + self.timing.seconds(samples)
        if self.slowed_since is None or end <= self.slowed_since:
            return end
        return self.slowed_since + (end - self.slowed_since) * self.slowdown

    def done_seconds(self, now: float) -> float:
        """Seconds of the round in which something was computed, its delay included."""
        return now - self.start - self.lost_seconds(now)

    def fit(self, done: float) -> None:
        """Set the end anew, after time was lost. The limit of a `Seconds` budget stays, so fewer samples may fit.

        done: seconds in which something has been computed.
        """
        budget = self.action.budget
        if isinstance(budget, Seconds):
            left = max(budget.seconds - self.lost_seconds(self.start + budget.seconds), done, 1e-9)
            samples = self.timing.samples(Seconds(left, samples_max=budget.samples_max))
            self.samples = min(self.samples, samples) if self.cancelled else samples
        self.ends = self.end_of(self.samples)
