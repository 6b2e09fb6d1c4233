"""A comparison as a table with one row per strategy, for terminal and page, and as a headline of one sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rich import box
from rich.table import Table
from rich.text import Text

from offbeat.core.workload import Target
from offbeat.lab.report.formatting import NONE, fixed, number, percent, plural, seconds, size
from offbeat.records.comparison import Comparison, Interval, Speedup, interval
from offbeat.records.metrics import Metric

TERMINAL_WIDTH = 100
LABEL_MAX = 16
GAP = 2
"""The width of the space between two columns."""
NEVER_STALE = "0.0/0"


Cell = Callable[[Comparison, str], str]
"""The text of a cell, from the comparison and the label of a strategy."""


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    head: str
    """One or two lines."""
    meaning: str
    """Its explanation in the page."""
    cell: Cell
    on_page_only: bool = False
    drop_order: int = 0
    """Columns are dropped in this order if the terminal is too narrow; one with 0 is never dropped."""


def columns(comparison: Comparison) -> list[Column]:
    """The columns that have a value for some strategy; those about the target if one was set."""
    timed = [COLUMN_SECONDS, COLUMN_SPEEDUP] if comparison.target else []
    if any(summary.bytes_to_target is not None for summary in comparison.summaries):
        timed += [COLUMN_BYTES, COLUMN_FEWER_BYTES]
    return [*timed, *(column for column in COLUMNS if set(_cells(comparison, column)) != {NONE})]


def comparison_table(comparison: Comparison, width: int = TERMINAL_WIDTH) -> Table:
    """The table for a terminal with `width` characters per line."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    table.add_column("strategy", overflow="fold", vertical="bottom", min_width=_label_width(comparison))
    shown = _fitting_columns(comparison, width)
    for column in shown:
        table.add_column(column.head, justify="right", vertical="bottom")
    for strategy in comparison.strategies:
        table.add_row(Text(strategy), *(column.cell(comparison, strategy) for column in shown))
    return table


def _fitting_columns(comparison: Comparison, width: int) -> list[Column]:
    """The columns that fit in a terminal; staleness is left out if peers average and no gradient was stale."""
    shown = [column for column in columns(comparison) if not column.on_page_only]
    if any(run.exchanges for run in comparison.summaries):
        shown = [column for column in shown if not set(_cells(comparison, column)) <= {NONE, NEVER_STALE}]
    for column in sorted((column for column in shown if column.drop_order), key=lambda column: column.drop_order):
        if _width(comparison, shown) > width and (column is not COLUMN_LOSS or COLUMN_ACCURACY in shown):
            shown.remove(column)
    return shown


def _cells(comparison: Comparison, column: Column) -> list[str]:
    return [column.cell(comparison, strategy) for strategy in comparison.strategies]


def _label_width(comparison: Comparison) -> int:
    return min(max(len(strategy) for strategy in comparison.strategies), LABEL_MAX)


def _width(comparison: Comparison, shown: Sequence[Column]) -> int:
    texts = ([*column.head.splitlines(), *_cells(comparison, column)] for column in shown)
    return _label_width(comparison) + sum(GAP + max(len(text) for text in column) for column in texts)


def _mean(comparison: Comparison, strategy: str, field: str) -> float | None:
    over = interval(getattr(summary, field) for summary in comparison.runs_of(strategy))
    return over.mean if over else None


def _mean_of(field: str, text: Callable[[float | None], str] = number) -> Cell:
    """The mean of a field of `Summary` over seeds."""
    return lambda comparison, strategy: text(_mean(comparison, strategy, field))


def _exchange_mean_of(field: str) -> Cell:
    """The same for a field about exchanges, which is empty for strategies without exchanges."""

    def cell(comparison: Comparison, strategy: str) -> str:
        has_exchanges = any(run.exchanges or run.exchanges_lost for run in comparison.runs_of(strategy))
        return number(_mean(comparison, strategy, field)) if has_exchanges else NONE

    return cell


def _seconds(comparison: Comparison, strategy: str) -> str:
    runs = comparison.runs_of(strategy)
    over = interval(summary.seconds_to_target for summary in runs)
    if over is None:
        return "not reached"
    text = _with_error(over, 1 if over.mean >= 10 else 2)
    return text if over.count == len(runs) else f"{text} ({over.count}/{len(runs)})"


