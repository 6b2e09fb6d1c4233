"""What `simulate`, `compare` and `train` share: run a plan, write down what came out, and say it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from cyclopts import Parameter

from offbeat.cli.flags import all_flags, file_flags, given, takes
from offbeat.cli.options import Output
from offbeat.cli.output import (
    EXPERIMENT,
    PAGE,
    given_directory,
    new_directory,
    print_comparison,
    print_json,
    print_status,
    refuse_unwritable,
)
from offbeat.cli.plans import plan_from_file, plan_of
from offbeat.cli.progress import RunProgress, show_progress
from offbeat.core.actions import Record
from offbeat.core.validation import require
from offbeat.errors import MissingDependency
from offbeat.lab.experiment import Experiment, Plan, share_done
from offbeat.lab.simulated_runs import simulate_experiment
from offbeat.records.comparison import Comparison
from offbeat.records.files import file_name
from offbeat.records.metrics import Summary, summarize
from offbeat.records.schema import Notice, RunRecords, Update

NOTICES_SHOWN = 3

Run = Callable[[Experiment, Path, str], RunRecords]
"""Runs one experiment into a directory; the text is its place among several, such as `[2/4]`."""


def carry_out(plan: Plan, output: Output, run: Run | None = None, command: str = "compare") -> int:
    """Run everything, then write, then print: whoever stops reading the output loses none of it.

    `run` shows its progress itself; without one, experiments are simulated. `command` repeats what was run.
    """
    places = places_of(plan)
    # Whatever the workload lacks, such as a package, is said before a directory is made.
    next(iter(places)).resolved()
    label = file_name(plan.workload.name.rpartition(":")[2])
    directory = given_directory(Path(output.out), output.overwrite) if output.out else new_directory(label)
    _write_experiment(plan, directory / EXPERIMENT, command)
    runs = _simulate(places, directory, output.quiet) if run is None else _run(run, places, directory)
    return present(runs, output, directory, plan.baseline)


def present(runs: list[RunRecords], output: Output, directory: Path, baseline: str | None) -> int:
    """The page, the table or JSON, and the exit code."""
    comparison = Comparison.of(runs, baseline)
    page = None if output.no_report else _draw(runs, directory / PAGE, comparison.baseline)
    if output.json:
        print_json(comparison.to_json())
    else:
        shown = [f"records: {directory}"] + ([f"page:    {page}"] if page else [])
        print_comparison(comparison, [*_budgets(comparison.summaries), *shown])
    return _failures(comparison.summaries)


def _budgets(summaries: Sequence[Summary]) -> list[str]:
    """What each strategy used of its budget, where there was one, over its seeds."""
    used: dict[str, list[tuple[float, float]]] = {}
    for summary in summaries:
        if summary.budget_used is not None and summary.budget_used_mean is not None:
            used.setdefault(summary.strategy, []).append((summary.budget_used, summary.budget_used_mean))
    return [
        f"budget:  {label} used {max(most for most, _ in shares):.0%} of it on the busiest link and direction, "
        f"{statistics.fmean(mean for _, mean in shares):.0%} on average"
        for label, shares in used.items()
    ]


def places_of(plan: Plan) -> dict[Experiment, str]:
    """Each experiment and the name of its directory, no two the same."""
    places = {e: f"{file_name(e.name)}-seed{e.seed}" for e in plan.experiments()}
    owners: dict[str, str] = {}
    for experiment, name in places.items():
        other = owners.setdefault(name, experiment.name)
        require(
            other == experiment.name,
            f"the labels {other!r} and {experiment.name!r} would share the directory {name}; change one of them",
        )
    return places


def _write_experiment(plan: Plan, path: Path, command: str) -> None:
    text = f"# What was run here. To run it again: offbeat {command} THIS-FILE\n\n" + tomli_w.dumps(plan.to_plain())
    with refuse_unwritable(path):
        path.write_text(text, encoding="utf-8")


def _simulate(places: dict[Experiment, str], directory: Path, quiet: bool) -> list[RunRecords]:
    with show_progress(quiet) as progress:
        shown = RunProgress(progress, len(places))

        def on_record(experiment: Experiment, record: Record) -> None:
            if isinstance(record, Update):
                shown.share(0, share_done(experiment, record), f"{experiment.name}, seed {experiment.seed}")

        def run(experiment: Experiment, place: Path, _: str) -> RunRecords:
            records = simulate_experiment(experiment, place, on_record).records
            shown.ended(0, summarize(records))
            if not quiet:
                _say_notices(records, f"{experiment.name}, seed {experiment.seed}: ")
            return records

        return _run(run, places, directory)


def _say_notices(records: RunRecords, whose: str) -> None:
    """What a user should read, once each, and not page after page."""
    texts = list(dict.fromkeys(record.text for record in records.records if isinstance(record, Notice)))
    for text in texts[:NOTICES_SHOWN]:
        print_status(whose + text)
    if len(texts) > NOTICES_SHOWN:
        print_status(f"{whose}{len(texts) - NOTICES_SHOWN} more notices are in the records")


def _run(run: Run, places: dict[Experiment, str], directory: Path) -> list[RunRecords]:
    runs: list[RunRecords] = []
    try:
        for experiment, name in places.items():
            position = f"[{len(runs) + 1}/{len(places)}]" if len(places) > 1 else ""
            runs.append(run(experiment, directory / name, position))
    except KeyboardInterrupt as interrupt:
        kept = f"{len(runs)} of {len(places)} runs were finished and are in {directory}"
        raise KeyboardInterrupt("; ".join([kept, *map(str, interrupt.args)])) from None
    return runs


def _draw(runs: list[RunRecords], path: Path, baseline: str) -> Path | None:
    from offbeat.lab.report.page import write_report

    try:
        return write_report(runs, path, baseline)
    except MissingDependency as missing:
        print_status(f"no page was drawn: {missing}")
        return None


def _failures(summaries: tuple[Summary, ...]) -> int:
    failed = [summary for summary in summaries if summary.failure is not None]
    for summary in failed:
        print_status(f"{summary.strategy}, seed {summary.seed}, failed: {summary.failure}")
    return 1 if failed else 0


# `offbeat simulate`: strategies on a workload, in virtual time.


@takes(all_flags())
def simulate(
    *words: Annotated[
        str,
        Parameter(
            name="WORKLOAD STRATEGY...",
            help="a workload and one strategy or more, by name or as path/to/file.py:ClassName; "
            "amb.seconds=6.43 sets a field of amb alone, amb-2.seconds=5 of the second amb",
        ),
    ],
    flags: Any,
    output: Any,
) -> int:
    """What the words and flags describe."""
    return carry_out(plan_of(words, given(flags, all_flags())), output)


# `offbeat compare`: what an experiment file describes.


@takes(file_flags())
def compare(
    experiment: Annotated[
        str, Parameter(name="EXPERIMENT", help="a TOML file: a workload, strategies, a cluster, seeds")
    ],
    /,
    *,
    flags: Any,
    output: Any,
) -> int:
    """What the file describes, changed by what is given here."""
    return carry_out(plan_from_file(experiment, given(flags, file_flags())), output)
