"""The findings of a study: a table of means with 95% intervals over seeds, and its claims with our numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from offbeat.core.validation import require
from offbeat.errors import ConfigurationError
from offbeat.lab.report.formatting import size
from offbeat.lab.reproduction.quantities import Quantity, ValuesBySeed, quantity, values_of
from offbeat.lab.reproduction.study import Claim, RunSelection, Study, StudyFigure, StudyRun
from offbeat.lab.reproduction.verdicts import Verdict, verdict_of
from offbeat.records.comparison import Interval, interval


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
    """The sentence of a claim, the number in it, of how many of `seeds` it is, and the verdict."""

    sentence: str
    ours: Interval | None
    seeds: int
    verdict: Verdict | None
    """None if there is no number to compare with."""


@dataclass(frozen=True)
class Findings:
    """The rows of the table and the sentences of a study, one for each claim."""

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


def _rows(study: Study, runs: Sequence[StudyRun]) -> list[Row]:
    columns = {name: values_of(study, name, runs) for name in study.description.columns}
    rows = []
    for case, strategy in dict.fromkeys((run.case, run.strategy) for run in runs):
        seeds = [run.seed for run in runs if (run.case, run.strategy) == (case, strategy)]
        cells = {name: interval(values[case, strategy, seed] for seed in seeds) for name, values in columns.items()}
        rows.append(Row(case, study.case(case).x, strategy, len(seeds), cells))
    return rows


def _finding(study: Study, claim: Claim, runs: Sequence[StudyRun]) -> Finding:
    every = values_of(study, claim.quantity, runs, {side.case for side in claim.sides})
    values = _side_values(claim.of, claim.over, every)
    ours = interval(values)
    verdict = verdict_of(claim, ours)
    if ours is None:
        sentence = f"Not found here: {claim.sentence.format(ours='–')}"
    else:
        sentence = claim.sentence.format(ours=spell_interval(ours, claim_unit(claim)))
        if ours.count < len(values):
            sentence += f" That is of {ours.count} of {len(values)} seeds; the others have no such number."
    sentence += f" Published: {claim.published}{f'; {verdict.clause}' if verdict else ''}."
    if verdict is not None and verdict.word == "differs":
        sentence += f" {_explanation(claim, every)}"
    return Finding(sentence, ours, len(values), verdict)


def _explanation(claim: Claim, values: ValuesBySeed) -> str:
    """Why ours differs, with the number of the runs where that cause is switched off; or what was tried.

    Only what makes ours agree when it is switched off is called the cause: without another one ours may still differ,
    or the interval may be too wide to tell.
    """
    tried = f"tried: {claim.tried}" if claim.tried else "nothing was tried"
    if claim.cause is None:
        return f"Cause unknown; {tried}."
    without = interval(_side_values(claim.cause.of, claim.cause.over, values))
    number = "–" if without is None else spell_interval(without, claim_unit(claim))
    verdict = verdict_of(claim, without)
    experiment = f"{claim.cause.text}; with that switched off {number}: {verdict}."
    if verdict is not None and verdict.word == "agrees":
        return f"Cause: {experiment}"
    doubt = "Not the whole cause" if verdict is not None and verdict.word == "differs" else "Perhaps the cause"
    return f"{doubt}: {experiment} The rest is unknown; {tried}."


def claim_unit(claim: Claim) -> Quantity | None:
    """The quantity whose unit the number of a claim has; None for a ratio."""
    return quantity(claim.quantity) if claim.over is None else None


def _side_values(of: RunSelection, over: RunSelection | None, values: ValuesBySeed) -> list[float | None]:
    """The value of each seed: of one side, or the ratio of both."""
    numerators = _by_seed(of, values)
    if over is None:
        return list(numerators.values())
    denominators = _by_seed(over, values)
    pairs = [(numerators[seed], denominators[seed]) for seed in numerators if seed in denominators]
    return [value / other if value is not None and other else None for value, other in pairs]


def _by_seed(side: RunSelection, values: ValuesBySeed) -> dict[int, float | None]:
    chosen = side.case, side.strategy
    return {seed: value for (case, strategy, seed), value in values.items() if (case, strategy) == chosen}


# Checks


def check_study(study: Study) -> None:
    """Refuse a study that cannot be evaluated, before it is run.

    Raises ConfigurationError for an unknown quantity, a claim about runs that the study does not have, a figure that
    would take runs of several cases for seeds of one, and reported seeds that something was chosen on.
    """
    description = study.description
    sides = {(case.label, label) for case in study.cases for label in case.plan.labels}
    for name in (*description.columns, *(figure.y for figure in description.figures if figure.y)):
        quantity(name)
    for claim in description.claims:
        _check_claim(study, claim, sides)
    for figure in description.figures:
        _check_lines(study, figure, sides)
    tuned = sorted(set(study.seeds) & set(description.tuning_seeds))
    require(
        not tuned,
        f"{study.name} reports seeds that its settings were chosen on ({', '.join(map(str, tuned))}); "
        "report others than its tuning_seeds",
    )


def _check_claim(study: Study, claim: Claim, sides: set[tuple[str, str]]) -> None:
    quantity(claim.quantity)
    for side in claim.sides:
        is_run = (side.case, side.strategy) in sides
        require(is_run, f"{study.name} claims something of {side}, which is not run; {_listed(sides)}")
    try:
        claim.sentence.format(ours="")
    except (KeyError, IndexError, ValueError):
        raise ConfigurationError(
            f"{study.name} has a sentence with something else in braces than {{ours}}: {claim.sentence!r}"
        ) from None


def _check_lines(study: Study, figure: StudyFigure, sides: set[tuple[str, str]]) -> None:
    labels = Counter(figure.label(case, strategy) for case, strategy in sides if figure.has(case, strategy))
    twice = sorted(label for label, count in labels.items() if count > 1)
    require(
        not figure.cells or not twice,
        f"the figure {figure.file} of {study.name} would draw several cases or strategies as one line "
        f'({", ".join(twice)}); select some with cases or strategies, or set by = "both"',
    )


def _listed(sides: set[tuple[str, str]]) -> str:
    return "there are " + ", ".join(f"{strategy} in {case}" if case else strategy for case, strategy in sorted(sides))


# Numbers as text


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
