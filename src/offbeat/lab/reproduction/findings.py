"""The findings of a study: a table of means with 95% intervals over seeds, and its claims with our numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, unknown
from offbeat.lab.report.formatting import size
from offbeat.lab.reproduction.study import Claim, RunSelection, Study, StudyRun
from offbeat.records import curves
from offbeat.records.comparison import Interval, interval

VERDICTS = {
    "agrees": "ours agrees",
    "better": "ours is better",
    "worse": "ours is worse",
    "uncertain": "ours is too uncertain to tell",
}


@dataclass(frozen=True)
class Row:
    """A row of the table: one strategy in one case, with an interval for each column."""

    case: str
    x: float | None
    strategy: str
    runs: int
    cells: dict[str, Interval | None]


@dataclass(frozen=True)
class Finding:
    """The sentence of a claim, and the number in it."""

    sentence: str
    ours: Interval | None
    verdict: str
    """A key of `VERDICTS`, or empty if there is no number to compare with."""


@dataclass(frozen=True)
class Findings:
    """The rows of the table and the sentences of a study."""

    rows: tuple[Row, ...]
    sentences: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data; the cells of a row are keys beside its other fields."""
        rows = [msgspec.to_builtins(row) for row in self.rows]
        return {"rows": [row | row.pop("cells") for row in rows], "findings": msgspec.to_builtins(self.sentences)}


def compute_findings(study: Study, runs: Sequence[StudyRun]) -> Findings:
    """The findings of a study from these runs."""
    rows = tuple(_rows(study, runs))
    return Findings(rows, tuple(_finding(study, claim, runs) for claim in study.description.claims))


def values_of(study: Study, name: str, runs: Sequence[StudyRun]) -> dict[tuple[str, str, int], float | None]:
    """A quantity by case, strategy and seed."""
    result = {}
    for case in dict.fromkeys(run.case for run in runs):
        of_case = [run for run in runs if run.case == case]
        values = quantity(name).of(of_case, study.description.epoch)
        result.update({(case, run.strategy, run.seed): value for run, value in zip(of_case, values, strict=True)})
    return result


def _rows(study: Study, runs: Sequence[StudyRun]) -> list[Row]:
    columns = {name: values_of(study, name, runs) for name in study.description.columns}
    rows = []
    for case, strategy in dict.fromkeys((run.case, run.strategy) for run in runs):
        seeds = [run.seed for run in runs if (run.case, run.strategy) == (case, strategy)]
        cells = {name: interval(values[case, strategy, seed] for seed in seeds) for name, values in columns.items()}
        rows.append(Row(case, study.case(case).x, strategy, len(seeds), cells))
    return rows


def _finding(study: Study, claim: Claim, runs: Sequence[StudyRun]) -> Finding:
    values = _claim_values(claim, values_of(study, claim.quantity, runs))
    ours = interval(values)
    if ours is None:
        return Finding(f"Not found here: {claim.sentence.format(ours='–')} Published: {claim.published}.", None, "")
    unit = quantity(claim.quantity) if claim.over is None else None
    sentence = claim.sentence.format(ours=spell_interval(ours, unit))
    if ours.count < len(values):
        sentence += f" That is of {ours.count} of {len(values)} seeds; the others have no such number."
    verdict = verdict_of(claim, ours)
    verdict_text = f"; {VERDICTS[verdict]}" if verdict else ""
    return Finding(f"{sentence} Published: {claim.published}{verdict_text}.", ours, verdict)


def check_study(study: Study) -> None:
    """Refuse a study with an unknown quantity, or a claim about runs that it does not have, before it is run."""
    description = study.description
    sides = {(case.label, label) for case in study.cases for label in case.plan.labels}
    for name in (*description.columns, *(figure.y for figure in description.figures if figure.y)):
        quantity(name)
    for claim in description.claims:
        quantity(claim.quantity)
        for side in (claim.of, claim.over):
            is_run = side is None or (side.case, side.strategy) in sides
            require(is_run, f"{study.name} claims something of {side}, which is not run; {_listed(sides)}")
        try:
            claim.sentence.format(ours="")
        except (KeyError, IndexError, ValueError):
            raise ConfigurationError(
                f"{study.name} has a sentence with something else in braces than {{ours}}: {claim.sentence!r}"
            ) from None


