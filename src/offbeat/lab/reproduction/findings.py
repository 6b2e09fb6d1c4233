"""What a study has found: a table of means with 95% intervals over seeds, and sentences beside published numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, unknown
from offbeat.lab.report.formatting import size
from offbeat.lab.reproduction.study import Claim, RunSelection, Study, StudyRun
from offbeat.records import curves
from offbeat.records.comparison import Interval, interval
from offbeat.records.metrics import Summary

VERDICTS = {
    "agrees": "ours agrees",
    "better": "ours is better",
    "worse": "ours is worse",
    "uncertain": "ours is too uncertain to tell",
}


@dataclass(frozen=True)
class Row:
    """One strategy in one case: an interval a column."""

    case: str
    x: float | None
    strategy: str
    runs: int
    cells: dict[str, Interval | None]


@dataclass(frozen=True)
class Finding:
    """One sentence, and the number in it."""

    sentence: str
    ours: Interval | None
    verdict: str
    """`agrees`, `better`, `worse`, `uncertain`, or nothing where there is no number to compare with."""


@dataclass(frozen=True)
class Findings:
    """Rows and sentences of a study."""

    rows: tuple[Row, ...]
    sentences: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "rows": [_plain_row(row) for row in self.rows],
            "findings": [msgspec.to_builtins(finding) for finding in self.sentences],
        }


def compute_findings(study: Study, runs: Sequence[StudyRun]) -> Findings:
    """Everything that is told of these runs."""
    rows = tuple(_rows(study, runs))
    return Findings(rows, tuple(_finding(study, claim, runs) for claim in study.description.claims))


def values_of(study: Study, name: str, runs: Sequence[StudyRun]) -> dict[tuple[str, str, int], float | None]:
    """A quantity by case, strategy and seed."""
    found = {}
    for case in dict.fromkeys(run.case for run in runs):
        mine = [run for run in runs if run.case == case]
        values = quantity(name).of(mine, study.description.epoch)
        found.update({(case, run.strategy, run.seed): value for run, value in zip(mine, values, strict=True)})
    return found


def _rows(study: Study, runs: Sequence[StudyRun]) -> list[Row]:
    columns = {name: values_of(study, name, runs) for name in study.description.columns}
    rows = []
    for case, strategy in dict.fromkeys((run.case, run.strategy) for run in runs):
        seeds = [run.seed for run in runs if (run.case, run.strategy) == (case, strategy)]
        cells = {name: interval(values[case, strategy, seed] for seed in seeds) for name, values in columns.items()}
        rows.append(Row(case, study.case(case).x, strategy, len(seeds), cells))
    return rows


def _finding(study: Study, claim: Claim, runs: Sequence[StudyRun]) -> Finding:
    values = values_of(study, claim.quantity, runs)
    compared = _compared(claim, values)
    ours = interval(compared)
    if ours is None:
        return Finding(f"Not found here: {claim.sentence.format(ours='–')} Published: {claim.published}.", None, "")
    said = claim.sentence.format(ours=spell_interval(ours, quantity(claim.quantity) if claim.over is None else None))
    verdict = verdict_of(claim, ours)
    if ours.count < len(compared):
        said += f" That is of {ours.count} of {len(compared)} seeds; the others have no such number."
    judged = f"; {VERDICTS[verdict]}" if verdict else ""
    return Finding(f"{said} Published: {claim.published}{judged}.", ours, verdict)


def check_study(study: Study) -> None:
    """Refuse a study that speaks of something that is not there, before it is run."""
    said = study.description
    sides = {(case.label, label) for case in study.cases for label in case.plan.labels}
    for name in (*said.columns, *(drawing.y for drawing in said.figures if drawing.y)):
        quantity(name)
    for claim in said.claims:
        quantity(claim.quantity)
        for side in (claim.of, claim.over):
            known = side is None or (side.case, side.strategy) in sides
            require(known, f"{study.name} claims something of {side}, which is not run; {_listed(sides)}")
        try:
            claim.sentence.format(ours="")
        except (KeyError, IndexError, ValueError):
            raise ConfigurationError(
                f"{study.name} has a sentence with something else in braces than {{ours}}: {claim.sentence!r}"
            ) from None


def _listed(sides: set[tuple[str, str]]) -> str:
    return "there are " + ", ".join(f"{strategy} in {case}" if case else strategy for case, strategy in sorted(sides))


def _compared(claim: Claim, values: dict[tuple[str, str, int], float | None]) -> list[float | None]:
    """One number a seed: of one side, or of one over the other."""
    of = _by_seed(claim.of, values)
    if claim.over is None:
        return list(of.values())
    over = _by_seed(claim.over, values)
    ratios: list[float | None] = []
    for seed in of.keys() & over.keys():
        mine, theirs = of[seed], over[seed]
        ratios.append(mine / theirs if mine is not None and theirs else None)
    return ratios


def _by_seed(side: RunSelection, values: dict[tuple[str, str, int], float | None]) -> dict[int, float | None]:
    return {
        seed: value
        for (case, strategy, seed), value in values.items()
        if (case, strategy) == (side.case, side.strategy)
    }


def verdict_of(claim: Claim, ours: Interval) -> str:
    """How ours stands beside what was published."""
    if claim.low is None and claim.high is None:
        return ""
    low = ours.mean if ours.low is None else ours.low
    high = ours.mean if ours.high is None else ours.high
    if claim.low is not None and high < claim.low:
        return "worse" if claim.better == "higher" else "better"
    if claim.high is not None and low > claim.high:
        return "better" if claim.better == "higher" else "worse"
    return "agrees" if high - low <= abs(ours.mean) else "uncertain"  # a wide interval agrees with anything


def format_interval(value: Interval | None, of: Quantity | None = None, runs: int | None = None) -> str:
    """For tables: a mean, half of its interval after ± where there is one, and of how many runs if not of all."""
    if value is None:
        return "–"
    text = _number(value.mean, of)
    if value.high is not None:
        text += f" ±{_number(value.high - value.mean, of, 2)}"
    return text if runs is None or value.count == runs else f"{text} ({value.count} of {runs})"


def spell_interval(value: Interval, of: Quantity | None = None) -> str:
    """For sentences: a mean, and the ends of its interval in brackets where there is one."""
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


def _plain_row(row: Row) -> dict[str, Any]:
    cells = {name: msgspec.to_builtins(cell) for name, cell in row.cells.items()}
    return {"case": row.case, "x": row.x, "strategy": row.strategy, "runs": row.runs, **cells}


# What is measured of runs, one number a run; intervals over seeds are made of these.
#
# A quantity is of all runs of a case at once, for some can only be had by looking at all of them: a training loss that
# every run reaches, for one.


Values = list[float | None]


@dataclass(frozen=True)
class Quantity:
    """How it is called in a table and on an axis, and how it is had of the runs of one case, one value each."""

    head: str
    of: Callable[[Sequence[StudyRun], int | None], Values]
    """Takes the runs, and how many samples an epoch has."""
    digits: int | None = None
    """Digits after the point; none: three that count."""
    in_bytes: bool = False


def _read(read: Callable[[Summary], float | None]) -> Callable[[Sequence[StudyRun], int | None], Values]:
    return lambda runs, epoch: [read(run.summary) for run in runs]


def _per_epoch(runs: Sequence[StudyRun], epoch: int | None) -> Values:
    return [
        run.summary.seconds / run.summary.samples * epoch if epoch and run.summary.samples else None for run in runs
    ]


def _per_step(runs: Sequence[StudyRun], epoch: int | None) -> Values:
    return [run.summary.seconds / run.summary.updates if run.summary.updates else None for run in runs]


def _training_loss(runs: Sequence[StudyRun], epoch: int | None) -> Values:
    ends = [curves.training_loss_curve(run.records).values for run in runs]
    return [float(values[-1]) if len(values) else None for values in ends]


def _seconds_to_common_loss(runs: Sequence[StudyRun], epoch: int | None) -> Values:
    """When the training loss was first as low as every run of the case becomes at least."""
    made = [curves.training_loss_curve(run.records) for run in runs]
    if not made or any(not len(curve.values) for curve in made):
        return [None] * len(made)
    level = common_training_loss(runs)
    return [float(curve.over[int(np.argmax(curve.values <= level))]) for curve in made]


MARGIN = 1.05
"""So much above the lowest loss is looked at: at the very end a curve is so flat that its noise decides."""


def common_training_loss(runs: Sequence[StudyRun]) -> float:
    """A training loss that all of these runs reach: 5% above the lowest that there is."""
    return MARGIN * max(float(curves.training_loss_curve(run.records).values.min()) for run in runs)


QUANTITIES: dict[str, Quantity] = {
    "seconds_to_target": Quantity("time to target (s)", _read(lambda run: run.seconds_to_target)),
    "samples_to_target": Quantity("samples to target", _read(lambda run: run.samples_to_target)),
    "bytes_to_target": Quantity("bytes to target (B)", _read(lambda run: run.bytes_to_target), in_bytes=True),
    "seconds_to_common_loss": Quantity("time to a training loss that all reach (s)", _seconds_to_common_loss),
    "seconds": Quantity("time (s)", _read(lambda run: run.seconds)),
    "seconds_per_epoch": Quantity("time per epoch (s)", _per_epoch),
    "seconds_per_step": Quantity("time per step (s)", _per_step),
    "accuracy": Quantity("accuracy at the end", _read(lambda run: run.accuracy), 3),
    "accuracy_top5": Quantity("top-5 accuracy at the end", _read(lambda run: run.accuracy_top5), 3),
    "loss": Quantity("loss at the end", _read(lambda run: run.loss), 3),
    "training_loss": Quantity("training loss at the end", _training_loss, 3),
    "consensus_distance": Quantity("consensus distance (squared)", _read(lambda run: run.consensus_distance)),
    "exchanges_per_gradient": Quantity("averagings per gradient", _read(lambda run: run.exchanges_per_gradient)),
    "samples_per_update": Quantity("samples per update", _read(lambda run: run.samples_per_update)),
    "updates": Quantity("updates", _read(lambda run: run.updates)),
    "staleness_mean": Quantity("staleness (versions)", _read(lambda run: run.staleness_mean)),
    "idle_share": Quantity("share of time idle", _read(lambda run: run.idle_share), 2),
    "bytes_sent": Quantity("bytes sent (B)", _read(lambda run: run.bytes_sent), in_bytes=True),
}


def quantity(name: str) -> Quantity:
    if name not in QUANTITIES:
        raise unknown("quantity", name, QUANTITIES)
    return QUANTITIES[name]
