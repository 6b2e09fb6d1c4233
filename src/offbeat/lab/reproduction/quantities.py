"""Quantities: one number per run, from which means and intervals over seeds are computed.

A quantity is computed from all runs of a case, since some depend on all of them, such as the time to a training loss
that every run reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from offbeat.errors import unknown
from offbeat.lab.reproduction.study import Study, StudyRun
from offbeat.records import curves, thinning
from offbeat.records.metrics import evaluations, finite
from offbeat.records.thinning import Reads
from offbeat.records.traffic import sent_by_kind

Values = list[float | None]
LAST_SHARE = 0.05
"""The share of the evaluations of a run that quantities named `_last5` are means over."""
FIRST_PARAMETERS = ("Begin", "Welcome")
"""The kinds of messages by which a worker gets the parameters that it begins with."""
MARGIN = 1.05
"""The common loss is this factor above the lowest: at its end a curve is so flat that noise would decide."""


@dataclass(frozen=True)
class Quantity:
    """A quantity of runs."""

    head: str
    """Its name in a table and on an axis."""
    of: Callable[[Sequence[StudyRun], int], Values]
    """Computes one value per run, from the runs of one case and the number of samples of an epoch."""
    reads: Reads = field(default_factory=dict)
    """The records that it is computed from, besides the summary."""
    digits: int | None = None
    """Digits after the point; None: three significant digits."""
    in_bytes: bool = False
    """Whether values are sizes in bytes."""


def quantity(name: str) -> Quantity:
    """The quantity of that name; raises if there is none."""
    if name not in QUANTITIES:
        raise unknown("quantity", name, QUANTITIES)
    return QUANTITIES[name]


ValuesBySeed = dict[tuple[str, str, int], float | None]
"""The values of a quantity by case, strategy and seed."""


def values_of(study: Study, name: str, runs: Sequence[StudyRun], cases: Collection[str] | None = None) -> ValuesBySeed:
    """A quantity of the runs of some cases.

    study: the study of the runs
    name: the name of the quantity
    runs: all runs of the study, since those of one case may depend on each other
    cases: the labels of the cases; None: all
    """
    result = {}
    for case in dict.fromkeys(run.case for run in runs if cases is None or run.case in cases):
        of_case = [run for run in runs if run.case == case]
        values = quantity(name).of(of_case, study.epoch_samples(case))
        result.update({(case, run.strategy, run.seed): value for run, value in zip(of_case, values, strict=True)})
    return result


def _summary(head: str, metric: str, digits: int | None = None, in_bytes: bool = False) -> Quantity:
    """A field of `Summary` as a quantity."""

    def of(runs: Sequence[StudyRun], epoch: int) -> Values:
        return [getattr(run.summary, metric) for run in runs]

    return Quantity(head, of, digits=digits, in_bytes=in_bytes)


def _per_epoch(runs: Sequence[StudyRun], epoch: int) -> Values:
    return [run.summary.seconds / run.summary.samples * epoch if run.summary.samples else None for run in runs]


def _per_step(runs: Sequence[StudyRun], epoch: int) -> Values:
    return [run.summary.seconds / run.summary.updates if run.summary.updates else None for run in runs]


def _last(head: str, metric: curves.HeldOutMetric) -> Quantity:
    """The mean of a held-out metric over the last evaluations; None where one of them is not finite."""

    def of_run(run: StudyRun) -> float | None:
        values = [finite(getattr(evaluation, metric)) for evaluation in evaluations(run.records)]
        last = values[-max(1, int(LAST_SHARE * len(values))) :]
        known = [value for value in last if value is not None]
        return float(np.mean(known)) if known and len(known) == len(last) else None

    return Quantity(head, lambda runs, epoch: [of_run(run) for run in runs], thinning.EVALUATIONS, 3)


def _bytes_after_joining(runs: Sequence[StudyRun], epoch: int) -> Values:
    """What was sent, without the parameters that the workers began with."""

    def of_run(run: StudyRun) -> float | None:
        sent = sent_by_kind(run.records)
        first = sum(flow.bytes for kind, flow in sent.items() if kind in FIRST_PARAMETERS)
        return run.summary.bytes_sent - first if sent and run.summary.bytes_sent is not None else None

    return [of_run(run) for run in runs]


def _training_loss(runs: Sequence[StudyRun], epoch: int) -> Values:
    ends = [curves.training_loss_curve(run.records).values for run in runs]
    return [float(values[-1]) if len(values) else None for values in ends]


def _seconds_to_common_loss(runs: Sequence[StudyRun], epoch: int) -> Values:
    """The time at which each run reaches the common training loss."""
    losses = [curves.training_loss_curve(run.records) for run in runs]
    if not all(len(curve.values) for curve in losses):
        return [None] * len(losses)
    level = common_training_loss(runs) if losses else 0.0
    return [float(curve.over[int(np.argmax(curve.values <= level))]) for curve in losses]


def common_training_loss(runs: Sequence[StudyRun]) -> float:
    """A training loss that all of these runs reach: 5% above the largest of their minima."""
    return MARGIN * max(float(curves.training_loss_curve(run.records).values.min()) for run in runs)


QUANTITIES: dict[str, Quantity] = {
    "seconds_to_target": _summary("time to target (s)", "seconds_to_target"),
    "samples_to_target": _summary("samples to target", "samples_to_target"),
    "updates_to_target": _summary("updates to target", "updates_to_target"),
    "bytes_to_target": _summary("bytes to target (B)", "bytes_to_target", in_bytes=True),
    "seconds_to_common_loss": Quantity(
        "time to a training loss that all reach (s)", _seconds_to_common_loss, thinning.TRAINING_LOSS
    ),
    "seconds": _summary("time (s)", "seconds"),
    "seconds_per_epoch": Quantity("time per epoch (s)", _per_epoch),
    "seconds_per_step": Quantity("time per step (s)", _per_step),
    "samples_per_second": _summary("samples per second", "samples_per_second"),
    "accuracy": _summary("accuracy at the end", "accuracy", 3),
    "accuracy_last5": _last("accuracy, mean of the last 5% of evaluations", "accuracy"),
    "accuracy_top5": _summary("top-5 accuracy at the end", "accuracy_top5", 3),
    "loss": _summary("loss at the end", "loss", 3),
    "loss_last5": _last("loss, mean of the last 5% of evaluations", "loss"),
    "training_loss": Quantity("training loss at the end", _training_loss, thinning.TRAINING_LOSS, 3),
    "consensus_distance": _summary("consensus distance (squared)", "consensus_distance"),
    "exchanges_per_gradient": _summary("averagings per gradient", "exchanges_per_gradient"),
    "samples_per_update": _summary("samples per update", "samples_per_update"),
    "updates": _summary("updates", "updates"),
    "staleness_mean": _summary("staleness (versions)", "staleness_mean"),
    "idle_share": _summary("share of time idle", "idle_share", 2),
    "bytes_sent": _summary("bytes sent (B)", "bytes_sent", in_bytes=True),
    "bytes_after_joining": Quantity(
        "bytes sent without the first parameters (B)", _bytes_after_joining, thinning.TRAFFIC, in_bytes=True
    ),
}
