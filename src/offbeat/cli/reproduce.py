"""`offbeat reproduce`: published results, run again by one command each."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.table import Table

from offbeat.cli.output import Lines, Silence, console, new_directory, print_json, say
from offbeat.core.validation import require
from offbeat.errors import MissingDependency
from offbeat.lab.experiment import build_workload
from offbeat.lab.reproduction.findings import Findings, check, find, quantity, shown
from offbeat.lab.reproduction.runs import (
    Timed,
    archive,
    begin,
    carry_out,
    cores,
    measure,
    opened,
    read_study,
    read_timings,
    tasks_of,
    write_timings,
)
from offbeat.lab.reproduction.study import SCALES, Study, StudyRun, load_study, names
from offbeat.lab.reproduction.study_figures import draw_all
from offbeat.records.comparison import Comparison


def _option(text: str, metavar: str | None = None, name: str | None = None) -> Parameter:
    return Parameter(help=text, metavar=metavar, name=name, negative=(), show_default=False)


def reproduce(
    name: Annotated[str | None, Parameter(name="NAME", help="a study; --list shows them", show_default=False)] = None,
    /,
    *,
    list_: Annotated[bool, _option("show what there is, and do nothing", name="--list")] = False,
    scale: Annotated[
        str, _option(f"{' or '.join(SCALES)}: sizes for this machine, or the original's [default]")
    ] = SCALES[0],
    seeds: Annotated[int | None, _option("how many seeds to run, from 0 on [as the study says]", "N")] = None,
    processes: Annotated[int | None, _option("simulations at a time [one per core]", "N")] = None,
    out: Annotated[
        str | None, _option("directory for records and figures; goes on where it was broken off [runs/NAME-NNN]", "DIR")
    ] = None,
    redraw: Annotated[
        str | None, _option("draw and print again from a directory or an archive, without any training", "PLACE")
    ] = None,
    save: Annotated[str | None, _option("write all records to one archive, for --redraw", "FILE.zip")] = None,
    no_figures: Annotated[bool, _option("draw no figures", name="--no-figures")] = False,
    json: Annotated[bool, _option("print one JSON object and nothing else")] = False,
    quiet: Annotated[bool, _option("show no progress while it runs")] = False,
) -> int:
    """A study: its runs, figures, a table with intervals, and sentences beside what was published."""
    if list_:
        return _list(json)
    if redraw is not None:
        require(name is None, "--redraw takes its study from the records; leave the name out")
        return _redraw(Path(redraw), None if out is None else Path(out), json, not no_figures)
    require(name is not None, f"no study is named; type one of {', '.join(names())}, or --list")
    assert name is not None
    require(scale in SCALES, f"there is no scale {scale!r}; type --scale default or --scale full")
    require(seeds is None or seeds > 0, f"--seeds must be 1 or more, but is {seeds}")
    require(processes is None or processes > 0, f"--processes must be 1 or more, but is {processes}")
    require(save is None or Path(save).suffix == ".zip", f"--save writes an archive; type --save {save}.zip")
    chosen = None if seeds is None else tuple(range(seeds))
    study = load_study(name, scale, chosen)  # type: ignore[arg-type]
    check(study)
    for workload in dict.fromkeys(case.plan.workload for case in study.cases):
        build_workload(workload)  # data that is missing is said before anything is begun
    directory = new_directory(study.name) if out is None else Path(out)
    begin(study, directory, chosen)
    try:
        runs, timed = _carried_out(study, directory, processes or cores(), quiet)
    except KeyboardInterrupt:
        again = _again(study, directory, seeds)
        raise KeyboardInterrupt(f"what was finished is in {directory}; to go on: {again}") from None
    if save is not None:
        archive(directory, Path(save))
    return _tell(study, runs, timed, directory, None if no_figures else directory, json)


def _carried_out(study: Study, directory: Path, processes: int, quiet: bool) -> tuple[list[StudyRun], list[Timed]]:
    timed = read_timings(directory)
    if study.described.timing is not None and not timed:
        timed = measure(study, (lambda text: None) if quiet else say)
        write_timings(directory, timed)
    tasks = tasks_of(study, directory)
    with _progress(len(tasks), quiet) as shown_by:
        return carry_out(tasks, processes, shown_by.share, shown_by.ended), timed


def _again(study: Study, directory: Path, seeds: int | None) -> str:
    """What to type to go on with a study that was broken off."""
    options = [*(["--scale", "full"] if study.scale == "full" else []), *(["--seeds", str(seeds)] if seeds else [])]
    return shlex.join(["offbeat", "reproduce", str(study.own or study.name), *options, "--out", str(directory)])


def _redraw(place: Path, out: Path | None, json: bool, draws: bool) -> int:
    with opened(place) as directory:
        study, runs = read_study(directory)
        where = out or (place.with_suffix("") if place.suffix == ".zip" else place)
        return _tell(study, runs, read_timings(directory), place, where if draws else None, json)


def _tell(
    study: Study, runs: list[StudyRun], timed: list[Timed], records: Path, drawn_to: Path | None, json: bool
) -> int:
    """The figures, the table or JSON, and the exit code."""
    try:
        figures = [] if drawn_to is None else draw_all(study, runs, timed, drawn_to)
    except MissingDependency as missing:
        figures = []
        say(f"no figure was drawn: {missing}")
    findings = find(study, runs)
    if json:
        print_json(_plain(study, runs, timed, findings, figures))
    else:
        _print(study, timed, findings, figures, records)
    failed = [run for run in runs if run.summary.failure is not None]
    for run in failed:
        whose = ", ".join(part for part in (run.case, run.strategy, f"seed {run.seed}") if part)
        say(f"{whose}, failed: {run.summary.failure}")
    return 1 if failed else 0


def _plain(
    study: Study, runs: list[StudyRun], timed: list[Timed], findings: Findings, figures: list[Path]
) -> dict[str, Any]:
    comparisons = {
        case.label: Comparison.of([run.records for run in mine], case.plan.baseline).to_json()
        for case in study.cases
        if (mine := [run for run in runs if run.case == case.label])
    }
    alone = comparisons[""] if list(comparisons) == [""] else {"cases": comparisons}
    times = [{"batch": row.batch, "parts": row.parts, "seconds": list(row.seconds)} for row in timed]
    told = {"study": study.name, "scale": study.scale, **findings.to_json(), "figures": [str(path) for path in figures]}
    return {**told, **({"timings": times} if times else {}), **alone}


def _print(study: Study, timed: list[Timed], findings: Findings, figures: list[Path], records: Path) -> None:
    out = console()
    described = study.described
    out.print(f"{described.title}\n", markup=False)
    if timed:
        out.print(_timing_table(timed))
        out.print()
    out.print(_table(study, findings))
    out.print()
    for text in (f"Scale {study.scale}: {described.scaled}", *(finding.sentence for finding in findings.sentences)):
        out.print(f"{text}\n", markup=False, soft_wrap=not out.is_terminal)
    out.print(f"records: {records}", markup=False, soft_wrap=True)
    for path in figures:
        if path.suffix == ".png":
            out.print(f"figure:  {path}  (also .svg, .pdf)", markup=False, soft_wrap=True)


def _table(study: Study, findings: Findings) -> Table:
    cases = any(row.case for row in findings.rows)
    heads = [*(["case"] if cases else []), "strategy", *(quantity(name).head for name in study.described.columns)]
    table = _empty(heads)
    for row in findings.rows:
        cells = [shown(row.cells[name], quantity(name), row.runs) for name in study.described.columns]
        table.add_row(*([row.case] if cases else []), row.strategy, *cells)
    seeds = {row.runs for row in findings.rows}
    counts = "–".join(map(str, sorted({min(seeds), max(seeds)})))
    table.caption = f"means over {counts} seeds; ± is half of a 95% interval" if max(seeds) > 1 else "one seed"
    table.caption_justify = "left"
    return table


def _timing_table(timed: list[Timed]) -> Table:
    table = _empty(["batch", "parts", "time per step (s), median of the repeats"])
    for row in timed:
        table.add_row(str(row.batch), str(row.parts), f"{sorted(row.seconds)[len(row.seconds) // 2]:.4g}")
    return table


def _empty(heads: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True)
    for index, head in enumerate(heads):
        table.add_column(head, overflow="fold", justify="left" if index < 2 else "right")
    return table


def _list(json: bool) -> int:
    studies = [load_study(name) for name in names()]
    if json:
        print_json({"studies": [_described(study) for study in studies]})
        return 0
    table = _empty(["study", "what it shows", "runs", "minutes on two cores"])
    for study in studies:
        runs = sum(1 for _ in study.experiments())
        table.add_row(study.name, study.described.title, str(runs), f"{study.described.minutes:g}")
    console().print(table)
    return 0


def _described(study: Study) -> dict[str, Any]:
    said = study.described
    return {
        "name": study.name,
        "title": said.title,
        "original": said.original,
        "scaled": said.scaled,
        "expect": said.expect,
        "minutes": said.minutes,
        "figures": [drawing.file for drawing in said.drawings],
    }


# Progress


class _Progress(Protocol):
    def share(self, index: int, share: float) -> None: ...
    def ended(self, index: int, run: StudyRun) -> None: ...


@contextmanager
def _progress(runs: int, quiet: bool) -> Iterator[_Progress]:
    """A bar on a terminal, lines elsewhere, nothing where quiet is wanted."""
    if quiet or not sys.stderr.isatty():
        yield _Said(Silence() if quiet else Lines(runs))
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeRemainingColumn(elapsed_when_finished=True),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar, bar.add_task(f"0 of {runs} runs", total=float(runs)), runs)


class _Said:
    """Says which runs have ended."""

    def __init__(self, lines: Silence) -> None:
        self._lines = lines

    def share(self, index: int, share: float) -> None:
        pass

    def ended(self, index: int, run: StudyRun) -> None:
        self._lines.ended(run.summary)


class _Bar:
    """One bar over all runs; those under way count by their share."""

    def __init__(self, bar: Any, task: Any, runs: int) -> None:
        self._bar, self._task, self._runs = bar, task, runs
        self._ended = 0
        self._shares: dict[int, float] = {}

    def share(self, index: int, share: float) -> None:
        self._shares[index] = share
        self._show()

    def ended(self, index: int, run: StudyRun) -> None:
        self._ended += 1
        self._shares.pop(index, None)
        self._show()

    def _show(self) -> None:
        done = self._ended + sum(self._shares.values())
        self._bar.update(self._task, completed=done, description=f"{self._ended} of {self._runs} runs")
