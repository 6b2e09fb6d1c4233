"""From records to what figures are drawn of: curves over time, bands over seeds, and who did what when."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.analysis import Metric, evaluations, of_kind
from offbeat.exchanges import consensus_series
from offbeat.records.files import RunRecords
from offbeat.records.schema import Round, Undone, Update
from offbeat.traffic import BytesSent

Array = NDArray[np.float64]
ROUNDING = 1e-8
"""A squared distance that is smaller than this share of the largest is one of rounding, in float32."""


@dataclass(frozen=True)
class Curve:
    """Values over seconds; one over bytes sent has these in their place."""

    seconds: Array
    values: Array


@dataclass(frozen=True)
class Band:
    """The mean of `count` curves on common times, between the lowest and the highest of them."""

    seconds: Array
    mean: Array
    low: Array
    high: Array
    count: int


@dataclass(frozen=True)
class Segment:
    """One round on a time line: `idle_seconds` of waiting up to `start`, then induced delay, then computing."""

    start: float
    compute_seconds: float
    induced_seconds: float
    idle_seconds: float


def evaluation_curve(run: RunRecords, metric: Metric) -> Curve:
    """Held-out loss or accuracy over time, as measured; what is not a finite number is left out."""
    points = [(evaluation.at, getattr(evaluation, metric)) for evaluation in evaluations(run)]
    return _curve([(at, value) for at, value in points if value is not None and np.isfinite(value)])


def quality_over_bytes(run: RunRecords, metric: Metric) -> Curve:
    """Held-out loss or accuracy over the bytes that all ranks had sent by then; empty where nobody counted them."""
    curve, sent = evaluation_curve(run, metric), BytesSent(run)
    if not sent.known:
        return _curve([])
    return Curve(np.array([sent.by(seconds) for seconds in curve.seconds], dtype=np.float64), curve.values)


def samples_curve(run: RunRecords) -> Curve:
    """Samples applied over time, from zero at the start; it falls where some are undone."""
    counts = [record for record in run.records if isinstance(record, Update | Undone)]
    points = sorted(((record.at, float(record.samples_total)) for record in counts), key=lambda point: point[0])
    curve = _curve([(0.0, 0.0), *points])
    if any(isinstance(record, Undone) for record in counts):
        return curve
    # Peers without a hub know of each other's samples late, so their totals can seem to fall.
    return Curve(curve.seconds, np.maximum.accumulate(curve.values))


def consensus_curve(run: RunRecords) -> Curve:
    """The consensus distance over time, for a logarithmic axis: where all peers are equal there is no point.

    Nor is there one at the beginning, while they are equal but for how the average that they begin at was rounded.
    """
    points = [(at, distance) for at, distance in consensus_series(run).points if distance > 0]
    rounding = ROUNDING * max((distance for _, distance in points), default=0.0)
    return _curve(list(itertools.dropwhile(lambda point: point[1] < rounding, points)))


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    table = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    return Curve(table[:, 0], table[:, 1])


def band(curves: Sequence[Curve], points: int = 200) -> Band | None:
    """Curves of several seeds as one, over the time that all of them cover; None where there is none.

    Beyond that time the mean would jump whenever a seed ends. One curve alone keeps its own points.
    """
    curves = [curve for curve in curves if len(curve.seconds)]
    if not curves:
        return None
    start = max(curve.seconds[0] for curve in curves)
    stop = min(curve.seconds[-1] for curve in curves)
    if start > stop:
        return None
    grid = curves[0].seconds if len(curves) == 1 else np.linspace(start, stop, points)
    values = np.stack([np.interp(grid, curve.seconds, curve.values) for curve in curves])
    return Band(grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0), len(curves))


def thinned(curve: Curve, points: int = 400) -> Curve:
    """At most so many points of a curve, evenly spread, its ends among them."""
    if len(curve.seconds) <= points:
        return curve
    kept = np.linspace(0, len(curve.seconds) - 1, points).round().astype(np.int64)
    return Curve(curve.seconds[kept], curve.values[kept])


def segments(run: RunRecords, seconds: float = float("inf")) -> dict[int, list[Segment]]:
    """The rounds of each rank that had begun, or were waited for, before `seconds`; ranks in order."""
    rows: dict[int, list[Segment]] = {}
    for record in of_kind(run, Round):
        if record.start - record.idle_seconds < seconds:
            working = max(0.0, record.seconds - record.induced_seconds)
            rows.setdefault(record.rank, []).append(
                Segment(record.start, working, record.induced_seconds, record.idle_seconds)
            )
    return {rank: sorted(rows[rank], key=lambda segment: segment.start) for rank in sorted(rows)}


def hub_updates(run: RunRecords) -> Array:
    """When the hub updated; nothing where several ranks update, for then there is no hub."""
    updates = list(of_kind(run, Update))
    if len({update.rank for update in updates}) != 1:
        return np.empty(0)
    return np.sort(np.array([update.at for update in updates], dtype=np.float64))


def timeline_seconds(runs: Sequence[RunRecords], cycles: int = 10, rounds_max: int = 150) -> float:
    """How much of the runs' beginning to show: some cycles of the slowest, and not too many of the quickest."""
    typical = [
        statistics.median(record.seconds + record.idle_seconds for record in rounds)
        for run in runs
        if (rounds := list(of_kind(run, Round)))
    ]
    longest = max((record.at for run in runs for record in run.records), default=1.0) or 1.0
    if not typical or min(typical) <= 0:
        return longest
    return min(longest, cycles * max(typical), rounds_max * min(typical))


def staleness_counts(runs: Sequence[RunRecords]) -> dict[int, int]:
    """How many messages were how stale when they were applied, in order of staleness."""
    counts: Counter[int] = Counter()
    for run in runs:
        for update in of_kind(run, Update):
            counts.update(contribution.staleness for contribution in update.contributions)
    return dict(sorted(counts.items()))


def batch_sizes(runs: Sequence[RunRecords]) -> list[int]:
    """Samples of each update, over all runs."""
    return [update.samples for run in runs for update in of_kind(run, Update)]
