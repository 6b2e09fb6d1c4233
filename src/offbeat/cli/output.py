"""What a user sees and where files go: progress on stderr, results on stdout, directories on disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbeat.errors import ConfigurationError

if TYPE_CHECKING:
    from offbeat.records.comparison import Comparison

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


def print_status(sentence: str) -> None:
    """One line on standard error."""
    print(f"offbeat: {sentence}", file=sys.stderr)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_lines(*lines: str, wrap: bool = True) -> None:
    """Print lines on standard output; a terminal wraps them between words, except paths and commands (`wrap=False`)."""
    out = console()
    for line in lines:
        out.print(line, markup=False, soft_wrap=not (wrap and out.is_terminal))


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str | Text]] = (), *, right: Collection[str] = (), title: str = ""
) -> Table:
    """A table as all commands print them: a line below the heads, and no frame.

    Args:
        heads: the heads of the columns. The first column is never broken into lines; the others fold.
        rows: the cells of each row; text is shown as it is, without markup.
        right: the heads whose columns are aligned to the right, as numbers are.
        title: a line above the table.
    """
    result = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    result.show_edge = result.pad_edge = False
    for index, head in enumerate(heads):
        justify: Any = "right" if head in right else "left"
        result.add_column(head, justify=justify, no_wrap=index == 0, overflow="fold")
    for row in rows:
        result.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return result


@contextmanager
def refuse_unwritable(path: Path, flag: str = "--out", noun: str = "place") -> Iterator[None]:
    """Turn an OSError while `path` is written into a sentence that names the flag for another place."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"cannot write {path} ({error.strerror}); name another {noun} with {flag}") from None


def print_comparison(comparison: Comparison, places: Iterable[str]) -> None:
    """The table, the headline, and where everything is."""
    from offbeat.lab.report.table import comparison_table, headline

    out = console()
    out.print(comparison_table(comparison, out.width))
    print_lines("", headline(comparison), "")
    print_lines(*places, wrap=False)


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


def prepare_directory(out: Path, overwrite: bool) -> Path:
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
