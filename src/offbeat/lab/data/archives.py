"""The files of an archive (.zip, .tar, compressed .tar) or of a folder, read one after the other as streams.

Nothing is extracted to disk: a name inside an archive is never used as a path.
"""

from __future__ import annotations

import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from offbeat.errors import ConfigurationError

COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ")
TAR_MAGIC_OFFSET = 257
ZIP = b"PK\x03\x04"
ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""The others cannot be decompressed up to a number of bytes."""
TAR_HEADER_BYTES_MAX = 1 << 20
"""Bytes of a header of a .tar that holds a long name, or the like."""
HEADER_TYPES = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class Stream(Protocol):
    """Bytes that can be read once, from the start."""

    def read(self, size: int = -1, /) -> bytes: ...
    def peek(self, size: int = 1, /) -> bytes: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class ArchiveMember:
    """A file of a folder or an archive. It can be opened only before `members` yields the next one."""

    name: str
    size: int
    """Bytes, uncompressed."""
    open: Callable[[], Stream]

    def read(self, bytes_max: int) -> bytes:
        """The content. Raises `ConfigurationError` for a file of more than `bytes_max` bytes."""
        if self.size > bytes_max:
            raise ConfigurationError(
                f"{self.name} has {self.size:,} bytes, but can have {bytes_max:,} at most; it is something else"
            )
        with closing(self.open()) as stream:
            return stream.read(self.size)  # not more, whatever it decompresses to


def members(path: Path) -> Iterator[ArchiveMember]:
    """The files of a folder, of an archive, or of the archives in a folder; a path that is neither yields itself."""
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist; name an archive or a folder that does with --from")
    if path.is_dir():
        for file in _walk(path):
            yield from _expand(file, str(file.relative_to(path)))
    else:
        yield from _expand(path, path.name)


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders.sort()
        # Sockets and pipes are no files.
        yield from (file for name in sorted(files) if (file := Path(place, name)).is_file())


def _expand(file: Path, name: str) -> Iterator[ArchiveMember]:
    with file.open("rb") as opened:
        start = opened.read(TAR_MAGIC_OFFSET + 5)
    if start.startswith(ZIP) and not _is_npz(file):
        yield from _zip_members(file)
    elif start.endswith(b"ustar") or (start.startswith(COMPRESSED) and _is_tar(file)):
        yield from _tar_members(file)
    else:
        yield ArchiveMember(name, file.stat().st_size, lambda: file.open("rb"))


class _TarInfo(tarfile.TarInfo):
    """A header of a .tar. Sizes are checked here, before `tarfile` reads what they announce into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        info = super().frombuf(buf, encoding, errors)
        if info.size < 0 or (info.type in HEADER_TYPES and info.size > TAR_HEADER_BYTES_MAX):
            raise tarfile.ReadError(f"a header announces {info.size} bytes")
        return info


def _is_tar(file: Path) -> bool:
    """As `tarfile.is_tarfile`, with headers of bounded size."""
    try:
        with tarfile.open(file, tarinfo=_TarInfo):
            return True
    except tarfile.TarError:
        return False


def _is_npz(file: Path) -> bool:
    with zipfile.ZipFile(file) as archive:
        return all(name.endswith(".npy") for name in archive.namelist())


def _zip_members(file: Path) -> Iterator[ArchiveMember]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if not info.is_dir():
                yield ArchiveMember(info.filename, info.file_size, partial(open_in_zip, archive, info))


def open_in_zip(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    """Open a file of a .zip; raises `BadZipFile` where it cannot be read."""
    if info.compress_type not in ZIP_METHODS:
        raise zipfile.BadZipFile(f"{info.filename} is compressed by method {info.compress_type}; only 0 and 8 are read")
    try:
        return archive.open(info)
    except RuntimeError as error:  # encrypted, or an unknown compression method
        raise zipfile.BadZipFile(str(error)) from None


def _tar_members(file: Path) -> Iterator[ArchiveMember]:
    with tarfile.open(file, "r|*", tarinfo=_TarInfo) as archive:
        open_file: Any = archive.extractfile
        while (info := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # tarfile keeps them all in memory otherwise
            if info.isreg():
                yield ArchiveMember(info.name, info.size, partial(open_file, info))
