"""The metrics of one run, computed from its records alone: the summary, and when the target was reached."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from offbeat.core.notebook_html import ShownAsHtml
from offbeat.core.workload import Target
from offbeat.errors import ConfigurationError, shortened
from offbeat.records.exchanges import summarize_exchanges
from offbeat.records.schema import (
    Dropped,
    Ended,
    Evaluation,
    Flow,
    LinkUse,
    Membership,
    Round,
    RunHeader,
    RunRecords,
    Undone,
    Update,
    of_kind,
)
from offbeat.records.traffic import BytesSent, bytes_received, sent_by_kind

Metric = Literal["accuracy", "loss"]


class Summary(msgspec.Struct, ShownAsHtml, frozen=True, kw_only=True):
    """The metrics of one run; those that do not apply are None.

    `updates` and `samples` do not include undone ones; `undone` is the number of samples that were applied and then
    undone. `staleness_*` count each message once. `compute_seconds` is the time inside rounds, including
    `induced_seconds` of injected delay and slow-down, which stand for a slow machine; `idle_share` is idle ÷ (idle +
    compute) over all rounds of all ranks. `bytes_sent` does not include processes that were killed.

    `traffic` is what was sent by kind of message, and `bytes_received` what was received; for a killed process, up to
    its last record of traffic. `bytes_to_target` is the training traffic of all ranks when the target was reached; it
    is None, and `traffic` empty, without records of traffic. `updates_to_target` is the number of updates made by then;
    if several ranks update replicas of their own, the mean over ranks.

    `exchanges` is the number of averaged exchanges of two peers, and `exchanges_lost` of those without an answer. An
    exchange is an averaging for both peers, so `exchanges_per_gradient` is twice their number ÷ updates.
    `consensus_distance` is the mean of ‖x_i − mean of x‖² over peers and the second half of the run;
    `records/exchanges.py` describes its estimate.

    `budget_used` is the bytes sent ÷ bandwidth limit × duration, for the link and direction with the most traffic, and
    `budget_used_mean` the mean over all; None without a bandwidth limit.
    """

    strategy: str
    workload: str
    workers: int
    seed: int
    seconds: float
    updates: int
    samples: int
    loss: float | None
    accuracy: float | None
    seconds_to_target: float | None
    staleness_mean: float | None
    staleness_max: int | None
    idle_share: float | None
    dropped: int
    lost_peers: int
    rejoined_peers: int
    bytes_sent: int | None
    directory: str | None
    samples_per_second: float | None
    bytes_per_second: float | None
    samples_per_update: float | None
    messages_per_update: float | None
    compute_seconds: float
    idle_seconds: float
    induced_seconds: float
    dropped_by_reason: dict[str, int]
    samples_to_target: float | None
    bytes_to_target: int | None
    bytes_received: int | None
    traffic: dict[str, Flow]
    failure: str | None
    exchanges: int
    exchanges_per_gradient: float | None
    exchanges_lost: int
    round_trip_seconds: float | None
    consensus_distance: float | None
    consensus_estimated: bool | None
    budget_used: float | None
    budget_used_mean: float | None
    undone: int
    accuracy_top5: float | None
    updates_to_target: float | None

    def __str__(self) -> str:
        """The summary in a few lines of text."""
        rate = "" if self.samples_per_second is None else f", {self.samples_per_second:,.0f} samples a second"
        lines = [
            f"{self.strategy} on {self.workload}, {self.workers} worker{'' if self.workers == 1 else 's'}: "
            f"{self.samples:,} samples in {self.updates:,} updates and {self.seconds:.1f} s{rate}"
        ]
        measured = [
            f"{name} {value:.4g}" for name in ("accuracy", "loss") if (value := getattr(self, name)) is not None
        ]
        if self.seconds_to_target is not None:
            measured.append(f"target reached after {self.seconds_to_target:.1f} s")
        if self.staleness_mean is not None:
            measured.append(f"staleness {self.staleness_mean:.1f} on average, at most {self.staleness_max}")
        if self.idle_share is not None:
            measured.append(f"idle {self.idle_share:.0%}")
        counts = {
            "dropped": "dropped samples",
            "undone": "undone samples",
            "lost_peers": "lost peers",
            "rejoined_peers": "rejoined peers",
        }
        measured += [f"{value:,} {text}" for name, text in counts.items() if (value := getattr(self, name))]
        if measured:
            lines.append("  " + ", ".join(measured))
        if self.exchanges:
            lines.append("  " + ", ".join(self._exchange_phrases()))
        if self.budget_used is not None:
            lines.append(
                f"  {self.budget_used:.0%} of the bandwidth limit used on the busiest link and direction, "
                f"{self.budget_used_mean:.0%} on average"
            )
        if self.failure is not None:
            lines.append(f"  failed: {self.failure}")
        return "\n".join(lines)

    def _exchange_phrases(self) -> list[str]:
        phrases = [f"{self.exchanges:,} exchanges"]
        if self.exchanges_per_gradient is not None:
            phrases.append(f"{self.exchanges_per_gradient:.3g} for each gradient of a peer")
        if self.exchanges_lost:
            phrases.append(f"{self.exchanges_lost:,} lost")
        if self.round_trip_seconds is not None:
            phrases.append(f"a round trip of {self.round_trip_seconds:.3g} s")
        if self.consensus_distance is not None:
            how = ", estimated from exchanges" if self.consensus_estimated else ""
            phrases.append(f"consensus distance {self.consensus_distance:.3g}{how}")
        return phrases


def evaluations(run: RunRecords) -> list[Evaluation]:
    """The evaluations in the order of time; their records may be written out of order."""
    return sorted(of_kind(run, Evaluation), key=lambda evaluation: evaluation.at)


def target_of(header: RunHeader) -> Target | None:
    """The target of a run. Raises ConfigurationError if the header has an invalid one."""
    if header.target is None:
        return None
    try:
        return msgspec.convert(header.target, Target)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"the target of the run {header.label!r} cannot be read ({shortened(error)}); "
            'expected {"metric": "accuracy" or "loss", "value": a number}'
        ) from None


def finite(value: float | None) -> float | None:
    """The value, or None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def seconds_to_target(evaluations: Sequence[Evaluation], metric: Metric, value: float) -> float | None:
    """The time at which the smoothed curve first crossed `value`: upwards for accuracy, downwards for loss.

    The curve is smoothed by a centred median of three, which does not shift a monotone curve (a trailing mean would)
    and removes single outliers. The time is interpolated linearly between the evaluations around the crossing. See
    `_smoothed` for the first and the last evaluation.

    evaluations: the evaluations, in any order
    metric: "accuracy" or "loss"
    value: the value to reach
    """
    return _crossing(evaluations, Target(metric, value), lambda evaluation: evaluation.at)


