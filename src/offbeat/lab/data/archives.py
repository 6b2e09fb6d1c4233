"""What an archive or a folder holds, file by file, read as streams.

Nothing is ever extracted: a name inside an archive is looked at, and never used as a path.
"""

from __future__ import annotations

import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from offbeat.errors import ConfigurationError

COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ")
TAR_MAGIC_AT = 257
ZIP = b"PK\x03\x04"


class Stream(Protocol):
    """Bytes that can be read once, from the beginning."""

    def read(self, size: int = -1, /) -> bytes: ...
    def peek(self, size: int = 1, /) -> bytes: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class ArchiveMember:
    """A file of a folder or an archive. It can be opened until the next one is asked for."""

    name: str
    size: int
    open: Callable[[], Stream]


def members(path: Path) -> Iterator[ArchiveMember]:
    """Every file of a folder, of an archive, or of the archives in a folder; or the file itself where it is neither."""
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist; name an archive or a folder that does with --from")
    if path.is_dir():
        for file in _files(path):
            yield from _inside(file, str(file.relative_to(path)))
    else:
        yield from _inside(path, path.name)


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            file = Path(place, name)
            if file.is_file():  # no sockets, no pipes
                yield file


def _inside(file: Path, name: str) -> Iterator[ArchiveMember]:
    with file.open("rb") as opened:
        start = opened.read(TAR_MAGIC_AT + 5)
    if start.startswith(ZIP) and not _is_npz(file):
        yield from _of_zip(file)
    elif start.endswith(b"ustar") or (start.startswith(COMPRESSED) and tarfile.is_tarfile(file)):
        yield from _of_tar(file)
    else:
        yield ArchiveMember(name, file.stat().st_size, lambda: file.open("rb"))


def _is_npz(file: Path) -> bool:
    with zipfile.ZipFile(file) as archive:
        return all(name.endswith(".npy") for name in archive.namelist())


def _of_zip(file: Path) -> Iterator[ArchiveMember]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if not info.is_dir():
                yield ArchiveMember(info.filename, info.file_size, partial(open_in_zip, archive, info))


def open_in_zip(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    """One file of a .zip, or BadZipFile where it cannot be read."""
    try:
        return archive.open(info)
    except RuntimeError as error:  # encrypted, or compressed in a way that is not known
        raise zipfile.BadZipFile(str(error)) from None


def _of_tar(file: Path) -> Iterator[ArchiveMember]:
    with tarfile.open(file, "r|*") as archive:
        opened: Any = archive.extractfile
        while (info := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # or all that have been seen stay in memory
            if info.isreg():
                yield ArchiveMember(info.name, info.size, partial(opened, info))
