"""The data of figures, from records: curves, bands over seeds, distributions, and time lines of ranks.

A curve is over seconds, over the samples applied so far, or over steps, which are updates.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from offbeat.records.exchanges import consensus_series
from offbeat.records.metrics import evaluations, finite
from offbeat.records.schema import Round, RunRecords, Traffic, Undone, Update, of_kind
from offbeat.records.traffic import BytesSent

Array = NDArray[np.float64]
Over = Literal["seconds", "samples", "steps"]
HeldOutMetric = Literal["accuracy", "accuracy_top5", "loss"]
ROUNDING = 1e-8
"""A squared distance below this fraction of the largest is a rounding error of float32."""
WINDOWS = 50
"""The training loss is averaged over this fraction of the samples of a run: 1/50."""
ROUND_GROUPS_MAX = 10 * WINDOWS
"""The number of groups that the rounds of a run are merged into before their losses are averaged, at most."""


@dataclass(frozen=True)
class Curve:
    """Values over seconds since the run began, or over samples, steps or bytes sent."""

    over: Array
    values: Array


@dataclass(frozen=True)
class Band:
    """The mean of `count` curves on common times, with their minimum and maximum."""

    over: Array
    mean: Array
    low: Array
    high: Array
    count: int


@dataclass(frozen=True)
class Segment:
    """One round on a time line: idle time before `start`, then injected delay, then computing."""

    start: float
    compute_seconds: float
    induced_seconds: float
    idle_seconds: float


def evaluation_curve(run: RunRecords, metric: HeldOutMetric, over: Over = "seconds") -> Curve:
    """Held-out loss or accuracy; values that are not finite are omitted."""
    known = [
        (evaluation, value)
        for evaluation in evaluations(run)
        if (value := finite(getattr(evaluation, metric))) is not None
    ]
    if over == "samples":
        return _curve([(evaluation.samples_total, value) for evaluation, value in known])
    return _rescaled(run, _curve([(evaluation.at, value) for evaluation, value in known]), over)


def quality_over_bytes(run: RunRecords, metric: HeldOutMetric) -> Curve:
    """Held-out loss or accuracy over the bytes sent by all ranks; empty if they were not counted."""
    curve, sent = evaluation_curve(run, metric), BytesSent(run)
    if not sent.known:
        return _curve([])
    return Curve(np.array([sent.by(seconds) for seconds in curve.over], dtype=np.float64), curve.values)


def bytes_curve(run: RunRecords) -> Curve:
    """Bytes of training traffic sent by all ranks over time; empty if they were not counted."""
    sent = BytesSent(run)
    times = sorted({0.0, *(record.at for record in of_kind(run, Traffic))}) if sent.known else []
    return _curve([(seconds, sent.by(seconds) or 0.0) for seconds in times])


def round_groups(run: RunRecords) -> Array:
    """The time, the number of samples and the sum of their losses, for each round in the order of time.

    More than `ROUND_GROUPS_MAX` are merged into that many groups of as many rounds; the time is that of the last.
    Rounds without a finite loss do not count.
    """
    rounds = sorted(of_kind(run, Round), key=lambda record: record.at)
    known = [(record.at, record.samples, record.loss) for record in rounds if record.samples and record.finite]
    table = np.array([row for row in known if row[2] is not None and np.isfinite(row[2])], dtype=np.float64)
    if len(table) <= ROUND_GROUPS_MAX:
        return table.reshape(-1, 3)
    stops = np.linspace(0, len(table), ROUND_GROUPS_MAX + 1).round().astype(np.int64)
    return np.column_stack([table[stops[1:] - 1, 0], np.add.reduceat(table[:, 1:], stops[:-1])])


def training_loss_curve(run: RunRecords, over: Over = "seconds", window: int | None = None) -> Curve:
    """The mean loss of the last `window` training samples, by default 1/50 of all, at the end of each round.

    Every sample of every rank counts once. Of many rounds, it is at the end of each of `round_groups`.
    """
    table = round_groups(run)
    if not len(table):
        return _curve([])
    samples, loss = (np.concatenate([[0.0], np.cumsum(table[:, column])]) for column in (1, 2))
    wanted = samples[-1] / WINDOWS if window is None else float(window)
    first = np.maximum(np.searchsorted(samples, samples[1:] - wanted, side="right") - 1, 0)
    means = (loss[1:] - loss[first]) / (samples[1:] - samples[first])
    # Before the first full window, the mean is over too few samples.
    full = samples[1:] >= min(wanted, samples[-1])
    return _rescaled(run, Curve(table[full, 0], means[full]), over)


def learning_rate_curve(run: RunRecords, over: Over = "seconds") -> Curve:
    """The learning rate of each update."""
    updates = sorted(of_kind(run, Update), key=lambda update: update.at)
    return _rescaled(run, _curve([(update.at, update.learning_rate) for update in updates]), over)


def samples_curve(run: RunRecords) -> Curve:
    """Samples applied over time, starting at 0; it decreases where samples are undone."""
    counts = [record for record in run.records if isinstance(record, Update | Undone)]
    points = sorted(((record.at, float(record.samples_total)) for record in counts), key=lambda point: point[0])
    curve = _curve([(0.0, 0.0), *points])
    if any(isinstance(record, Undone) for record in counts):
        return curve
    # Without a hub, ranks learn of the samples of others with a delay, so that their totals may be out of order.
    return Curve(curve.over, np.maximum.accumulate(curve.values))


def steps_curve(run: RunRecords) -> Curve:
    """Updates over time, starting at 0; it decreases where updates are undone.

    If several ranks update their own replicas, it is the mean over ranks.
    """
    counts = sorted((record for record in run.records if isinstance(record, Update | Undone)), key=lambda one: one.at)
    ranks = len({record.rank for record in counts if isinstance(record, Update)}) or 1
    made = [
        record.updates if isinstance(record, Update) else record.to_version + 1 - record.version for record in counts
    ]
    times = np.array([0.0, *(record.at for record in counts)], dtype=np.float64)
    return Curve(times, np.cumsum([0.0, *made]) / ranks)


def _rescaled(run: RunRecords, curve: Curve, over: Over) -> Curve:
    """A curve over seconds converted to samples or steps; the axis is constant while undone steps are repeated."""
    if over == "seconds" or not len(curve.over):
        return curve
    counted = steps_curve(run) if over == "steps" else samples_curve(run)
    indices = np.searchsorted(counted.over, curve.over, side="right") - 1
    return Curve(np.maximum.accumulate(counted.values)[indices], curve.values)


def consensus_curve(run: RunRecords) -> Curve:
    """The consensus distance over time, for a logarithmic axis: zeros are omitted.

    So are the first points, while replicas differ only by the rounding of their initial average.
    """
    points = [(at, distance) for at, distance in consensus_series(run).points if distance > 0]
    rounding = ROUNDING * max((distance for _, distance in points), default=0.0)
    return _curve(list(itertools.dropwhile(lambda point: point[1] < rounding, points)))


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    table = np.asarray(points, dtype=np.float64).reshape(-1, 2)
    return Curve(table[:, 0], table[:, 1])


def band(curves: Sequence[Curve], points: int = 200) -> Band | None:
    """The band of the curves of several seeds, over the time that all of them cover; None if there is no such time.

    Beyond that time the mean would jump whenever a curve ends. A single curve keeps its own points.
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
    """At most `points` evenly spaced points of a curve, including its ends."""
    if len(curve.over) <= points:
        return curve
    kept = np.linspace(0, len(curve.over) - 1, points).round().astype(np.int64)
    return Curve(curve.over[kept], curve.values[kept])


