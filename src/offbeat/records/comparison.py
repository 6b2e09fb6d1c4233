"""Many runs side by side: strategies over seeds, timed against the same target.

Runs are paired by seed, because the seed also draws who straggles when: two strategies that met the same bad
luck differ by less than their seconds alone suggest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from offbeat.core.workload import Target
from offbeat.errors import ConfigurationError, unknown
from offbeat.records.metrics import Summary, finite, summarize, target_of
from offbeat.records.schema import RunRecords

CONFIDENCE = 0.95
CUSTOMARY_BASELINE = "fmb"


@dataclass(frozen=True)
class Interval:
    """A mean over `count` values with its 95% Student-t interval; one value alone has none."""

    mean: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Speedup:
    """How many times sooner the target was reached than by the baseline, or with how many times fewer bytes.

    Above 1 is sooner, or fewer. `pairs` seeds went into it, and `missed` more did not, for want of a number to compare
    on either side.
    """

    mean: float
    low: float | None
    high: float | None
    pairs: int
    missed: int


def interval(values: Iterable[float | None]) -> Interval | None:
    """The mean and its interval over what is there; None where nothing is."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = statistics.fmean(known)
    if len(known) == 1:
        return Interval(mean, None, None, 1)
    # Imported here since it takes longer to import than most commands take to answer.
    from scipy import stats

    quantile = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(known) - 1))
    half = quantile * statistics.stdev(known) / math.sqrt(len(known))
    return Interval(mean, mean - half, mean + half, len(known))


Cost = Callable[[Summary], float | None]
"""What a run paid for reaching its target; None where it did not, or nobody counted."""


def _seconds(summary: Summary) -> float | None:
    return summary.seconds_to_target


def _bytes(summary: Summary) -> float | None:
    return summary.bytes_to_target


def speedup(baseline: Sequence[Summary], other: Sequence[Summary]) -> Speedup | None:
    """The seconds to target of `baseline` over those of `other`, paired by seed; None without any such pair."""
    return _compared(baseline, other, _seconds)


def bytes_ratio(baseline: Sequence[Summary], other: Sequence[Summary]) -> Speedup | None:
    """The bytes to target of `baseline` over those of `other`, paired by seed; None without any such pair."""
    return _compared(baseline, other, _bytes)


def _compared(baseline: Sequence[Summary], other: Sequence[Summary], cost: Cost) -> Speedup | None:
    ratios, missed = _ratios(baseline, other, cost)
    over = interval(ratios)
    return Speedup(over.mean, over.low, over.high, over.count, missed) if over else None


def _ratios(baseline: Sequence[Summary], other: Sequence[Summary], cost: Cost) -> tuple[list[float], int]:
    """One ratio a pair, and how many pairs have none. A target that was met from the start compares nothing."""
    costs, paired = _by_seed(baseline, cost), _by_seed(other, cost)
    ratios, missed = [], 0
    for key in costs.keys() & paired.keys():
        more, less = costs[key], paired[key]
        if more and less:
            ratios.append(more / less)
        else:
            missed += 1
    return sorted(ratios), missed


def _by_seed(summaries: Sequence[Summary], cost: Cost) -> dict[tuple[int, int], float | None]:
    """Keyed by seed and occurrence, so that a seed that was run twice is paired twice."""
    costs: dict[tuple[int, int], float | None] = {}
    for summary in summaries:
        occurrence = sum(seed == summary.seed for seed, _ in costs)
        costs[summary.seed, occurrence] = cost(summary)
    return costs


@dataclass(frozen=True)
class Comparison:
    """Summaries of runs on one workload, what they are timed against, and which strategy is the yardstick."""

    summaries: tuple[Summary, ...]
    target: Target | None
    baseline: str

    @classmethod
    def of(cls, runs: Sequence[RunRecords], baseline: str | None = None) -> Comparison:
        """Compare runs; the baseline is the one named, else `fmb` where there is one, else the first run's."""
        if not runs:
            raise ConfigurationError("there is no run to compare; name at least one run directory")
        workloads = list(dict.fromkeys(run.header.workload for run in runs))
        if len(workloads) > 1:
            raise ConfigurationError(
                f"the runs are of different workloads ({', '.join(workloads)}) and their times cannot be compared; "
                "name runs of one workload"
            )
        targets = list(dict.fromkeys(target for run in runs if (target := target_of(run.header))))
        if len(targets) > 1:
            listed = ", ".join(f"{target.metric} {target.value:g}" for target in targets)
            raise ConfigurationError(
                f"the runs have different targets ({listed}) and their times cannot be compared; "
                "name runs with one target"
            )
        target = targets[0] if targets else None
        labels = list(dict.fromkeys(run.header.label for run in runs))
        if baseline is None:
            baseline = CUSTOMARY_BASELINE if CUSTOMARY_BASELINE in labels else labels[0]
        elif baseline not in labels:
            raise unknown("baseline", baseline, labels)
        return cls(tuple(summarize(run, target) for run in runs), target, baseline)

    @property
    def strategies(self) -> list[str]:
        """The labels, in order of first appearance."""
        return list(dict.fromkeys(summary.strategy for summary in self.summaries))

    def runs_of(self, strategy: str) -> list[Summary]:
        return [summary for summary in self.summaries if summary.strategy == strategy]

    def speedup_of(self, strategy: str) -> Speedup | None:
        return speedup(self.runs_of(self.baseline), self.runs_of(strategy))

    def bytes_ratio_of(self, strategy: str) -> Speedup | None:
        return bytes_ratio(self.runs_of(self.baseline), self.runs_of(strategy))

    def to_json(self) -> dict[str, Any]:
        """Plain data without NaN: `runs`, `target`, `baseline`, and `speedup` and `bytes_ratio` per strategy."""
        return {
            "runs": [_plain(msgspec.to_builtins(summary)) for summary in self.summaries],
            "target": msgspec.to_builtins(self.target) if self.target else None,
            "baseline": self.baseline,
            "speedup": {strategy: self._ratio_json(strategy, _seconds) for strategy in self.strategies},
            "bytes_ratio": {strategy: self._ratio_json(strategy, _bytes) for strategy in self.strategies},
        }

    def _ratio_json(self, strategy: str, cost: Cost) -> dict[str, Any]:
        baseline, runs = self.runs_of(self.baseline), self.runs_of(strategy)
        known = _compared(baseline, runs, cost)
        if known is None:
            _, missed = _ratios(baseline, runs, cost)
            return {"mean": None, "low": None, "high": None, "pairs": 0, "missed": missed}
        plain: dict[str, Any] = _plain(msgspec.to_builtins(known))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return finite(value) if isinstance(value, float) else value
