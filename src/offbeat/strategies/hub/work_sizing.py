"""How much each worker is told to compute. The budget travels with the parameters.

The target-batch controller steers one time limit T for all workers so that an update has B* samples:

    T ← T · (1 + gain · (B* − Σb) / B*)        the step clipped to [½, 2]

with gain 1/k in the k-th timed round until it has fallen to 0.1, where it stays: the first rounds find the
limit, the later ones follow drift without chasing noise. When workers come or go, T is rescaled by the live
rates rate_i = EMA(samples_i) / EMA(seconds_i), so that the batch stays what it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.core.actions import Budget, Samples, Seconds
from offbeat.strategies.hub.hub_parts import Share, TargetBatch

GAIN = 0.1
SMOOTHING = 0.2


@dataclass(frozen=True)
class Effort:
    """What one worker did in a round."""

    samples: int
    seconds: float


class WorkSizing:
    """The same budget for every worker, always."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def budget(self, rank: int, live: Collection[int]) -> Budget:
        return self._budget

    def observe(self, efforts: Mapping[int, Effort], live: Collection[int]) -> None:
        """An update was made of these efforts."""

    def members_changed(self, live: Collection[int]) -> None:
        """A worker has come or gone."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


class ShareSizing(WorkSizing):
    """A total split among the live workers as evenly as it goes, the remainder to the lowest ranks."""

    def __init__(self, share: Share) -> None:
        self._share = share

    def budget(self, rank: int, live: Collection[int]) -> Budget:
        ranks = sorted({*live, rank})
        each, rest = divmod(self._share.samples, len(ranks))
        return Samples(max(1, each + (ranks.index(rank) < rest)))


class TargetBatchSizing(WorkSizing):
    """One time limit for all, steered towards a batch size."""

    def __init__(self, target: TargetBatch, microbatch: int) -> None:
        self._target = target
        self._microbatch = microbatch
        self.limit_seconds: float | None = None
        self._rounds = 0
        self._samples: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        self._members: frozenset[int] = frozenset()

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
            self._steer(efforts)
        slowest_useful = self._microbatch / max(map(self._rate_of, self._samples), default=1.0)
        self.limit_seconds = max(self.limit_seconds, slowest_useful)

    def _steer(self, efforts: Mapping[int, Effort]) -> None:
        assert self.limit_seconds is not None
        self._rounds += 1
        batch = sum(effort.samples for effort in efforts.values())
        gain = max(GAIN, 1 / self._rounds)
        step = 1 + gain * (self._target.samples - batch) / self._target.samples
        at_cap = all(effort.samples >= self._target.samples_max for effort in efforts.values())
        if step > 1 and at_cap:
            return  # more time would not give more samples
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
        """Samples per second of these ranks together; one that is not known yet counts as the average."""
        known = [self._rate_of(rank) for rank in self._samples]
        average = sum(known) / len(known) if known else 1.0
        return sum(self._rate_of(rank) if rank in self._samples else average for rank in sorted(ranks)) or average

    def state(self) -> dict[str, Any]:
        return {
            "limit_seconds": self.limit_seconds,
            "rounds": self._rounds,
            "samples": {str(rank): value for rank, value in self._samples.items()},
            "seconds": {str(rank): value for rank, value in self._seconds.items()},
            "members": sorted(self._members),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.limit_seconds = state["limit_seconds"]
        self._rounds = state["rounds"]
        self._samples = {int(rank): value for rank, value in state["samples"].items()}
        self._seconds = {int(rank): value for rank, value in state["seconds"].items()}
        self._members = frozenset(state["members"])