def _listed(sides: set[tuple[str, str]]) -> str:
    return "there are " + ", ".join(f"{strategy} in {case}" if case else strategy for case, strategy in sorted(sides))


def _claim_values(claim: Claim, values: dict[tuple[str, str, int], float | None]) -> list[float | None]:
    """The value of each seed: of one side, or the ratio of both."""
    of = _by_seed(claim.of, values)
    if claim.over is None:
        return list(of.values())
    over = _by_seed(claim.over, values)
    pairs = [(of[seed], over[seed]) for seed in of.keys() & over.keys()]
    return [value / other if value is not None and other else None for value, other in pairs]


def _by_seed(side: RunSelection, values: dict[tuple[str, str, int], float | None]) -> dict[int, float | None]:
    chosen = side.case, side.strategy
    return {seed: value for (case, strategy, seed), value in values.items() if (case, strategy) == chosen}


def verdict_of(claim: Claim, ours: Interval) -> str:
    """How our interval compares with the published range: a key of `VERDICTS`, or empty without a range."""
    if claim.low is None and claim.high is None:
        return ""
    low = ours.mean if ours.low is None else ours.low
    high = ours.mean if ours.high is None else ours.high
    if claim.low is not None and high < claim.low:
        return "worse" if claim.better == "higher" else "better"
    if claim.high is not None and low > claim.high:
        return "better" if claim.better == "higher" else "worse"
    return "agrees" if high - low <= abs(ours.mean) else "uncertain"  # a wide interval would agree with anything


def format_interval(value: Interval | None, of: Quantity | None = None, runs: int | None = None) -> str:
    """For tables: a mean, half of its interval after ±, and of how many runs it is if not of all `runs`."""
    if value is None:
        return "–"
    text = _number(value.mean, of)
    if value.high is not None:
        text += f" ±{_number(value.high - value.mean, of, 2)}"
    return text if runs is None or value.count == runs else f"{text} ({value.count} of {runs})"


def spell_interval(value: Interval, of: Quantity | None = None) -> str:
    """For sentences: a mean, and the ends of its interval in brackets, if it has one."""
    mean = _number(value.mean, of)
    if value.low is None or value.high is None:
        return mean
    return f"{mean} ({_number(value.low, of)}–{_number(value.high, of)})"


def _number(value: float, of: Quantity | None, digits: int = 3) -> str:
    if of is not None and of.in_bytes:
        return size(value)
    if of is not None and of.digits is not None:
        return f"{value:.{of.digits}f}"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


# Quantities: one number per run, from which intervals over seeds are computed. A quantity is computed from all runs of
# a case, since some depend on all of them, such as the time to a training loss that every run reaches.


Values = list[float | None]


@dataclass(frozen=True)
class Quantity:
    """A quantity of runs."""

    head: str
    """Its name in a table and on an axis."""
    of: Callable[[Sequence[StudyRun], int | None], Values]
    """Computes one value per run, from the runs of one case and the number of samples of an epoch."""
    digits: int | None = None
    """Digits after the point; None: three significant digits."""
    in_bytes: bool = False
    """Whether values are sizes in bytes."""


def _summary(head: str, field: str, digits: int | None = None, in_bytes: bool = False) -> Quantity:
    """A field of `Summary` as a quantity."""
    return Quantity(head, lambda runs, epoch: [getattr(run.summary, field) for run in runs], digits, in_bytes)


def _per_epoch(runs: Sequence[StudyRun], epoch: int | None) -> Values:
    return [
        run.summary.seconds / run.summary.samples * epoch if epoch and run.summary.samples else None for run in runs
    ]


def _per_step(runs: Sequence[StudyRun], epoch: int | None) -> Values:
    return [run.summary.seconds / run.summary.updates if run.summary.updates else None for run in runs]


