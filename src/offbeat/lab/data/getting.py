"""`get`: a data set into the cache, whole or not at all."""

from __future__ import annotations

import gzip
import lzma
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

from offbeat.errors import ConfigurationError, RunFailed
from offbeat.lab.data import cifar, cinic, idx, imagenet32
from offbeat.lab.data.arrays import DataSet, check, sha256_of
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
from offbeat.lab.data.catalogue import Entry
from offbeat.lab.data.fetching import SourceFailed, Watcher
from offbeat.lab.data.formats import Advance, Decoder, pillow
from offbeat.lab.data.sources import Found, Source, sources_of

DECODERS: dict[str, Decoder] = {
    "mnist": idx.decode,
    "fashion-mnist": idx.decode,
    "cifar10": cifar.decode,
    "cinic10": cinic.decode,
    "imagenet32": imagenet32.decode,
}
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
    entry: Entry, watcher: Watcher, *, source: str | None = None, path: Path | None = None, verify: bool = False
) -> Manifest:
    """Make sure that the data set is in the cache, and whole: fetched, or decoded from `path`, where it is not."""
    if (there := verified(entry, verify)) is not None:
        return there
    sources = [] if path is not None else sources_of(entry, source)
    with locked(entry, lambda: watcher.say(f"another process is getting {entry.name}; waiting for it")) as cache:
        if (there := verified(entry, verify)) is not None:
            return there
        if directory_of(entry).exists():
            watcher.say(f"what there is of {entry.name} is damaged; getting it again")
        if path is not None:
            return _place(entry, Found(path, f"file: {path.name}"), watcher)
        return _from_first(entry, sources, cache, watcher)


def _from_first(entry: Entry, sources: list[Source], cache: Path, watcher: Watcher) -> Manifest:
    """From the first source that has it, and has it whole."""
    kept = cache / "downloads" / entry.name
    reasons = []
    for source in sources:
        if source.name in entry.pictures:
            pillow()
        with tempfile.TemporaryDirectory(prefix=f".{entry.name}-", dir=cache) as scratch:
            try:
                manifest = _place(entry, source.find(entry, kept, Path(scratch), watcher), watcher)
            except (SourceFailed, ConfigurationError) as failed:
                reasons.append(str(failed))
                watcher.say(f"{entry.name}, {source.name}: {failed}")
                continue
        shutil.rmtree(kept, ignore_errors=True)
        return manifest
    raise RunFailed(
        f"{entry.name} cannot be fetched: {'; '.join(reasons)}; "
        f"if you have an archive of it, type: offbeat data get {entry.name} --from PATH"
    )


def _place(entry: Entry, found: Found, watcher: Watcher) -> Manifest:
    """Decode, check, and put where `load` finds it."""
    total = (entry.train + entry.test) * entry.image_bytes
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        watcher.step(f"decoding {entry.name}", done, total)

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
    watcher.say(f"{entry.name} came from {found.origin}")
    return manifest


def _decoded(entry: Entry, path: Path, directory: Path, advance: Advance) -> DataSet:
    try:
        return DECODERS[entry.name](entry, path, directory, advance)
    except DAMAGED as error:
        raise ConfigurationError(f"{path} is damaged ({error}); get it again") from None
    except OSError as error:
        if error.filename is None or not Path(error.filename).is_relative_to(path):
            raise
        raise ConfigurationError(f"cannot read {error.filename} ({error.strerror})") from None
