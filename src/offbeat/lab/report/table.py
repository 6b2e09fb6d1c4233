"""The comparison as a table: one row a strategy, the same cells in the terminal and in the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from offbeat.core.workload import Target
from offbeat.lab.report.formatting import NONE, fixed, number, percent, plural, seconds, size
from offbeat.records.comparison import Comparison, Interval, Speedup, interval
from offbeat.records.metrics import Metric, Summary

TERMINAL_WIDTH = 100
LABEL_MAX = 16
GAP = 2
"""Between two columns."""
NEVER_STALE = "0.0/0"


@dataclass(frozen=True)
class Column:
    """A column: its head, in one or two lines, what it means, and its cell for a strategy."""

    head: str
    meaning: str
    cell: Callable[[Comparison, str], str]
    on_page_only: bool = False
    gives_way: int = 0
    """Where a terminal is too narrow it goes without these, the lowest first; those with 0 always stay."""


def columns(comparison: Comparison) -> list[Column]:
    """The columns that say something: none about a target that was not set, or an accuracy that was not measured."""
    timed = [COLUMN_SECONDS, COLUMN_SPEEDUP] if comparison.target else []
    if any(summary.bytes_to_target is not None for summary in comparison.summaries):
        timed += [COLUMN_BYTES, COLUMN_FEWER_BYTES]
    every = [*timed, *COLUMNS]
    return [
        column
        for column in every
        if column in timed or any(column.cell(comparison, strategy) != NONE for strategy in comparison.strategies)
    ]


def comparison_table(comparison: Comparison, width: int = TERMINAL_WIDTH) -> Table:
    """The table for a terminal that is so wide."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    longest = max(len(strategy) for strategy in comparison.strategies)
    table.add_column("strategy", overflow="fold", vertical="bottom", min_width=min(longest, LABEL_MAX))
    shown = _that_fit(comparison, width)
    for column in shown:
        table.add_column(column.head, justify="right", vertical="bottom")
    for strategy in comparison.strategies:
        table.add_row(Text(strategy), *(column.cell(comparison, strategy) for column in shown))
    return table


def _that_fit(comparison: Comparison, width: int) -> list[Column]:
    """The columns for which a terminal has room. Where peers average, staleness is left out if there is none."""
    shown = [column for column in columns(comparison) if not column.on_page_only]
    if any(run.exchanges for run in comparison.summaries):
        shown = [column for column in shown if not set(_cells(comparison, column)) <= {NONE, NEVER_STALE}]
    for column in sorted((column for column in shown if column.gives_way), key=lambda column: column.gives_way):
        if _width(comparison, shown) > width and (column is not COLUMN_LOSS or COLUMN_ACCURACY in shown):
            shown.remove(column)
    return shown


def _cells(comparison: Comparison, column: Column) -> list[str]:
    return [column.cell(comparison, strategy) for strategy in comparison.strategies]


def _width(comparison: Comparison, shown: Sequence[Column]) -> int:
    labels = min(max(len(strategy) for strategy in comparison.strategies), LABEL_MAX)
    texts = ([*column.head.splitlines(), *_cells(comparison, column)] for column in shown)
    return labels + sum(GAP + max(len(text) for text in column) for column in texts)


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
    return "baseline" if strategy == comparison.baseline else _factor(comparison.speedup_of(strategy))


def _fewer_bytes(comparison: Comparison, strategy: str) -> str:
    return "baseline" if strategy == comparison.baseline else _factor(comparison.bytes_ratio_of(strategy))


