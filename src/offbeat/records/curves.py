"""From records to what figures are drawn of: curves, bands over seeds, distributions, and who did what when.

A curve is over seconds, over the samples that were applied by then, or over steps, which are updates by number.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from offbeat.records.exchanges import consensus_series
from offbeat.records.metrics import evaluations
from offbeat.records.schema import Round, RunRecords, Traffic, Undone, Update, of_kind
from offbeat.records.traffic import BytesSent

Array = NDArray[np.float64]
Over = Literal["seconds", "samples", "steps"]
HeldOutMetric = Literal["accuracy", "accuracy_top5", "loss"]
ROUNDING = 1e-8
"""A squared distance that is smaller than this share of the largest is one of rounding, in float32."""
WINDOWS = 50
"""The training loss is a mean over this part of a run's samples."""


@dataclass(frozen=True)
class Curve:
    """Values over seconds since the run began, or over what else grows: samples, steps, bytes sent."""

    over: Array
    values: Array


@dataclass(frozen=True)
class Band:
    """The mean of `count` curves on common times, between the lowest and the highest of them."""

    over: Array
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


def evaluation_curve(run: RunRecords, metric: HeldOutMetric, over: Over = "seconds") -> Curve:
    """Held-out loss or accuracy as measured; what is not a finite number is left out."""
    made = [(evaluation, getattr(evaluation, metric)) for evaluation in evaluations(run)]
    known = [(evaluation, value) for evaluation, value in made if value is not None and np.isfinite(value)]
    if over == "samples":
        return _curve([(evaluation.samples_total, value) for evaluation, value in known])
    return _moved(run, _curve([(evaluation.at, value) for evaluation, value in known]), over)


def quality_over_bytes(run: RunRecords, metric: HeldOutMetric) -> Curve:
    """Held-out loss or accuracy over the bytes that all ranks had sent by then; empty where nobody counted them."""
    curve, sent = evaluation_curve(run, metric), BytesSent(run)
    if not sent.known:
        return _curve([])
    return Curve(np.array([sent.by(seconds) for seconds in curve.over], dtype=np.float64), curve.values)


def bytes_curve(run: RunRecords) -> Curve:
    """Bytes that all ranks together had sent over time, for the sake of training; empty where nobody counted them."""
    sent = BytesSent(run)
    times = sorted({0.0, *(record.at for record in of_kind(run, Traffic))}) if sent.known else []
    return _curve([(seconds, sent.by(seconds) or 0.0) for seconds in times])


def training_loss_curve(run: RunRecords, over: Over = "seconds", window: int | None = None) -> Curve:
    """The mean loss of the last `window` training samples, by default of a fiftieth of all, at the end of each round.

    Every sample counts once, whoever computed it. Rounds without a loss, or with one that is not finite, do not count.
    """
    rounds = sorted(of_kind(run, Round), key=lambda record: record.at)
    known = [(record.at, record.samples, record.loss) for record in rounds if record.samples and record.finite]
    table = np.array([row for row in known if row[2] is not None and np.isfinite(row[2])], dtype=np.float64)
    if not len(table):
        return _curve([])
    samples, loss = (np.concatenate([[0.0], np.cumsum(table[:, column])]) for column in (1, 2))
    wanted = samples[-1] / WINDOWS if window is None else float(window)
    first = np.maximum(np.searchsorted(samples, samples[1:] - wanted, side="right") - 1, 0)
    means = (loss[1:] - loss[first]) / (samples[1:] - samples[first])
    # Until there is a whole window the mean is over so few samples that it would only show their noise.
    full = samples[1:] >= min(wanted, samples[-1])
    return _moved(run, Curve(table[full, 0], means[full]), over)


def learning_rate_curve(run: RunRecords, over: Over = "seconds") -> Curve:
    """The learning rate of each update."""
    updates = sorted(of_kind(run, Update), key=lambda update: update.at)
    return _moved(run, _curve([(update.at, update.learning_rate) for update in updates]), over)


def samples_curve(run: RunRecords) -> Curve:
    """Samples applied over time, from zero at the start; it falls where some are undone."""
    counts = [record for record in run.records if isinstance(record, Update | Undone)]
    points = sorted(((record.at, float(record.samples_total)) for record in counts), key=lambda point: point[0])
    curve = _curve([(0.0, 0.0), *points])
    if any(isinstance(record, Undone) for record in counts):
        return curve
    # Peers without a hub know of each other's samples late, so their totals can seem to fall.
    return Curve(curve.over, np.maximum.accumulate(curve.values))


def steps_curve(run: RunRecords) -> Curve:
    """Updates by number over time, from zero at the start; it falls where some are undone.

    Where several ranks update, each its own model, a step is an update of all of them: the mean over ranks.
    """
    counts = sorted((record for record in run.records if isinstance(record, Update | Undone)), key=lambda one: one.at)
    ranks = len({record.rank for record in counts if isinstance(record, Update)}) or 1
    made = [1 if isinstance(record, Update) else record.to_version + 1 - record.version for record in counts]
    times = np.array([0.0, *(record.at for record in counts)], dtype=np.float64)
    return Curve(times, np.cumsum([0.0, *made]) / ranks)


def _moved(run: RunRecords, curve: Curve, over: Over) -> Curve:
    """A curve over seconds, over what was counted by then; it waits where steps that were undone are repeated."""
    if over == "seconds" or not len(curve.over):
        return curve
    counted = steps_curve(run) if over == "steps" else samples_curve(run)
    places = np.searchsorted(counted.over, curve.over, side="right") - 1
    return Curve(np.maximum.accumulate(counted.values)[places], curve.values)


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
    curves = [curve for curve in curves if len(curve.over)]
    if not curves:
        return None
    start = max(curve.over[0] for curve in curves)
    stop = min(curve.over[-1] for curve in curves)
    if start > stop:
        return None
    grid = curves[0].over if len(curves) == 1 else np.linspace(start, stop, points)
    values = np.stack([np.interp(grid, curve.over, curve.values) for curve in curves])
    return Band(grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0), len(curves))


def thinned(curve: Curve, points: int = 400) -> Curve:
    """At most so many points of a curve, evenly spread, its ends among them."""
    if len(curve.over) <= points:
        return curve
    kept = np.linspace(0, len(curve.over) - 1, points).round().astype(np.int64)
    return Curve(curve.over[kept], curve.values[kept])


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
    """When the hub updated; nothing where several ranks update, or one that computes, for then there is no hub."""
    updates = list(of_kind(run, Update))
    ranks = {update.rank for update in updates}
    if len(ranks) != 1 or any(record.rank in ranks for record in of_kind(run, Round)):
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


def stalenesses(runs: Sequence[RunRecords]) -> Array:
    """How stale each message was when it was applied, in versions."""
    counts = staleness_counts(runs)
    return np.repeat(np.array(list(counts), dtype=np.float64), list(counts.values()))


def field_values(kind: type[Round | Update], field: str, runs: Sequence[RunRecords]) -> Array:
    """One number of every round, or of every update, of these runs: the field of that name."""
    return np.fromiter((getattr(record, field) for run in runs for record in of_kind(run, kind)), dtype=np.float64)
