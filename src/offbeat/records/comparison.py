"""Comparison of runs: strategies over several seeds, timed against the same target.

Runs are paired by seed, since the seed also determines the delays: the ratio of two runs with the same delays has less
variance than their times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from offbeat.core.notebook_html import ShownAsHtml
from offbeat.core.workload import Target
from offbeat.errors import ConfigurationError, unknown
from offbeat.records.data_frames import summary_frame
from offbeat.records.metrics import Summary, finite, summarize, target_of
from offbeat.records.schema import RunRecords

if TYPE_CHECKING:
    from pandas import DataFrame

CONFIDENCE = 0.95
DEFAULT_BASELINE = "fmb"


@dataclass(frozen=True)
class Interval:
    """A mean over `count` values with its 95% Student-t interval, which is None for a single value."""

    mean: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Speedup:
    """The cost of reaching the target of the baseline ÷ that of another strategy; above 1 is better.

    It is the mean over `pairs` pairs of runs with the same seed; `missed` pairs have no cost on either side.
    """

    mean: float
    low: float | None
    high: float | None
    pairs: int
    missed: int


def interval(values: Iterable[float | None]) -> Interval | None:
    """The mean and its interval over the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = statistics.fmean(known)
    if len(known) == 1:
        return Interval(mean, None, None, 1)
    half = half_width_factor(len(known)) * statistics.stdev(known)
    return Interval(mean, mean - half, mean + half, len(known))


def half_width_factor(count: int) -> float:
    """Half of the 95% interval of a mean over `count` values, two or more, in standard deviations of the values."""
    # Imported here, since few commands need it. `scipy.stats` has the same function, and takes much longer to import.
    from scipy.special import stdtrit

    return float(stdtrit(count - 1, 0.5 + CONFIDENCE / 2)) / math.sqrt(count)


Cost = Literal["seconds_to_target", "bytes_to_target"]
"""The field of a summary that is compared; None if the target was not reached, or nothing was counted."""


def cost_ratio(baseline: Sequence[Summary], other: Sequence[Summary], cost: Cost) -> Speedup | None:
    """The cost of `baseline` over that of `other`, paired by seed; None if no pair has both."""
    ratios, missed = _ratios(baseline, other, cost)
    over = interval(ratios)
    return Speedup(over.mean, over.low, over.high, over.count, missed) if over else None


def _ratios(baseline: Sequence[Summary], other: Sequence[Summary], cost: Cost) -> tuple[list[float], int]:
    """One ratio per pair, and the number of pairs without one: a cost is None, or 0 if the target was met at once."""
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
    """The costs by seed and occurrence, so that a seed that was run twice is paired twice."""
    costs: dict[tuple[int, int], float | None] = {}
    for summary in summaries:
        occurrence = sum(seed == summary.seed for seed, _ in costs)
        costs[summary.seed, occurrence] = getattr(summary, cost)
    return costs


@dataclass(frozen=True, repr=False)
class Comparison(ShownAsHtml):
    """Summaries of runs on one workload, the target that they are timed against, and the baseline strategy."""

    summaries: tuple[Summary, ...]
    target: Target | None
    baseline: str
    runs: tuple[RunRecords, ...] = field(default=(), compare=False)
    """The runs themselves, in the order of their summaries; empty if only their metrics are known."""

    @classmethod
    def of(cls, runs: Sequence[RunRecords], baseline: str | None = None) -> Comparison:
        """Compare runs. The baseline is by default `fmb`, or the strategy of the first run.

        Raises ConfigurationError for runs of different workloads or targets.
        """
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
        compared = cls.of_summaries([summarize(run, target) for run in runs], target, baseline)
        return replace(compared, runs=tuple(runs))

    @classmethod
    def of_summaries(
        cls, summaries: Sequence[Summary], target: Target | None, baseline: str | None = None
    ) -> Comparison:
        """Compare runs of one workload by their metrics.

        summaries: the metrics of one run or more
        target: the target that all of them are timed against
        baseline: as for `of`
        """
        labels = list(dict.fromkeys(summary.strategy for summary in summaries))
        if baseline is None:
            baseline = DEFAULT_BASELINE if DEFAULT_BASELINE in labels else labels[0]
        elif baseline not in labels:
            raise unknown("baseline", baseline, labels)
        return cls(tuple(summaries), target, baseline)

    def __repr__(self) -> str:
        runs = f"{len(self.summaries)} run{'' if len(self.summaries) == 1 else 's'}"
        return f"<Comparison of {', '.join(self.strategies)} on {self.summaries[0].workload}: {runs}>"

    @property
    def strategies(self) -> list[str]:
        """The labels, in order of first appearance."""
        return list(dict.fromkeys(summary.strategy for summary in self.summaries))

    def runs_of(self, strategy: str) -> list[Summary]:
        """The summaries of one strategy."""
        return [summary for summary in self.summaries if summary.strategy == strategy]

    def speedup_of(self, strategy: str) -> Speedup | None:
        """Seconds to the target of the baseline ÷ those of this strategy."""
        return cost_ratio(self.runs_of(self.baseline), self.runs_of(strategy), "seconds_to_target")

    def bytes_ratio_of(self, strategy: str) -> Speedup | None:
        """Bytes to the target of the baseline ÷ those of this strategy."""
        return cost_ratio(self.runs_of(self.baseline), self.runs_of(strategy), "bytes_to_target")

    def to_pandas(self) -> DataFrame:
        """A table with a row for each run. Its columns are the fields of a summary, whose names have their units.

        Counts by reason have columns such as `dropped_by_reason.stale`; for traffic by kind of message see
        `RunRecords.to_pandas`. A metric that does not apply is NaN or <NA>. Needs pandas.
        """
        return summary_frame(self.summaries)

    def to_json(self) -> dict[str, Any]:
        """Plain data without NaN: `runs`, `target`, `baseline`, and `speedup` and `bytes_ratio` per strategy."""
        return {
            "runs": [_plain(msgspec.to_builtins(summary)) for summary in self.summaries],
            "target": msgspec.to_builtins(self.target) if self.target else None,
            "baseline": self.baseline,
            "speedup": {strategy: self._ratio_json(strategy, "seconds_to_target") for strategy in self.strategies},
            "bytes_ratio": {strategy: self._ratio_json(strategy, "bytes_to_target") for strategy in self.strategies},
        }

    def _ratio_json(self, strategy: str, cost: Cost) -> dict[str, Any]:
        baseline, runs = self.runs_of(self.baseline), self.runs_of(strategy)
        ratio = cost_ratio(baseline, runs, cost)
        if ratio is None:
            return {"mean": None, "low": None, "high": None, "pairs": 0, "missed": _ratios(baseline, runs, cost)[1]}
        plain: dict[str, Any] = _plain(msgspec.to_builtins(ratio))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return finite(value) if isinstance(value, float) else value
