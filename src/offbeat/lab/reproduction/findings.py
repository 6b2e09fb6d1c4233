"""What a study has found: a table of means with 95% intervals over seeds, and sentences beside published numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from offbeat.core.validation import require
from offbeat.errors import ConfigurationError
from offbeat.lab.report.numbers import size
from offbeat.lab.reproduction.quantities import Measured, Quantity, quantity
from offbeat.lab.reproduction.study import Claim, Side, Study
from offbeat.records.comparison import Interval, interval

JUDGED = {
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


def find(study: Study, runs: Sequence[Measured]) -> Findings:
    """Everything that is told of these runs."""
    rows = tuple(_rows(study, runs))
    return Findings(rows, tuple(_finding(study, claim, runs) for claim in study.described.claims))


def values_of(study: Study, name: str, runs: Sequence[Measured]) -> dict[tuple[str, str, int], float | None]:
    """A quantity by case, strategy and seed."""
    found = {}
    for case in dict.fromkeys(run.case for run in runs):
        mine = [run for run in runs if run.case == case]
        values = quantity(name).of(mine, study.described.epoch)
        found.update({(case, run.strategy, run.seed): value for run, value in zip(mine, values, strict=True)})
    return found


def _rows(study: Study, runs: Sequence[Measured]) -> list[Row]:
    columns = {name: values_of(study, name, runs) for name in study.described.columns}
    rows = []
    for case, strategy in dict.fromkeys((run.case, run.strategy) for run in runs):
        seeds = [run.seed for run in runs if (run.case, run.strategy) == (case, strategy)]
        cells = {name: interval(values[case, strategy, seed] for seed in seeds) for name, values in columns.items()}
        rows.append(Row(case, study.case(case).x, strategy, len(seeds), cells))
    return rows


def _finding(study: Study, claim: Claim, runs: Sequence[Measured]) -> Finding:
    values = values_of(study, claim.quantity, runs)
    compared = _compared(claim, values)
    ours = interval(compared)
    if ours is None:
        return Finding(f"Not found here: {claim.sentence.format(ours='–')} Published: {claim.published}.", None, "")
    said = claim.sentence.format(ours=spelled(ours, quantity(claim.quantity) if claim.over is None else None))
    verdict = verdict_of(claim, ours)
    if ours.count < len(compared):
        said += f" That is of {ours.count} of {len(compared)} seeds; the others have no such number."
    judged = f"; {JUDGED[verdict]}" if verdict else ""
    return Finding(f"{said} Published: {claim.published}{judged}.", ours, verdict)


def check(study: Study) -> None:
    """Refuse a study that speaks of something that is not there, before it is run."""
    said = study.described
    sides = {(case.label, label) for case in study.cases for label in case.plan.labels}
    for name in (*said.columns, *(drawing.y for drawing in said.drawings if drawing.y)):
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


def _by_seed(side: Side, values: dict[tuple[str, str, int], float | None]) -> dict[int, float | None]:
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


def shown(value: Interval | None, of: Quantity | None = None, runs: int | None = None) -> str:
    """For tables: a mean, half of its interval after ± where there is one, and of how many runs if not of all."""
    if value is None:
        return "–"
    text = _number(value.mean, of)
    if value.high is not None:
        text += f" ±{_number(value.high - value.mean, of, 2)}"
    return text if runs is None or value.count == runs else f"{text} ({value.count} of {runs})"


def spelled(value: Interval, of: Quantity | None = None) -> str:
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
