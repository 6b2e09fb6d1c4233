"""What a user sees and where files go: progress on stderr, results on stdout, directories on disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from rich.console import Console

from offbeat.errors import ConfigurationError

if TYPE_CHECKING:
    from offbeat.core.actions import Budget, Record
    from offbeat.lab.experiment import Experiment
    from offbeat.records.comparison import Comparison
    from offbeat.records.metrics import Summary

WIDTH_WITHOUT_TERMINAL = 100
EXPERIMENT = "experiment.toml"
PAGE = "report.html"


def console() -> Console:
    """Standard output; as wide as the terminal, or wide enough for the tables where there is none."""
    if sys.stdout.isatty() and not _no_terminal:
        return _Console(file=sys.stdout, highlight=False)
    return _Console(file=sys.stdout, width=WIDTH_WITHOUT_TERMINAL, highlight=False, force_terminal=False)


_no_terminal: list[bool] = []


def expect_no_terminal() -> None:
    """What looks like a terminal is none: mpirun makes one up, of no particular width, whoever reads its output."""
    _no_terminal.append(True)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # `main` answers it, for this and for all other output


def say(sentence: str) -> None:
    """One line on standard error."""
    print(f"offbeat: {sentence}", file=sys.stderr)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_comparison(comparison: Comparison, places: Iterable[str]) -> None:
    """The table, the headline, and where everything is."""
    from offbeat.lab.report.table import comparison_table, headline

    out = console()
    out.print(comparison_table(comparison, out.width))
    out.print()
    out.print(headline(comparison), markup=False, soft_wrap=not out.is_terminal)
    out.print()
    for place in places:
        out.print(place, markup=False, soft_wrap=True)


# Progress


class Progress(Protocol):
    """Is told of every record as it is made, and of every run that has ended."""

    def on_record(self, experiment: Experiment, record: Record) -> None: ...
    def ended(self, summary: Summary) -> None: ...


@contextmanager
def progress(runs: int, quiet: bool) -> Iterator[Progress]:
    """A bar on a terminal, lines elsewhere, nothing where quiet is wanted."""
    if quiet:
        yield Silence()
    elif not sys.stderr.isatty():
        yield Lines(runs)
    else:
        from rich import progress as bars

        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TimeRemainingColumn(elapsed_when_finished=True),
        )
        with bars.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task("starting", total=float(runs))
            yield Bar(runs, lambda done, text: shown.update(task, completed=done, description=text))


class Silence:
    def on_record(self, experiment: Experiment, record: Record) -> None:
        pass

    def ended(self, summary: Summary) -> None:
        pass


class Lines(Silence):
    """One short line for each run that has ended."""

    def __init__(self, runs: int) -> None:
        self._runs, self._ended = runs, 0

    def ended(self, summary: Summary) -> None:
        self._ended += 1
        reached = summary.seconds_to_target
        if summary.failure is not None:
            came = "failed"
        elif reached is not None:
            came = f"target reached after {reached:.1f} s"
        else:
            came = f"{summary.samples:,} samples in {summary.seconds:.1f} s"
        print(f"[{self._ended}/{self._runs}] {summary.strategy}, seed {summary.seed}: {came}", file=sys.stderr)


class _Update(Protocol):
    def __call__(self, done: float, text: str, /) -> None: ...


class Bar(Silence):
    """One bar over all runs; a run counts by the share of its samples, or of its seconds, that is done."""

    def __init__(self, runs: int, update: _Update) -> None:
        self._runs, self._ended, self._update = runs, 0, update

    def on_record(self, experiment: Experiment, record: Record) -> None:
        from offbeat.records.schema import Update

        if isinstance(record, Update) and experiment.until is not None:
            share = _share(record, experiment.until)
            text = f"{experiment.name}, seed {experiment.seed} ({self._ended + 1} of {self._runs})"
            self._update(self._ended + min(1.0, share), text)

    def ended(self, summary: Summary) -> None:
        self._ended += 1


def _share(update: Any, until: Budget) -> float:
    from offbeat.core.actions import Samples

    if isinstance(until, Samples):
        return float(update.samples_total / until.count)
    return float(update.at / until.seconds)  # type: ignore[attr-defined]


# Directories


def new_directory(workload: str) -> Path:
    """runs/<workload>-001, or the next number that is free; made here, so that two commands never share one."""
    from offbeat.records.files import file_name

    parent = Path("runs")
    name = file_name(workload)
    taken = [path.name.removeprefix(f"{name}-") for path in parent.glob(f"{name}-*")]
    number = max((int(rest) for rest in taken if rest.isdigit()), default=0) + 1
    while True:
        directory = parent / f"{name}-{number:03d}"
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigurationError(
                f"cannot make the directory {directory} ({error.strerror}); name another place with --out"
            ) from None
        else:
            return directory


def given_directory(out: Path, overwrite: bool) -> Path:
    """`out`, emptied of earlier runs where that is wanted. Files that are not of a run of ours stay."""
    from offbeat.live.checkpoints import checkpoint_files
    from offbeat.records.files import HEADER, LIVE, RECORDS, RESULT, check_idle, rank_files

    try:
        found = [header.parent for header in out.rglob(HEADER)] if out.is_dir() else []
        if found and not overwrite:
            raise ConfigurationError(
                f"{out} already holds {len(found)} run{'' if len(found) == 1 else 's'}; "
                "add --overwrite to replace them, or name another place with --out"
            )
        foreign = [run for run in found if out not in (run, run.parent) or not _is_ours(run / HEADER)]
        if foreign:
            raise ConfigurationError(
                f"{foreign[0]} is not a run that this command would write, and is left alone; "
                "name another place with --out"
            )
        for run in found:
            check_idle(run)
        for run in found:
            named = (run / name for name in (RECORDS, LIVE, RESULT))
            for file in (*named, *(path for _, path in rank_files(run)), *checkpoint_files(run), run / HEADER):
                file.unlink(missing_ok=True)
            if not any(run.iterdir()):
                run.rmdir()
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot use {out} for records ({error.strerror}); name another with --out") from None
    return out


def _is_ours(header: Path) -> bool:
    from offbeat.records.schema import RunHeader

    try:
        msgspec.json.decode(header.read_bytes(), type=RunHeader)
    except (OSError, msgspec.MsgspecError):
        return False
    return True
