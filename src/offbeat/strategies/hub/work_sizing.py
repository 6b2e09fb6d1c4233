"""How much each worker computes per round: the budget that the hub sends along with the parameters.

The target-batch controller adjusts one time limit T for all workers so that an update has B* samples:

    T ← T · (1 + gain · (B* − Σb) / B*)        the factor clipped to [½, 2]

The gain is 1/k in the k-th timed round, and 0.1 from the tenth on: the first rounds find the limit, later ones follow
drift but not noise. When workers join or are lost, T is rescaled by the rates of the live workers,
rate_i = EMA(samples_i) / EMA(seconds_i), so that the batch stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from offbeat.core.actions import Budget, Samples, Seconds
from offbeat.strategies.hub.hub_parts import Share, TargetBatch
from offbeat.strategies.node_state import Stateful

GAIN = 0.1
SMOOTHING = 0.2


@dataclass(frozen=True)
class Effort:
    """Samples that one worker has computed, and the seconds it took."""

    samples: int
    seconds: float


class WorkSizing(Stateful):
    """The same budget for every worker, always."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def budget(self, rank: int, live: Collection[int]) -> Budget:
        return self._budget

    def observe(self, efforts: Mapping[int, Effort], live: Collection[int]) -> None:
        """Account for an update that was made of these efforts, by rank."""

    def members_changed(self, live: Collection[int]) -> None:
        """A worker has joined or was lost."""


class ShareSizing(WorkSizing):
    """A total split among the live workers as evenly as possible, the remainder to the lowest ranks."""

    def __init__(self, share: Share) -> None:
        self._share = share

    def budget(self, rank: int, live: Collection[int]) -> Budget:
        ranks = sorted({*live, rank})
        each, rest = divmod(self._share.samples, len(ranks))
        return Samples(max(1, each + (ranks.index(rank) < rest)))


class TargetBatchSizing(WorkSizing):
    """The same time limit for every worker, adjusted towards a batch size."""

    limit_seconds: float | None = None
    """None until the first round has shown how fast the workers are."""
    _rounds: int = 0
    _samples: dict[int, float]
    """rank → moving average of samples per round"""
    _seconds: dict[int, float]
    """rank → moving average of seconds per round"""
    _members: frozenset[int] = frozenset()

    def __init__(self, target: TargetBatch, microbatch: int) -> None:
        self._target = target
        self._microbatch = microbatch
        self._samples, self._seconds = {}, {}

    def budget(self, rank: int, live: Collection[int]) -> Budget:
        if self.limit_seconds is None:
            return Samples(self._target.first)
        return Seconds(self.limit_seconds, samples_max=self._target.samples_max)

    def observe(self, efforts: Mapping[int, Effort], live: Collection[int]) -> None:
        for rank, effort in efforts.items():
            self._smooth(self._samples, rank, effort.samples)
            self._smooth(self._seconds, rank, effort.seconds)
        if self.limit_seconds is None:
            self.limit_seconds = self._target.samples / self._rate(live)
            self._members = frozenset(live)
        else:
            self._adjust(efforts)
        one_microbatch = self._microbatch / max(map(self._rate_of, self._samples), default=1.0)
        self.limit_seconds = max(self.limit_seconds, one_microbatch)

    def _adjust(self, efforts: Mapping[int, Effort]) -> None:
        assert self.limit_seconds is not None
        self._rounds += 1
        batch = sum(effort.samples for effort in efforts.values())
        gain = max(GAIN, 1 / self._rounds)
        step = 1 + gain * (self._target.samples - batch) / self._target.samples
        at_samples_max = all(effort.samples >= self._target.samples_max for effort in efforts.values())
        if step > 1 and at_samples_max:
            return  # samples_max ends the rounds, not the limit
        self.limit_seconds *= min(2.0, max(0.5, step))

    def members_changed(self, live: Collection[int]) -> None:
        if self.limit_seconds is not None and live and self._members:
            self.limit_seconds *= self._rate(self._members) / self._rate(live)
        self._members = frozenset(live)

    def _smooth(self, averages: dict[int, float], rank: int, value: float) -> None:
        averages[rank] = averages.get(rank, value) * (1 - SMOOTHING) + value * SMOOTHING

    def _rate_of(self, rank: int) -> float:
        return max(self._samples[rank], 1e-9) / max(self._seconds[rank], 1e-9)

    def _rate(self, ranks: Collection[int]) -> float:
        """Samples per second of these ranks together; a rank without a measurement counts as the average."""
        known = [self._rate_of(rank) for rank in self._samples]
        average = sum(known) / len(known) if known else 1.0
        return sum(self._rate_of(rank) if rank in self._samples else average for rank in sorted(ranks)) or average
