"""Where decoded data sets are kept, and how it is known that they are whole.

A data set is a directory with four arrays and a manifest: the size and SHA-256 of each file, and besides these its
modification time and inode as they were when that checksum was last computed. Where all of these are as noted, the file
is taken for unchanged; where one differs, the checksum decides. The manifest has a checksum of its own.

A directory is filled under another name and renamed when it is complete, by whoever holds the lock of the data set.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from offbeat.errors import ConfigurationError
from offbeat.lab.data.catalogue import DatasetEntry

MANIFEST = "manifest.json"
FORMAT = 1
BLOCK_BYTES = 1 << 20


class FileStamp(msgspec.Struct, frozen=True):
    """One file, as it was when its checksum was computed."""

    bytes: int
    sha256: str
    modified_ns: int
    inode: int


class Manifest(msgspec.Struct, frozen=True):
    """What is in the directory of a data set."""

    format: int
    name: str
    source: str
    """Where it came from."""
    means: tuple[float, ...]
    arrays: dict[str, str]
    """SHA-256 of the arrays without the heads of their files, to compare between machines."""
    files: dict[str, FileStamp]
    checksum: str = ""
    """Over everything else in here."""

    def sealed(self) -> Manifest:
        return msgspec.structs.replace(self, checksum=self._digest())

    def is_whole(self) -> bool:
        return self.checksum == self._digest()

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def _digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, checksum=""))).hexdigest()


def cache_directory() -> Path:
    """$OFFBEAT_DATA, or offbeat in $XDG_CACHE_HOME, or in ~/.cache."""
    if given := os.environ.get("OFFBEAT_DATA"):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "offbeat"


def directory_of(entry: DatasetEntry) -> Path:
    return cache_directory() / entry.name


# What is there


def read_manifest(entry: DatasetEntry) -> Manifest | None:
    """What is said to be there, or None where nothing is, or nothing that can be relied on."""
    try:
        manifest = msgspec.json.decode((directory_of(entry) / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    fits = manifest.format == FORMAT and manifest.name == entry.name and manifest.is_whole()
    pinned = all(manifest.arrays.get(file) == digest for file, digest in entry.sha256.items())
    return manifest if fits and pinned else None


def sizes_fit(entry: DatasetEntry, manifest: Manifest) -> bool:
    """Every file is there, and as large as it should be."""
    try:
        return all((directory_of(entry) / name).stat().st_size == file.bytes for name, file in manifest.files.items())
    except OSError:
        return False


def verified(entry: DatasetEntry, everything: bool) -> Manifest | None:
    """The manifest if all files are whole. Checksums are computed for files that seem touched, or for all of them."""
    manifest = read_manifest(entry)
    if manifest is None or not sizes_fit(entry, manifest):
        return None
    directory = directory_of(entry)
    try:
        stamps = {name: _checked(directory / name, file, everything) for name, file in manifest.files.items()}
    except OSError:
        return None  # another process has just replaced it
    if any(stamps[name].sha256 != file.sha256 for name, file in manifest.files.items()):
        return None
    if stamps != manifest.files:
        manifest = msgspec.structs.replace(manifest, files=stamps).sealed()
        with contextlib.suppress(OSError):  # a cache that is shared may not be ours to write to
            write_manifest(directory, manifest)
    return manifest


def _checked(path: Path, file: FileStamp, everything: bool) -> FileStamp:
    status = path.stat()
    touched = (status.st_mtime_ns, status.st_ino) != (file.modified_ns, file.inode)
    return stamp(path) if touched or everything else file


def stamp(path: Path) -> FileStamp:
    """The checksum of a file, and what tells cheaply that it is still the same."""
    before = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return FileStamp(before.st_size, digest.hexdigest(), before.st_mtime_ns, before.st_ino)


# Changing it


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Atomically, so that a reader finds the old one or the new one."""
    handle, name = tempfile.mkstemp(prefix=".manifest-", dir=directory)
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    os.chmod(name, 0o644)
    os.replace(name, directory / MANIFEST)


@contextlib.contextmanager
def locked(entry: DatasetEntry, waiting: Callable[[], None]) -> Iterator[Path]:
    """The cache directory, while no other process changes this data set there.

    What processes that were killed have left behind is removed.
    """
    cache = cache_directory()
    with _explained(cache):
        cache.mkdir(parents=True, exist_ok=True)
        handle = os.open(cache / f".{entry.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        for left in cache.glob(f".{entry.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        with _explained(cache):
            yield cache
    finally:
        os.close(handle)


@contextlib.contextmanager
def _explained(cache: Path) -> Iterator[None]:
    """What a disk says, as a sentence."""
    try:
        yield
    except OSError as error:
        place = error.filename or cache
        raise ConfigurationError(
            f"cannot write {place} ({error.strerror or error}); "
            "mend that, or name another directory in the variable OFFBEAT_DATA"
        ) from None


@contextlib.contextmanager
def new_directory(entry: DatasetEntry) -> Iterator[Path]:
    """A directory to fill; under the name of the data set once it is complete, and gone where that fails."""
    cache = cache_directory()
    made = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=cache))
    try:
        os.chmod(made, 0o755)
        yield made
        _place(made, cache / entry.name)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _place(made: Path, place: Path) -> None:
    if not place.exists():
        os.rename(made, place)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    os.rename(place, old / place.name)
    os.rename(made, place)
    shutil.rmtree(old, ignore_errors=True)
