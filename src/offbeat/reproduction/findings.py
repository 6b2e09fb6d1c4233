"""What a study has found: a table of means with 95% intervals over seeds, and sentences beside published numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from offbeat.comparison import Interval, interval
from offbeat.reproduction.quantities import Measured, Quantity, quantity
from offbeat.reproduction.study import Claim, Side, Study


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
    """`agrees`, `better`, `worse`, or nothing where there is no number to compare with."""


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
    ours = interval(_compared(claim, values))
    if ours is None:
        return Finding(f"Not found here: {claim.sentence.format(ours='–')} Published: {claim.published}.", None, "")
    said = claim.sentence.format(ours=spelled(ours, quantity(claim.quantity) if claim.over is None else None))
    verdict = _verdict(claim, ours)
    judged = {"agrees": "; ours agrees", "better": "; ours is better", "worse": "; ours is worse", "": ""}[verdict]
    return Finding(f"{said} Published: {claim.published}{judged}.", ours, verdict)


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


def _verdict(claim: Claim, ours: Interval) -> str:
    if claim.low is None and claim.high is None:
        return ""
    low = ours.mean if ours.low is None else ours.low
    high = ours.mean if ours.high is None else ours.high
    if claim.low is not None and high < claim.low:
        return "worse" if claim.better == "higher" else "better"
    if claim.high is not None and low > claim.high:
        return "better" if claim.better == "higher" else "worse"
    return "agrees"


def shown(value: Interval | None, of: Quantity | None = None) -> str:
    """A mean, and half of its interval after ± where there is one: for tables."""
    if value is None:
        return "–"
    digits = None if of is None else of.digits
    mean = _number(value.mean, digits)
    if value.high is None:
        return mean
    half = value.high - value.mean
    return f"{mean} ±{half:,.0f}" if half >= 100 else f"{mean} ±{_number(half, digits) if digits else f'{half:.2g}'}"


def spelled(value: Interval, of: Quantity | None = None) -> str:
    """A mean, and the ends of its interval in brackets where there is one: for sentences."""
    digits = None if of is None else of.digits
    mean = _number(value.mean, digits)
    if value.low is None or value.high is None:
        return mean
    return f"{mean} ({_number(value.low, digits)}–{_number(value.high, digits)})"


def _number(value: float, digits: int | None) -> str:
    if digits is not None:
        return f"{value:.{digits}f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _plain_row(row: Row) -> dict[str, Any]:
    cells = {name: msgspec.to_builtins(cell) for name, cell in row.cells.items()}
    return {"case": row.case, "x": row.x, "strategy": row.strategy, "runs": row.runs, **cells}