def samples_to_target(evaluations: Sequence[Evaluation], metric: Metric, value: float) -> float | None:
    """The number of samples applied when the smoothed curve first crossed `value`; see `seconds_to_target`."""
    return _crossing(evaluations, Target(metric, value), lambda evaluation: float(evaluation.samples_total))


def bytes_to_target(run: RunRecords, seconds: float | None) -> int | None:
    """The bytes sent by all ranks after `seconds`, the time to the target; None if either is unknown."""
    sent = None if seconds is None else BytesSent(run).by(seconds)
    return None if sent is None else round(sent)


def _crossing(
    evaluations: Sequence[Evaluation], target: Target, position: Callable[[Evaluation], float]
) -> float | None:
    upwards = 1.0 if target.metric == "accuracy" else -1.0
    goal = upwards * target.value
    points = []
    for evaluation in sorted(evaluations, key=lambda evaluation: evaluation.at):
        value = evaluation.accuracy if target.metric == "accuracy" else evaluation.loss
        if value is not None:
            points.append((position(evaluation), upwards * value if math.isfinite(value) else -math.inf))
    heights = _smoothed([height for _, height in points])
    for index, height in enumerate(heights):
        if height < goal:
            continue
        here = points[index][0]
        if index == 0 or heights[index - 1] == -math.inf:
            return here
        before, below = points[index - 1][0], heights[index - 1]
        return before + (here - before) * (goal - below) / (height - below)
    return None