def _ratio(ratio_of: Callable[[Comparison, str], Speedup | None]) -> Cell:
    """A ratio to the baseline."""

    def cell(comparison: Comparison, strategy: str) -> str:
        if strategy == comparison.baseline:
            return "baseline"
        ratio = ratio_of(comparison, strategy)
        return NONE if ratio is None else _with_error(ratio, unit="×")

    return cell


def _with_error(value: Interval | Speedup, digits: int = 2, unit: str = "") -> str:
    """A mean, and half of its interval after ±, if it has one."""
    mean = fixed(value.mean, digits) + unit
    return mean if value.high is None else f"{mean} ±{fixed(value.high - value.mean, digits)}"


def _staleness(comparison: Comparison, strategy: str) -> str:
    largest = [run.staleness_max for run in comparison.runs_of(strategy) if run.staleness_max is not None]
    return f"{fixed(_mean(comparison, strategy, 'staleness_mean'), 1)}/{max(largest)}" if largest else NONE


def _consensus(comparison: Comparison, strategy: str) -> str:
    mean = number(_mean(comparison, strategy, "consensus_distance"))
    return f"≈{mean}" if any(run.consensus_estimated for run in comparison.runs_of(strategy)) else mean


COLUMN_SECONDS = Column(
    "seconds\nto target",
    "mean over seeds ± half its 95% interval; in brackets, how many seeds reached the target where not all did",
    _seconds,
)
COLUMN_SPEEDUP = Column(
    "speed-up",
    "how many times sooner than the baseline, paired by seed, ± half its 95% interval; above 1 is sooner",
    _ratio(Comparison.speedup_of),
)
COLUMN_BYTES = Column(
    "bytes\nto target",
    "bytes that all ranks together had sent when the target was reached, message headers included; mean over the seeds "
    "that reached it",
    _mean_of("bytes_to_target", size),
)
COLUMN_FEWER_BYTES = Column(
    "fewer\nbytes",
    "how many times fewer bytes to target than the baseline, paired by seed, ± half its 95% interval; above 1 is fewer",
    _ratio(Comparison.bytes_ratio_of),
    drop_order=1,
)
COLUMN_ACCURACY = Column("accuracy", "at the last evaluation", _mean_of("accuracy", partial(fixed, digits=3)))
COLUMN_LOSS = Column("loss", "at the last evaluation", _mean_of("loss"), drop_order=3)
COLUMNS = (
    Column("idle", "share of the workers' time spent waiting", _mean_of("idle_share", percent)),
    Column(
        "staleness\nmean/max",
        "versions between the one that a message was computed at and the one that it was applied to",
        _staleness,
    ),
    Column("samples\nper s", "samples applied per second", _mean_of("samples_per_second"), drop_order=6),
    Column("updates", "updates of the parameters in a run", _mean_of("updates"), drop_order=2),
    Column("dropped", "samples computed and not applied, in a run", _mean_of("dropped"), drop_order=4),
    Column("exchanges", "averagings of two peers, in a run", _exchange_mean_of("exchanges"), on_page_only=True),
    Column(
        "exchanges\nper step",
        "averagings of a peer for each gradient that it applied; the rate sets their number",
        _exchange_mean_of("exchanges_per_gradient"),
        drop_order=5,
    ),
    Column(
        "exchanges\nlost",
        "exchanges whose peer was lost before it answered, in a run",
        _exchange_mean_of("exchanges_lost"),
        on_page_only=True,
    ),
    Column(
        "round trip\nin s",
        "seconds from the beginning of an exchange to its answer",
        _exchange_mean_of("round_trip_seconds"),
        on_page_only=True,
    ),
    Column(
        "consensus\ndistance",
        "squared distance of a peer's model from the mean of all, over peers and the second half of the run; "
        "≈ where it is estimated from exchanges",
        _consensus,
        drop_order=7,
    ),
    COLUMN_ACCURACY,
    COLUMN_LOSS,
)
RATIOS = (COLUMN_SPEEDUP, COLUMN_FEWER_BYTES)
"""Columns that compare with the baseline: one strategy alone has no use for them."""


# The headline


def headline(comparison: Comparison) -> str:
    """The result of the comparison in one sentence, whether or not a strategy beats the baseline."""
    if comparison.target is None:
        return _without_target(comparison)
    reached = _means(comparison, "seconds_to_target")
    if not reached:
        return _never(comparison, comparison.target)
    speedups = {
        strategy: speedup
        for strategy in comparison.strategies
        if strategy != comparison.baseline and (speedup := comparison.speedup_of(strategy))
    }
    if speedups:
        return _against_baseline(comparison, comparison.target, speedups)
    return _alone(comparison, comparison.target, reached)


