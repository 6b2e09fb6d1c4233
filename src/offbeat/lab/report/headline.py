"""One sentence that says what came out, as plainly when it is a disappointment."""

from __future__ import annotations

from offbeat.lab.report.numbers import fixed, plural, seconds
from offbeat.records.comparison import Comparison, Interval, Speedup, interval
from offbeat.records.metrics import Metric, Target


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
