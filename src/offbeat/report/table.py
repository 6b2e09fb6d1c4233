"""The comparison as a table: one row a strategy, the same cells in the terminal and in the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from offbeat.analysis import Summary
from offbeat.comparison import Comparison, interval
from offbeat.report.numbers import NONE, fixed, number, percent

LABEL_MAX = 16
NEVER_STALE = "0.0/0"


@dataclass(frozen=True)
class Column:
    """A column: its head, in one or two lines, what it means, and its cell for a strategy."""

    head: str
    meaning: str
    cell: Callable[[Comparison, str], str]
    on_page_only: bool = False
    makes_room: bool = False
    """Whether the terminal, which is narrow, goes without it where there are columns about exchanges."""


def columns(comparison: Comparison) -> list[Column]:
    """The columns that say something: none about a target that was not set, or an accuracy that was not measured."""
    timed = [COLUMN_SECONDS, COLUMN_SPEEDUP] if comparison.target else []
    every = [*timed, *COLUMNS]
    return [
        column
        for column in every
        if column in timed or any(column.cell(comparison, strategy) != NONE for strategy in comparison.strategies)
    ]


def comparison_table(comparison: Comparison) -> Table:
    """The table for the terminal."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    longest = max(len(strategy) for strategy in comparison.strategies)
    table.add_column("strategy", overflow="fold", vertical="bottom", min_width=min(longest, LABEL_MAX))
    shown = [column for column in columns(comparison) if _has_room(comparison, column)]
    for column in shown:
        table.add_column(column.head, justify="right", vertical="bottom")
    for strategy in comparison.strategies:
        table.add_row(Text(strategy), *(column.cell(comparison, strategy) for column in shown))
    return table


def _has_room(comparison: Comparison, column: Column) -> bool:
    """Whether the terminal shows a column. Some make room for exchanges, and so does staleness where there is none."""
    if column.on_page_only or not any(run.exchanges for run in comparison.summaries):
        return not column.on_page_only
    cells = {column.cell(comparison, strategy) for strategy in comparison.strategies}
    return not column.makes_room and not cells <= {NONE, NEVER_STALE}


def _mean(comparison: Comparison, strategy: str, value: Callable[[Summary], float | None]) -> float | None:
    over = interval(value(summary) for summary in comparison.runs_of(strategy))
    return over.mean if over else None


def _seconds(comparison: Comparison, strategy: str) -> str:
    runs = comparison.runs_of(strategy)
    over = interval(summary.seconds_to_target for summary in runs)
    if over is None:
        return "not reached"
    digits = 1 if over.mean >= 10 else 2
    shown = fixed(over.mean, digits)
    if over.high is not None:
        shown += f" ±{fixed(over.high - over.mean, digits)}"
    return shown if over.count == len(runs) else f"{shown} ({over.count}/{len(runs)})"


def _speedup(comparison: Comparison, strategy: str) -> str:
    if strategy == comparison.baseline:
        return "baseline"
    gain = comparison.speedup_of(strategy)
    if gain is None:
        return NONE
    if gain.high is None:
        return f"{fixed(gain.mean)}×"
    return f"{fixed(gain.mean)}× ±{fixed(gain.high - gain.mean)}"


def _staleness(comparison: Comparison, strategy: str) -> str:
    known = [run.staleness_max for run in comparison.runs_of(strategy) if run.staleness_max is not None]
    if not known:
        return NONE
    return f"{fixed(_mean(comparison, strategy, lambda run: run.staleness_mean), 1)}/{max(known)}"


def _of_exchanges(value: Callable[[Summary], float | None]) -> Callable[[Comparison, str], str]:
    """A cell that is left blank by strategies without exchanges."""

    def cell(comparison: Comparison, strategy: str) -> str:
        made = any(run.exchanges or run.exchanges_lost for run in comparison.runs_of(strategy))
        return number(_mean(comparison, strategy, value)) if made else NONE

    return cell


def _consensus(comparison: Comparison, strategy: str) -> str:
    mean = _mean(comparison, strategy, lambda run: run.consensus_distance)
    estimated = any(run.consensus_estimated for run in comparison.runs_of(strategy))
    return f"≈{number(mean)}" if estimated else number(mean)


COLUMN_SECONDS = Column(
    "seconds\nto target",
    "mean over seeds ± half its 95% interval; in brackets, how many seeds reached the target where not all did",
    _seconds,
)
COLUMN_SPEEDUP = Column(
    "speed-up",
    "how many times sooner than the baseline, paired by seed, ± half its 95% interval; above 1 is sooner",
    _speedup,
)
COLUMNS = (
    Column(
        "idle",
        "share of the workers' time spent waiting",
        lambda compared, strategy: percent(_mean(compared, strategy, lambda run: run.idle_share)),
    ),
    Column(
        "staleness\nmean/max",
        "versions made between the one that a message was computed at and the one that it went into",
        _staleness,
    ),
    Column(
        "samples\nper s",
        "samples applied per second",
        lambda compared, strategy: number(_mean(compared, strategy, lambda run: run.samples_per_second)),
    ),
    Column(
        "updates",
        "updates of the parameters in a run",
        lambda compared, strategy: number(_mean(compared, strategy, lambda run: run.updates)),
        makes_room=True,
    ),
    Column(
        "dropped",
        "samples computed and not applied, in a run",
        lambda compared, strategy: number(_mean(compared, strategy, lambda run: run.dropped)),
        makes_room=True,
    ),
    Column(
        "exchanges",
        "averagings of two peers, in a run",
        _of_exchanges(lambda run: run.exchanges),
        on_page_only=True,
    ),
    Column(
        "exchanges\nper step",
        "averagings that a peer had a part in, for each gradient that it applied; what the rate asks for",
        _of_exchanges(lambda run: run.exchanges_per_gradient),
    ),
    Column(
        "exchanges\nlost",
        "exchanges whose peer was gone before it answered, in a run",
        _of_exchanges(lambda run: run.exchanges_lost),
        on_page_only=True,
    ),
    Column(
        "round trip\nin s",
        "seconds from the beginning of an exchange to its answer",
        _of_exchanges(lambda run: run.round_trip_seconds),
        on_page_only=True,
    ),
    Column(
        "consensus\ndistance",
        "squared distance of a peer's model from the mean of all, over peers and the second half of the run; "
        "≈ where it is estimated from exchanges",
        _consensus,
    ),
    Column(
        "accuracy",
        "at the last evaluation",
        lambda compared, strategy: fixed(_mean(compared, strategy, lambda run: run.accuracy), 3),
    ),
    Column(
        "loss",
        "at the last evaluation",
        lambda compared, strategy: number(_mean(compared, strategy, lambda run: run.loss)),
    ),
)
