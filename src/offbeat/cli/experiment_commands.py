"""`offbeat simulate` and `offbeat compare`, and functions that `train` shares: run a plan, write and print results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from cyclopts import Parameter

from offbeat.cli.class_lookup import load_files
from offbeat.cli.flags import all_flags, file_flags, read_flags, with_flags
from offbeat.cli.options import Jobs, Output
from offbeat.cli.output import (
    EXPERIMENT,
    PAGE,
    new_directory,
    prepare_directory,
    print_comparison,
    print_json,
    print_status,
    refuse_unwritable,
)
from offbeat.cli.plans import plan_from_file, plan_of
from offbeat.core.validation import require
from offbeat.engine.experiment import Experiment
from offbeat.errors import ConfigurationError, MissingDependency, RunFailed
from offbeat.lab.experiment_plan import Plan, decode_experiment
from offbeat.lab.experiment_progress import PlanProgress
from offbeat.lab.parallel_simulations import ProcessKilled, SimulationTask, jobs_for, run_simulations
from offbeat.lab.progress import Progress, RunProgress, show_progress
from offbeat.records.comparison import Comparison
from offbeat.records.files import HEADER, file_name
from offbeat.records.metrics import Summary
from offbeat.records.schema import Notice, RunHeader, RunRecords
from offbeat.tracking.named_trackers import checked_trackers

NOTICES_SHOWN = 3

Run = Callable[[Experiment, Path, str], RunRecords]
"""Runs one experiment into a directory; the text is its position among several, such as `[2/4]`."""


@with_flags(all_flags())
def simulate(
    *words: Annotated[
        str,
        Parameter(
            name="WORKLOAD STRATEGY...",
            help="a workload and one strategy or more, by name or as path/to/file.py:ClassName; "
            "amb.seconds=6.43 sets a field of amb alone, amb-2.seconds=5 of the second amb",
        ),
    ],
    jobs: Jobs = None,
    flags: Any,
    output: Any,
) -> int:
    """Simulate the runs that the command line describes."""
    return run_plan(plan_of(words, read_flags(flags, all_flags())), output, jobs=jobs)


@with_flags(file_flags())
def compare(
    experiment: Annotated[
        str, Parameter(name="EXPERIMENT", help="a TOML file: a workload, strategies, a cluster, seeds")
    ],
    /,
    *,
    jobs: Jobs = None,
    flags: Any,
    output: Any,
) -> int:
    """Simulate the runs that the file describes, with the settings that flags replace."""
    return run_plan(plan_from_file(experiment, read_flags(flags, file_flags())), output, jobs=jobs)


def run_plan(
    plan: Plan, output: Output, run: Run | None = None, command: str = "compare", jobs: int | None = None
) -> int:
    """Run a plan, write the results, then print them: they are kept even if standard output is closed.

    Args:
        plan: the experiments.
        output: where results go and how they are shown.
        run: runs one experiment and shows its progress; none: simulate it.
        command: the command that repeats these runs from their experiment file.
        jobs: how many simulations run at a time; none: one on each core.

    Returns:
        The exit code: 1 if a run failed.
    """
    places = run_directories(plan)
    # A missing package or data set, or an unknown tracker, is refused before a directory is created.
    next(iter(places)).resolved()
    checked_trackers(output.track)
    label = file_name(plan.workload.name.rpartition(":")[2])
    directory = prepare_directory(Path(output.out), output.overwrite) if output.out else new_directory(label)
    _write_experiment(plan, directory / EXPERIMENT, command)
    runs = _simulate(places, directory, output, jobs) if run is None else _run(run, places, directory)
    return print_results(runs, output, directory, plan.baseline)


def print_results(runs: list[RunRecords], output: Output, directory: Path, baseline: str | None) -> int:
    """Draw the page, print the table or JSON, and return the exit code: 1 if a run failed."""
    comparison = Comparison.of(runs, baseline)
    page = None if output.no_report else _draw_page(runs, directory / PAGE, comparison.baseline)
    if output.json:
        print_json(comparison.to_json())
    else:
        shown = [f"records: {directory}"] + ([f"page:    {page}"] if page else [])
        print_comparison(comparison, [*_bandwidth_used(comparison.summaries), *shown])
    return _print_failures(comparison.summaries)


def _bandwidth_used(summaries: Sequence[Summary]) -> list[str]:
    """For each strategy with a bandwidth limit: a line with the share of the limit that was used, over its seeds."""
    used: dict[str, list[tuple[float, float]]] = {}
    for summary in summaries:
        if summary.budget_used is not None and summary.budget_used_mean is not None:
            used.setdefault(summary.strategy, []).append((summary.budget_used, summary.budget_used_mean))
    return [
        f"limit:   {label} used {max(most for most, _ in shares):.0%} of its bandwidth limit on the busiest link, "
        f"{statistics.fmean(mean for _, mean in shares):.0%} on average"
        for label, shares in used.items()
    ]


def run_directories(plan: Plan) -> dict[Experiment, str]:
    """The name of the directory of each experiment; labels that would share one are refused."""
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
    text = f"# The experiment of these runs. To repeat it: offbeat {command} THIS-FILE\n\n" + tomli_w.dumps(
        plan.to_plain()
    )
    with refuse_unwritable(path):
        path.write_text(text, encoding="utf-8")


def _simulate(places: dict[Experiment, str], directory: Path, output: Output, jobs: int | None) -> list[RunRecords]:
    tasks = [SimulationTask(experiment, directory / name, True, output.track) for experiment, name in places.items()]
    count = jobs_for(jobs, tasks)
    with show_progress(output.quiet) as progress:
        observer = _Observer(RunProgress(progress, len(tasks), count), progress, output.quiet)
        try:
            return run_simulations(tasks, count, observer)
        except KeyboardInterrupt as interrupt:
            raise _interrupted(observer.finished, len(tasks), directory, interrupt) from None
        except ProcessKilled as killed:
            raise RunFailed(f"{killed}; simulate fewer at a time: --jobs 1") from None


class _Observer(PlanProgress):
    """Shows progress, the sentences of trackers, and the notices of runs that have ended."""

    def __init__(self, shown: RunProgress, progress: Progress, quiet: bool) -> None:
        super().__init__(shown)
        self.finished = 0
        self.say = progress.say  # type: ignore[method-assign]
        self._quiet = quiet

    def ended(self, index: int, records: RunRecords) -> None:
        super().ended(index, records)
        self.finished += 1
        if not self._quiet:
            _print_notices(records, f"{records.header.label}, seed {records.header.seed}: ")


def _print_notices(records: RunRecords, prefix: str) -> None:
    """Print the distinct notices of a run, at most `NOTICES_SHOWN` of them."""
    texts = list(dict.fromkeys(record.text for record in records.records if isinstance(record, Notice)))
    for text in texts[:NOTICES_SHOWN]:
        print_status(prefix + text)
    if len(texts) > NOTICES_SHOWN:
        print_status(f"{prefix}{len(texts) - NOTICES_SHOWN} more notices are in the records")


def _run(run: Run, places: dict[Experiment, str], directory: Path) -> list[RunRecords]:
    runs: list[RunRecords] = []
    try:
        for experiment, name in places.items():
            position = f"[{len(runs) + 1}/{len(places)}]" if len(places) > 1 else ""
            runs.append(run(experiment, directory / name, position))
    except KeyboardInterrupt as interrupt:
        raise _interrupted(len(runs), len(places), directory, interrupt) from None
    return runs


def _interrupted(finished: int, runs: int, directory: Path, interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
    """An interrupt that says what was finished."""
    said = f"{finished} of {runs} runs were finished and are in {directory}"
    return KeyboardInterrupt("; ".join([said, *map(str, interrupt.args)]))


def _draw_page(runs: list[RunRecords], path: Path, baseline: str) -> Path | None:
    from offbeat.lab.report.page import write_report

    try:
        return write_report(runs, path, baseline)
    except MissingDependency as missing:
        print_status(f"no page was drawn: {missing}")
        return None


def _print_failures(summaries: tuple[Summary, ...]) -> int:
    failed = [summary for summary in summaries if summary.failure is not None]
    for summary in failed:
        print_status(f"{summary.strategy}, seed {summary.seed}, failed: {summary.failure}")
    return 1 if failed else 0


def read_experiment(header: RunHeader, directory: Path, allowed: Iterable[str]) -> Experiment:
    """The experiment that the header of a run describes; the header must have one.

    `allowed` are the files of classes that may be run: the directory may come from somewhere else.
    """
    plain = header.experiment or {}
    load_files(plain, str(directory), allowed)
    try:
        return decode_experiment(plain)
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"{directory / HEADER} describes its experiment incompletely ({error!r})") from None