def _smoothed(heights: Sequence[float]) -> list[float]:
    """The centred median of three; higher is better.

    Outliers at the ends must not count either. The first value is limited to its smoothed neighbour. The last may
    exceed its neighbour by twice the progress of the previous step: a rising curve keeps its last point, and a spike at
    the end of a plateau is removed.
    """
    if len(heights) < 3:
        return list(heights)
    smooth = [sorted(heights[index - 1 : index + 2])[1] for index in range(1, len(heights) - 1)]
    smooth.insert(0, min(heights[0], smooth[0]))
    previous, last = smooth[-2], smooth[-1]
    step = max(0.0, last - previous) if previous > -math.inf else 0.0
    smooth.append(min(heights[-1], last + 2 * step))
    return smooth


def summarize(run: RunRecords, target: Target | None = None) -> Summary:
    """The metrics of a run, timed against `target`, by default that of its header."""
    header = run.header
    target = target or target_of(header)
    curve = evaluations(run)
    reached = seconds_to_target(curve, target.metric, target.value) if target else None
    updates = list(of_kind(run, Update))
    made = sum(update.updates for update in updates)
    staleness_mean, staleness_max = _staleness(updates)
    dropped = _dropped(run)
    ends = list(of_kind(run, Ended))
    ended = end_of(run)
    bytes_sent = sum(end.bytes_sent for end in ends) if ended else None
    seconds = ended.at if ended else max((record.at for record in run.records), default=0.0)
    undone = list(of_kind(run, Undone))
    samples = _samples(updates) if not undone else _samples_left(run)
    rounds = list(of_kind(run, Round))
    compute_seconds = math.fsum(record.seconds for record in rounds)
    idle_seconds = math.fsum(record.idle_seconds for record in rounds)
    exchanged = summarize_exchanges(run, seconds)
    return Summary(
        strategy=header.label,
        workload=header.workload,
        workers=header.workers,
        seed=header.seed,
        seconds=seconds,
        updates=made - sum(map(_updates_undone, undone)),
        samples=samples,
        **_last_evaluation(curve),
        seconds_to_target=reached,
        staleness_mean=staleness_mean,
        staleness_max=staleness_max,
        idle_share=_ratio(idle_seconds, idle_seconds + compute_seconds),
        dropped=dropped.total(),
        undone=sum(record.samples for record in undone),
        lost_peers=_lost(of_kind(run, Membership)),
        rejoined_peers=_rejoined(of_kind(run, Membership)),
        bytes_sent=bytes_sent,
        directory=str(run.directory) if run.directory is not None else None,
        samples_per_second=_ratio(samples, seconds),
        bytes_per_second=_ratio(bytes_sent, seconds) if bytes_sent is not None else None,
        samples_per_update=_ratio(sum(update.samples for update in updates), made),
        messages_per_update=_ratio(sum(update.messages for update in updates), made),
        compute_seconds=compute_seconds,
        idle_seconds=idle_seconds,
        induced_seconds=math.fsum(record.induced_seconds for record in rounds),
        dropped_by_reason=dict(sorted(dropped.items())),
        samples_to_target=samples_to_target(curve, target.metric, target.value) if target else None,
        updates_to_target=None if reached is None else _updates_by(reached, updates, undone),
        bytes_to_target=bytes_to_target(run, reached),
        bytes_received=bytes_received(run),
        traffic=sent_by_kind(run),
        failure=ended.failure if ended else "the records stop before the run's end: it was killed, or it still runs",
        exchanges=exchanged.averaged,
        exchanges_per_gradient=_ratio(2 * exchanged.averaged, made) if exchanged.averaged else None,
        exchanges_lost=exchanged.lost,
        round_trip_seconds=exchanged.round_trip_seconds,
        consensus_distance=exchanged.consensus_distance,
        consensus_estimated=exchanged.estimated,
        **_bandwidth_used(run, seconds),
    )