def _factor(gain: Speedup | None) -> str:
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
COLUMN_BYTES = Column(
    "bytes\nto target",
    "what all ranks together had sent when the target was reached, heads of messages included; mean over the seeds "
    "that reached it",
    lambda compared, strategy: size(_mean(compared, strategy, lambda run: run.bytes_to_target)),
)
COLUMN_FEWER_BYTES = Column(
    "fewer\nbytes",
    "how many times fewer bytes to target than the baseline, paired by seed, ± half its 95% interval; above 1 is fewer",
    _fewer_bytes,
    gives_way=1,
)
COLUMN_ACCURACY = Column(
    "accuracy",
    "at the last evaluation",
    lambda compared, strategy: fixed(_mean(compared, strategy, lambda run: run.accuracy), 3),
)
COLUMN_LOSS = Column(
    "loss",
    "at the last evaluation",
    lambda compared, strategy: number(_mean(compared, strategy, lambda run: run.loss)),
    gives_way=3,
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
        gives_way=6,
    ),
    Column(
        "updates",
        "updates of the parameters in a run",
        lambda compared, strategy: number(_mean(compared, strategy, lambda run: run.updates)),
        gives_way=2,
    ),
    Column(
        "dropped",
        "samples computed and not applied, in a run",
        lambda compared, strategy: number(_mean(compared, strategy, lambda run: run.dropped)),
        gives_way=4,
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
        gives_way=5,
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
        gives_way=7,
    ),
    COLUMN_ACCURACY,
    COLUMN_LOSS,
)


# One sentence that says what came out, as plainly when it is a disappointment.


def headline(comparison: Comparison) -> str:
    """What the comparison shows, in a sentence."""
    if comparison.target is None:
        return _without_target(comparison)
    reached = {
        strategy: over
        for strategy in comparison.strategies
        if (over := interval(summary.seconds_to_target for summary in comparison.runs_of(strategy)))
    }
    if not reached:
        return _never(comparison, comparison.target)
    speedups = {
        strategy: gain
        for strategy in comparison.strategies
        if strategy != comparison.baseline and (gain := comparison.speedup_of(strategy))
    }
    if speedups:
        return _against_baseline(comparison, comparison.target, speedups)
    return _alone(comparison, comparison.target, reached)


def goal(target: Target) -> str:
    return f"{target.value:g} accuracy" if target.metric == "accuracy" else f"a loss of {target.value:g}"


def _against_baseline(comparison: Comparison, target: Target, speedups: dict[str, Speedup]) -> str:
    """A strategy that missed the target on fewer seeds goes before a quicker one: luck is not speed."""
    best = min(speedups, key=lambda strategy: (speedups[strategy].missed, -speedups[strategy].mean))
    gain, baseline = speedups[best], comparison.baseline
    who = f"{best}, the quickest of {len(speedups)}," if len(speedups) > 1 and gain.mean > 1 else best
    shown = fixed(gain.mean)
    if shown == "1.00":
        sentence = f"{best} reaches {goal(target)} as soon as {baseline} does ({_certainty(gain)})"
    elif gain.mean > 1:
        sentence = f"{who} reaches {goal(target)} {shown}× sooner than {baseline} ({_certainty(gain)})"
    else:
        none = f"No strategy reaches {goal(target)} sooner than {baseline}; the nearest, {best},"
        who = none if len(speedups) > 1 else f"{best} reaches {goal(target)} later than {baseline}: it"
        sentence = f"{who} is {shown}× as quick ({_certainty(gain)})"
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
    """Some reach the target, and there is nothing to divide by."""
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
    who = "No strategy reaches" if len(comparison.strategies) > 1 else f"{comparison.baseline} does not reach"
    return f"{who} {goal(target)} in the time it had{ends}."


def _without_target(comparison: Comparison) -> str:
    for metric in ("accuracy", "loss"):
        best = _best(comparison, metric)
        if best is not None:
            most = "highest" if metric == "accuracy" else "lowest"
            of = f", the {most} of {len(comparison.strategies)}" if len(comparison.strategies) > 1 else ""
            return f"{best[0]} ends at {metric} {best[1]:.3g}{of}; no target was set, so nothing is timed."
    return "No target was set and nothing was evaluated, so only the pace of the runs can be told."


def _best(comparison: Comparison, metric: Metric) -> tuple[str, float] | None:
    ends = {
        strategy: over.mean
        for strategy in comparison.strategies
        if (over := interval(getattr(summary, metric) for summary in comparison.runs_of(strategy)))
    }
    if not ends:
        return None
    choose = max if metric == "accuracy" else min
    best = choose(ends, key=lambda strategy: ends[strategy])
    return best, ends[best]