def segments(run: RunRecords, seconds: float = float("inf")) -> dict[int, list[Segment]]:
    """The rounds of each rank whose idle time or computing began before `seconds`, in the order of ranks.

    An aggregate is one segment, in which all idle time comes first.
    """
    rows: dict[int, list[Segment]] = {}
    for record in of_kind(run, Round):
        start = record.start if record.rounds == 1 else record.at - record.seconds
        if start - record.idle_seconds < seconds:
            working = max(0.0, record.seconds - record.induced_seconds)
            rows.setdefault(record.rank, []).append(
                Segment(start, working, record.induced_seconds, record.idle_seconds)
            )
    return {rank: sorted(rows[rank], key=lambda segment: segment.start) for rank in sorted(rows)}


def hub_updates(run: RunRecords) -> Array:
    """The times of the updates of a hub; empty without a hub: if several ranks update, or one that computes."""
    updates = list(of_kind(run, Update))
    ranks = {update.rank for update in updates}
    if len(ranks) != 1 or any(record.rank in ranks for record in of_kind(run, Round)):
        return np.empty(0)
    return np.sort(np.array([update.at for update in updates], dtype=np.float64))


def timeline_seconds(runs: Sequence[RunRecords], cycles: int = 10, rounds_max: int = 150) -> float:
    """The length of a time line: some rounds of the slowest run, and not too many of the fastest."""
    typical = [
        statistics.median((record.seconds + record.idle_seconds) / record.rounds for record in rounds)
        for run in runs
        if (rounds := list(of_kind(run, Round)))
    ]
    longest = max((record.at for run in runs for record in run.records), default=1.0) or 1.0
    if not typical or min(typical) <= 0:
        return longest
    return min(longest, cycles * max(typical), rounds_max * min(typical))


def stalenesses(runs: Sequence[RunRecords]) -> Array:
    """The staleness of each message when it was applied, in versions, in rising order."""
    updates = (update for run in runs for update in of_kind(run, Update))
    values = (staleness for update in updates for part in update.parts() for staleness in part.stalenesses())
    return np.sort(np.fromiter(values, dtype=np.float64))


def field_values(kind: type[Round | Update], field: str, runs: Sequence[RunRecords]) -> Array:
    """The values of a field of all rounds, or of all updates; an aggregate has its mean, once for each of them."""
    records = [record for run in runs for record in of_kind(run, kind)]
    counts = [record.rounds if isinstance(record, Round) else record.updates for record in records]
    values = np.fromiter((getattr(record, field) for record in records), dtype=np.float64)
    return np.repeat(values / np.array(counts, dtype=np.float64), counts)