def _per_second(runs: Sequence[StudyRun], epoch: int | None) -> Values:
    return [run.summary.samples / run.summary.seconds if run.summary.seconds else None for run in runs]


def _last5(metric: Literal["accuracy", "loss"]) -> Callable[[Sequence[StudyRun], int | None], Values]:
    """The mean of the last 5% of the evaluations, at least of one."""

    def of(runs: Sequence[StudyRun], epoch: int | None) -> Values:
        ends = [curves.evaluation_curve(run.records, metric).values for run in runs]
        return [float(np.mean(values[-max(1, len(values) // 20) :])) if len(values) else None for values in ends]

    return of


def _updates_to_target(runs: Sequence[StudyRun], epoch: int | None) -> Values:
    """Samples to target ÷ samples per update."""
    return [
        run.summary.samples_to_target / run.summary.samples_per_update
        if run.summary.samples_to_target and run.summary.samples_per_update
        else None
        for run in runs
    ]


def _training_loss(runs: Sequence[StudyRun], epoch: int | None) -> Values:
    ends = [curves.training_loss_curve(run.records).values for run in runs]
    return [float(values[-1]) if len(values) else None for values in ends]


def _seconds_to_common_loss(runs: Sequence[StudyRun], epoch: int | None) -> Values:
    """The time at which each run reaches the common training loss."""
    losses = [curves.training_loss_curve(run.records) for run in runs]
    if not all(len(curve.values) for curve in losses):
        return [None] * len(losses)
    level = common_training_loss(runs) if losses else 0.0
    return [float(curve.over[int(np.argmax(curve.values <= level))]) for curve in losses]


MARGIN = 1.05
"""The common loss is this factor above the lowest: at its end a curve is so flat that noise would decide."""


def common_training_loss(runs: Sequence[StudyRun]) -> float:
    """A training loss that all of these runs reach: 5% above the largest of their minima."""
    return MARGIN * max(float(curves.training_loss_curve(run.records).values.min()) for run in runs)


QUANTITIES: dict[str, Quantity] = {
    "seconds_to_target": _summary("time to target (s)", "seconds_to_target"),
    "samples_per_second": Quantity("samples per second", _per_second),
    "accuracy_last5": Quantity("accuracy, mean of the last 5% of evaluations", _last5("accuracy"), 3),
    "loss_last5": Quantity("loss, mean of the last 5% of evaluations", _last5("loss"), 3),
    "updates_to_target": Quantity("updates to target", _updates_to_target),
    "samples_to_target": _summary("samples to target", "samples_to_target"),
    "bytes_to_target": _summary("bytes to target (B)", "bytes_to_target", in_bytes=True),
    "seconds_to_common_loss": Quantity("time to a training loss that all reach (s)", _seconds_to_common_loss),
    "seconds": _summary("time (s)", "seconds"),
    "seconds_per_epoch": Quantity("time per epoch (s)", _per_epoch),
    "seconds_per_step": Quantity("time per step (s)", _per_step),
    "accuracy": _summary("accuracy at the end", "accuracy", 3),
    "accuracy_top5": _summary("top-5 accuracy at the end", "accuracy_top5", 3),
    "loss": _summary("loss at the end", "loss", 3),
    "training_loss": Quantity("training loss at the end", _training_loss, 3),
    "consensus_distance": _summary("consensus distance (squared)", "consensus_distance"),
    "exchanges_per_gradient": _summary("averagings per gradient", "exchanges_per_gradient"),
    "samples_per_update": _summary("samples per update", "samples_per_update"),
    "updates": _summary("updates", "updates"),
    "staleness_mean": _summary("staleness (versions)", "staleness_mean"),
    "idle_share": _summary("share of time idle", "idle_share", 2),
    "bytes_sent": _summary("bytes sent (B)", "bytes_sent", in_bytes=True),
}


def quantity(name: str) -> Quantity:
    """The quantity of that name; raises if there is none."""
    if name not in QUANTITIES:
        raise unknown("quantity", name, QUANTITIES)
    return QUANTITIES[name]
