"""The decoded arrays: four files of a directory, mapped into memory, so that all processes share one copy.

They are made as large as they will be before anything is decoded: a disk that is too small is found out at once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError
from offbeat.lab.data.cache import directory_of, read_manifest, sizes_fit
from offbeat.lab.data.catalogue import DatasetEntry, entry_of

TRAIN_IMAGES, TRAIN_LABELS = "train-images.npy", "train-labels.npy"
TEST_IMAGES, TEST_LABELS = "test-images.npy", "test-labels.npy"
FILES = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)
BLOCK_BYTES = 1 << 24


@dataclass(frozen=True)
class LabeledImages:
    """Images, N × H × W × C of 0 to 255, and the class of each."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Dataset:
    """What to train on, and what to measure the result with."""

    train: LabeledImages
    test: LabeledImages

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The four arrays, by the names of their files."""
        parts = (self.train.images, self.train.labels, self.test.images, self.test.labels)
        return dict(zip(FILES, parts, strict=True))


def create(entry: DatasetEntry, directory: Path) -> Dataset:
    """Files to decode into. Labels are -1 until they are known, so that a gap cannot pass unseen."""
    made = _assembled({file: _created(directory / file, entry.shape_of(file), kind_of(file)) for file in FILES})
    for part in (made.train, made.test):
        part.labels[:] = -1
    return made


def _created(path: Path, shape: tuple[int, ...], kind: type[Any]) -> NDArray[Any]:
    made = np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
    if hasattr(os, "posix_fallocate"):
        # A map is written to without asking; on a full disk that would end the process.
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return made


def opened(entry: DatasetEntry, directory: Path) -> Dataset:
    """The arrays of a directory, to read. What has another shape than it should raises ValueError."""
    maps = {}
    for file in FILES:
        array = np.load(directory / file, mmap_mode="r", allow_pickle=False)
        if array.shape != entry.shape_of(file) or array.dtype != kind_of(file):
            raise ValueError(f"{file} holds an array of shape {array.shape} and type {array.dtype}")
        maps[file] = array
    return _assembled(maps)


def kind_of(file: str) -> type[Any]:
    return np.uint8 if "images" in file else np.int64


def _assembled(maps: dict[str, Any]) -> Dataset:
    return Dataset(
        LabeledImages(maps[TRAIN_IMAGES], maps[TRAIN_LABELS]), LabeledImages(maps[TEST_IMAGES], maps[TEST_LABELS])
    )


def check(entry: DatasetEntry, data: Dataset, where: str) -> tuple[float, ...]:
    """Refuse arrays that are not this data set: labels, means, checksums. Returns the means of the channels."""
    for name, part in (("training", data.train), ("test", data.test)):
        inside = part.labels.min() >= 0 and part.labels.max() < entry.classes
        if not inside or not np.bincount(part.labels, minlength=entry.classes).all():
            raise ConfigurationError(
                f"the {name} labels from {where} are not those of {entry.name}: expected every class "
                f"of 0 to {entry.classes - 1} and nothing else; get it from another place"
            )
    means = channel_means(data.train.images)
    if any(abs(mean - known) > entry.means_tolerance for mean, known in zip(means, entry.means, strict=True)):
        raise ConfigurationError(
            f"the images from {where} are not those of {entry.name}: the means of their channels are {_listed(means)}, "
            f"expected {_listed(entry.means)}; get it from another place"
        )
    for file, array in data.arrays().items():
        if file in entry.sha256 and sha256_of(array) != entry.sha256[file]:
            raise ConfigurationError(
                f"what {where} decodes to is not {entry.name}: {file} has another checksum than expected; "
                "get it from another place"
            )
    return means


def _listed(means: tuple[float, ...]) -> str:
    return " ".join(f"{mean:.4f}" for mean in means)


def channel_means(images: NDArray[np.uint8]) -> tuple[float, ...]:
    """The mean of each channel, where black is 0 and white is 1; from exact sums."""
    channels = images.shape[-1]
    totals = np.zeros(channels, np.int64)
    for block in _blocks(images):
        totals += block.reshape(-1, channels).sum(0, dtype=np.int64)
    return tuple(float(total) / (images.size // channels * 255) for total in totals)


def sha256_of(array: NDArray[Any]) -> str:
    """Over the bytes of the array in C order."""
    digest = hashlib.sha256()
    for block in _blocks(array):
        digest.update(np.ascontiguousarray(block).view(np.uint8).data)
    return digest.hexdigest()


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    rows = max(1, BLOCK_BYTES * len(array) // array.nbytes)
    for start in range(0, len(array), rows):
        yield np.asarray(array[start : start + rows])


# `load`: the arrays of a data set that is in the cache.


def load(name: str) -> Dataset:
    """The arrays, mapped into memory. Sizes and shapes are checked each time; checksums by `offbeat data get`."""
    entry = entry_of(name)
    directory = directory_of(entry)
    manifest = read_manifest(entry)
    if manifest is None:
        state = "is damaged" if directory.exists() else "is not on this machine"
        raise ConfigurationError(f"the data set {name} {state} ({directory}); type: offbeat data get {name}")
    try:
        if sizes_fit(entry, manifest):
            return opened(entry, directory)
    except (OSError, ValueError, EOFError):
        pass
    raise ConfigurationError(f"the data set {name} is damaged ({directory}); type: offbeat data get {name}")