def _staleness(updates: Sequence[Update]) -> tuple[float | None, int | None]:
    """The mean and the maximum over all contributions."""
    parts = [part for update in updates for part in update.parts()]
    contributions = sum(part.contributions for part in parts)
    mean = _ratio(sum(part.staleness_sum for part in parts), contributions)
    return mean, max((part.staleness_max for part in parts), default=None)


def _updates_undone(record: Undone) -> int:
    return record.version - 1 - record.to_version


def _updates_by(seconds: float, updates: Sequence[Update], undone: Sequence[Undone]) -> float:
    """The updates made by then and not undone by then, ÷ the number of ranks that make updates."""
    made = sum(update.updates_by(seconds) for update in updates)
    left = made - sum(_updates_undone(record) for record in undone if record.at <= seconds)
    return left / max(1, len({update.rank for update in updates}))


def _last_evaluation(curve: Sequence[Evaluation]) -> dict[str, float | None]:
    """The results of the last evaluation."""
    names = ("loss", "accuracy", "accuracy_top5")
    return {name: finite(getattr(curve[-1], name)) if curve else None for name in names}


def _bandwidth_used(run: RunRecords, seconds: float) -> dict[str, float | None]:
    """Bytes sent ÷ (bandwidth limit × duration): the maximum and the mean over links and directions."""
    allowed = 0.0
    sent: Counter[tuple[int, str]] = Counter()
    for record in of_kind(run, LinkUse):
        allowed = record.bytes_per_second * seconds
        for peer, nbytes in record.used.items():
            sent[record.rank, peer] += nbytes
    used = [nbytes / allowed for nbytes in sent.values()] if allowed > 0 else []
    return {"budget_used": max(used, default=None), "budget_used_mean": statistics.fmean(used) if used else None}


def end_of(run: RunRecords) -> Ended | None:
    """How the run ended: the last `Ended` record of rank 0, since other ranks may be lost without the run failing.

    In a decentralized run, where other ranks make updates too: that of the lowest rank that ended without failure.
    """
    last = {end.rank: end for end in of_kind(run, Ended)}
    if not any(update.rank for update in of_kind(run, Update)):
        return last.get(0)
    return min(last.values(), key=lambda end: (end.failure is not None, end.rank), default=None)


def _dropped(run: RunRecords) -> Counter[str]:
    """The number of dropped samples by reason."""
    dropped: Counter[str] = Counter()
    for record in of_kind(run, Dropped):
        dropped[record.reason] += record.samples
    return dropped


def _samples(updates: Sequence[Update]) -> int:
    """The number of applied samples. A hub counts all; gossip peers know a part, and count those that they applied."""
    known = max((update.samples_total for update in updates), default=0)
    return max(known, sum(update.samples for update in updates)) if any(update.rank for update in updates) else known


def _samples_left(run: RunRecords) -> int:
    """The number of samples that were applied and not undone, as last counted by the hub."""
    return [record.samples_total for record in run.records if isinstance(record, Update | Undone)][-1]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _lost(memberships: Iterable[Membership]) -> int:
    """The number of lost ranks. Without a hub, several ranks record a loss, and a partitioned rank loses all others."""
    return sum(_median_counts(memberships, lambda before, record: not record.joined))


def _rejoined(memberships: Iterable[Membership]) -> int:
    """The number of ranks that rejoined. A restarted rank sees all others join, but none of these has rejoined."""
    return sum(_median_counts(memberships, lambda before, record: record.joined and before is False))


def _median_counts(
    memberships: Iterable[Membership], counts: Callable[[bool | None, Membership], bool]
) -> Iterator[int]:
    """For each rank, the median over its observers of the number of matching records."""
    observed: dict[int, Counter[int]] = {}
    is_up: dict[tuple[int, int], bool] = {}
    for record in memberships:
        before = is_up.get((record.rank, record.peer))
        observed.setdefault(record.peer, Counter())[record.rank] += counts(before, record)
        is_up[record.rank, record.peer] = record.joined
    return (statistics.median_high(numbers.values()) for numbers in observed.values())
