"""`offbeat reproduce`: published studies, repeated by one command each."""

from __future__ import annotations

import shlex
import statistics
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.table import Table

from offbeat.cli.options import BooleanFlag, Directory, JsonFlag, QuietFlag, number
from offbeat.cli.output import console, new_directory, print_json, print_lines, print_status, table
from offbeat.core.validation import require
from offbeat.engine.experiment import build_workload
from offbeat.errors import MissingDependency
from offbeat.lab.parallel_simulations import cores
from offbeat.lab.progress import RunProgress, show_progress
from offbeat.lab.reproduction.findings import Findings, check_study, compute_findings, format_interval
from offbeat.lab.reproduction.quantities import quantity
from offbeat.lab.reproduction.runs import claim_directory, read_study, run_tasks, tasks_of
from offbeat.lab.reproduction.study import SCALES, Study, StudyRun, load_study, names
from offbeat.lab.reproduction.study_archive import archive, open_results
from offbeat.lab.reproduction.study_figures import draw_all
from offbeat.lab.reproduction.timings import BatchTiming, measure, read_timings, write_timings
from offbeat.records.comparison import Comparison
from offbeat.records.metrics import target_of


def reproduce(
    name: Annotated[str | None, Parameter(name="NAME")] = None,
    /,
    *,
    list_: Annotated[bool, Parameter(name="--list", negative=())] = False,
    scale: Annotated[str, Parameter(metavar="SCALE")] = SCALES[0],
    seeds: Annotated[int | None, number(least=1)] = None,
    processes: Annotated[int | None, number(least=1)] = None,
    out: Directory = None,
    redraw: Annotated[str | None, Parameter(metavar="PLACE")] = None,
    save: Annotated[str | None, Parameter(metavar="FILE.zip")] = None,
    no_figures: BooleanFlag = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> int:
    """Repeat a study: its runs, its figures, a table with intervals, and sentences that compare with the original.

    Args:
        name: a study; --list shows them
        list_: list the studies, and do nothing else
        scale: default or full: sizes for this machine, or the original's [default]
        seeds: how many seeds to run: those of the study, and then the next ones [as the study sets]
        processes: simulations at a time [one per core]
        out: directory for records and figures; an interrupted study continues [runs/NAME-NNN]
        redraw: draw and print again from a directory or an archive, without any training
        save: write the records that table, sentences and figures need to one archive, for --redraw
        no_figures: draw no figures
        json: print one JSON object and nothing else
        quiet: show no progress while it runs
    """
    if list_:
        return _list(json)
    require(save is None or Path(save).suffix == ".zip", f"--save writes an archive; type --save {save}.zip")
    if redraw is not None:
        require(name is None, "--redraw takes its study from the records; leave the name out")
        return _redraw(Path(redraw), out, save, json, not no_figures)
    require(name is not None, f"no study is named; type one of {', '.join(names())}, or --list")
    assert name is not None
    require(scale in SCALES, f"there is no scale {scale!r}; type --scale default or --scale full")
    study = load_study(name, scale)  # type: ignore[arg-type]
    chosen = None if seeds is None else study.first_seeds(seeds)
    if chosen is not None:
        study = load_study(name, scale, chosen)  # type: ignore[arg-type]
    _check_data(study)
    directory = new_directory(study.name) if out is None else Path(out)
    claim_directory(study, directory, chosen)
    try:
        runs, timed = _run_study(study, directory, processes or cores(), quiet)
    except KeyboardInterrupt:
        again = _resume_command(study, directory, seeds)
        raise KeyboardInterrupt(f"finished runs are in {directory}; to continue: {again}") from None
    if save is not None:
        archive(directory, Path(save))
    return _print_results(study, runs, timed, directory, None if no_figures else directory, json)


def _resume_command(study: Study, directory: Path, seeds: int | None) -> str:
    """The command that continues an interrupted study."""
    options = [*(["--scale", "full"] if study.scale == "full" else []), *(["--seeds", str(seeds)] if seeds else [])]
    return shlex.join(["offbeat", "reproduce", str(study.own or study.name), *options, "--out", str(directory)])


def _check_data(study: Study) -> None:
    """Refuse a study whose data is missing, before a directory is created."""
    check_study(study)
    for workload in dict.fromkeys(case.plan.workload for case in study.cases):
        build_workload(workload)


def _run_study(study: Study, directory: Path, processes: int, quiet: bool) -> tuple[list[StudyRun], list[BatchTiming]]:
    timed = read_timings(directory)
    if study.description.timing is not None and not timed:
        timed = measure(study, (lambda text: None) if quiet else print_status)
        write_timings(directory, timed)
    tasks = tasks_of(study, directory)
    with show_progress(quiet) as progress:
        shown = RunProgress(progress, len(tasks), at_a_time=processes)
        return run_tasks(tasks, processes, shown.share, lambda index, run: shown.ended(index, run.summary)), timed


def _redraw(place: Path, out: str | None, save: str | None, json: bool, draws: bool) -> int:
    with open_results(place) as directory:
        study, runs = read_study(directory)
        where = Path(out) if out is not None else place.with_suffix("") if place.suffix == ".zip" else place
        if save is not None:
            archive(directory, Path(save))
        return _print_results(study, runs, read_timings(directory), place, where if draws else None, json)


def _print_results(
    study: Study, runs: list[StudyRun], timed: list[BatchTiming], records: Path, drawn_to: Path | None, json: bool
) -> int:
    """Draw the figures, print the table or JSON, and return the exit code: 1 if a run failed."""
    try:
        figures = [] if drawn_to is None else draw_all(study, runs, timed, drawn_to)
    except MissingDependency as missing:
        figures = []
        print_status(f"no figure was drawn: {missing}")
    findings = compute_findings(study, runs)
    if json:
        print_json(_plain(study, timed, findings, figures) | _comparisons(study, runs))
    else:
        _print(study, timed, findings, figures, records)
    failed = [run for run in runs if run.summary.failure is not None]
    for run in failed:
        label = ", ".join(part for part in (run.case, run.strategy, f"seed {run.seed}") if part)
        print_status(f"{label}, failed: {run.summary.failure}")
    return 1 if failed else 0


def _comparisons(study: Study, runs: list[StudyRun]) -> dict[str, Any]:
    """What `offbeat compare --json` prints, under `cases` where there are several."""
    comparisons = {}
    for case in study.cases:
        if of_case := [run for run in runs if run.case == case.label]:
            target = target_of(of_case[0].records.header)
            summaries = [run.summary for run in of_case]
            comparisons[case.label] = Comparison.of_summaries(summaries, target, case.plan.baseline).to_json()
    return comparisons[""] if list(comparisons) == [""] else {"cases": comparisons}


def _plain(study: Study, timed: list[BatchTiming], findings: Findings, figures: list[Path]) -> dict[str, Any]:
    return {
        "study": study.name,
        "scale": study.scale,
        **findings.to_json(),
        "figures": [str(path) for path in figures],
        **({"timings": msgspec.to_builtins(timed)} if timed else {}),
    }


def _print(study: Study, timed: list[BatchTiming], findings: Findings, figures: list[Path], records: Path) -> None:
    description = study.description
    print_lines(f"{description.title}\n")
    if timed:
        console().print(_timing_table(timed), "")
    console().print(_table(study, findings), "")
    sentences = [f"Scale {study.scale}: {description.scaled}", *(finding.sentence for finding in findings.sentences)]
    print_lines(*(f"{sentence}\n" for sentence in sentences))
    drawn = [f"figure:  {path}  (also .svg, .pdf)" for path in figures if path.suffix == ".png"]
    print_lines(f"records: {records}", *drawn, wrap=False)


def _table(study: Study, findings: Findings) -> Table:
    cases = any(row.case for row in findings.rows)
    heads = [*(["case"] if cases else []), "strategy", *(quantity(name).head for name in study.description.columns)]
    rows = [
        [
            *([row.case] if cases else []),
            row.strategy,
            *(format_interval(row.cells[name], quantity(name), row.runs) for name in study.description.columns),
        ]
        for row in findings.rows
    ]
    result = table(heads, rows, right=heads[2:])
    seeds = {row.runs for row in findings.rows}
    counts = "–".join(map(str, sorted({min(seeds), max(seeds)})))
    result.caption = f"means over {counts} seeds; ± is half of a 95% interval" if max(seeds) > 1 else "one seed"
    result.caption_justify = "left"
    return result


def _timing_table(timed: list[BatchTiming]) -> Table:
    heads = ["batch", "parts", "time per step (s), median of the repeats"]
    rows = [(str(row.batch), str(row.parts), f"{statistics.median_high(row.seconds):.4g}") for row in timed]
    return table(heads, rows, right=heads)


def _list(json: bool) -> int:
    studies = [load_study(name) for name in names()]
    if json:
        print_json({"studies": [_described(study) for study in studies]})
        return 0
    heads = ["study", "what it shows", "runs", "minutes on two cores"]
    runs = [sum(1 for _ in study.experiments()) for study in studies]
    about = [study.description for study in studies]
    rows = [(s.name, d.title, str(n), f"{d.minutes:g}") for s, d, n in zip(studies, about, runs, strict=True)]
    console().print(table(heads, rows, right=heads[2:]))
    return 0


def _described(study: Study) -> dict[str, Any]:
    description = study.description
    fields = {name: getattr(description, name) for name in ("title", "original", "scaled", "expect", "minutes")}
    return {"name": study.name, **fields, "figures": [drawing.file for drawing in description.figures]}