def _means(comparison: Comparison, field: str) -> dict[str, Interval]:
    """The mean of a field of `Summary` for each strategy that has one."""
    intervals = {
        strategy: interval(getattr(summary, field) for summary in comparison.runs_of(strategy))
        for strategy in comparison.strategies
    }
    return {strategy: mean for strategy, mean in intervals.items() if mean}


def goal(target: Target) -> str:
    """A target in words."""
    return f"{target.value:g} accuracy" if target.metric == "accuracy" else f"a loss of {target.value:g}"


def _against_baseline(comparison: Comparison, target: Target, speedups: dict[str, Speedup]) -> str:
    """Strategies are ordered by the number of seeds that missed the target, and then by speed-up."""
    best = min(speedups, key=lambda strategy: (speedups[strategy].missed, -speedups[strategy].mean))
    gain, baseline = speedups[best], comparison.baseline
    shown = fixed(gain.mean)
    if shown == "1.00":
        sentence = f"{best} reaches {goal(target)} as soon as {baseline} does ({_certainty(gain)})"
    elif gain.mean > 1:
        subject = f"{best}, the quickest of {len(speedups)}," if len(speedups) > 1 else best
        sentence = f"{subject} reaches {goal(target)} {shown}× sooner than {baseline} ({_certainty(gain)})"
    else:
        none = f"No strategy reaches {goal(target)} sooner than {baseline}; the nearest, {best},"
        subject = none if len(speedups) > 1 else f"{best} reaches {goal(target)} later than {baseline}: it"
        sentence = f"{subject} is {shown}× as quick ({_certainty(gain)})"
    if gain.low is not None and gain.high is not None and gain.low <= 1 <= gain.high and shown != "1.00":
        sentence += "; the interval includes 1, so this may be chance"
    if gain.missed:
        sentence += f"; {plural(gain.missed, 'more seed')} missed the target on either side and cannot be compared"
    return sentence + "."


def _certainty(gain: Speedup) -> str:
    if gain.low is None or gain.high is None:
        return "1 seed, so without an interval"
    return f"95% interval {fixed(gain.low)} to {fixed(gain.high)}, {gain.pairs} seeds"


def _alone(comparison: Comparison, target: Target, reached: dict[str, Interval]) -> str:
    """Some strategies reach the target, but no speed-up can be computed."""
    first = min(reached, key=lambda strategy: (-reached[strategy].count, reached[strategy].mean))
    over, runs = reached[first], len(comparison.runs_of(first))
    seeds = plural(runs, "seed") if over.count == runs else f"{over.count} of {runs} seeds"
    sentence = f"{first} reaches {goal(target)} after {seconds(over.mean)} ({seeds})"
    others = [strategy for strategy in comparison.strategies if strategy not in reached]
    if comparison.baseline in others:
        return f"{sentence}; {comparison.baseline}, the baseline, does not reach it."
    return f"{sentence}; no other strategy does." if others else f"{sentence}."


def _never(comparison: Comparison, target: Target) -> str:
    best = _best(comparison, target.metric)
    nearest = f"{best[0]} comes nearest and ends" if best and len(comparison.strategies) > 1 else "it ends"
    ends = f"; {nearest} at {best[1]:.3g}" if best else ""
    subject = "No strategy reaches" if len(comparison.strategies) > 1 else f"{comparison.baseline} does not reach"
    return f"{subject} {goal(target)} in the time it had{ends}."


def _without_target(comparison: Comparison) -> str:
    for metric in ("accuracy", "loss"):
        best = _best(comparison, metric)
        if best is not None:
            most = "highest" if metric == "accuracy" else "lowest"
            of = f", the {most} of {len(comparison.strategies)}" if len(comparison.strategies) > 1 else ""
            return f"{best[0]} ends at {metric} {best[1]:.3g}{of}; no target was set, so nothing is timed."
    return "No target was set and nothing was evaluated, so only the speed of the runs is known."


def _best(comparison: Comparison, metric: Metric) -> tuple[str, float] | None:
    means = {strategy: over.mean for strategy, over in _means(comparison, metric).items()}
    if not means:
        return None
    best = (max if metric == "accuracy" else min)(means, key=means.__getitem__)
    return best, means[best]
