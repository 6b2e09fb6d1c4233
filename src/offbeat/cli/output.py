"""Output that commands share: sentences on standard error, tables and JSON on standard output, directories of runs."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbeat.core.validation import require
from offbeat.errors import ConfigurationError

if TYPE_CHECKING:
    from offbeat.records.comparison import Comparison

WIDTH_WITHOUT_TERMINAL = 100
EXPERIMENT = "experiment.toml"
PAGE = "report.html"


def console() -> Console:
    """A console on standard output: as wide as the terminal, or wide enough for the tables without one."""
    if sys.stdout.isatty() and _terminal_allowed:
        return _Console(file=sys.stdout, highlight=False)
    return _Console(file=sys.stdout, width=WIDTH_WITHOUT_TERMINAL, highlight=False, force_terminal=False)


_terminal_allowed = True


def expect_no_terminal() -> None:
    """Treat standard output as no terminal: mpirun gives ranks a pseudo-terminal, of arbitrary width."""
    global _terminal_allowed
    _terminal_allowed = False


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # handled in `main`, as for all other output


def print_status(sentence: str) -> None:
    """Print one line on standard error."""
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
        heads: the heads of the columns. Cells of the first column are not wrapped; the others fold.
        rows: the cells of each row; strings are shown without markup.
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


@contextlib.contextmanager
def refuse_unwritable(path: Path, flag: str = "--out", noun: str = "place") -> Iterator[None]:
    """Turn an OSError while `path` is written into a sentence that names the flag for another place."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"cannot write {path} ({error.strerror}); name another {noun} with {flag}") from None


def print_comparison(comparison: Comparison, places: Iterable[str]) -> None:
    """Print the table, the headline, and `places`: lines that say where records and pages are."""
    from offbeat.lab.report.table import comparison_table, headline

    out = console()
    out.print(comparison_table(comparison, out.width))
    print_lines("", headline(comparison), "")
    print_lines(*places, wrap=False)


# Directories


def new_directory(name: str) -> Path:
    """Create runs/<name>-001, or the next number that is free, so that no two commands share a directory."""
    from offbeat.records.files import file_name

    parent, prefix = Path("runs"), f"{file_name(name)}-"
    suffixes = [path.name.removeprefix(prefix) for path in parent.glob(f"{prefix}*")]
    last = max((int(suffix) for suffix in suffixes if suffix.isdigit()), default=0)
    for number in itertools.count(last + 1):
        directory = parent / f"{prefix}{number:03d}"
        with refuse_unwritable(directory), contextlib.suppress(FileExistsError):
            directory.mkdir(parents=True)
            break
    return directory


def prepare_directory(out: Path, overwrite: bool) -> Path:
    """Create `out`, and with `overwrite` delete the runs in it. Files that do not belong to a run are kept."""
    from offbeat.live.checkpoints import checkpoint_files
    from offbeat.records.files import HEADER, LIVE, RECORDS, RESULT, check_idle, rank_files
    from offbeat.tracking.tensorboard_tracker import DIRECTORY, EVENT_FILES
    from offbeat.tracking.tracker import TRACKED

    try:
        runs = [header.parent for header in out.rglob(HEADER)] if out.is_dir() else []
        require(
            overwrite or not runs,
            f"{out} already holds {len(runs)} run{'' if len(runs) == 1 else 's'}; "
            "add --overwrite to replace them, or name another place with --out",
        )
        for run in runs:
            require(
                out in (run, run.parent) and _is_run_header(run / HEADER),
                f"{run} is not a run that this command would write, and is kept; name another place with --out",
            )
        for run in runs:
            check_idle(run)
        for run in runs:
            named = (run / name for name in (RECORDS, LIVE, RESULT, TRACKED))
            events = run / DIRECTORY
            tracked = events.glob(EVENT_FILES) if events.is_dir() else ()
            ranks = (path for _, path in rank_files(run))
            for file in (*named, *tracked, *ranks, *checkpoint_files(run), run / HEADER):
                file.unlink(missing_ok=True)
            if events.is_dir() and not any(events.iterdir()):
                events.rmdir()
            if not any(run.iterdir()):
                run.rmdir()
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot use {out} for records ({error.strerror}); name another with --out") from None
    return out


def _is_run_header(header: Path) -> bool:
    from offbeat.records.schema import RunHeader

    try:
        msgspec.json.decode(header.read_bytes(), type=RunHeader)
    except (OSError, msgspec.MsgspecError):
        return False
    return True
