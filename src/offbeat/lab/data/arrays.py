"""Decoded data sets: the .npy files of a directory, memory-mapped, so that all processes share one copy.

Files have their full size before anything is decoded, so that a full disk is an error at the start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError
from offbeat.lab.data.cache import directory_of, read_manifest, sizes_fit
from offbeat.lab.data.catalogue import DatasetEntry, ImageEntry, TextEntry, images_of, text_of

BLOCK_BYTES = 1 << 24


class Dataset(ABC):
    """The arrays of a data set."""

    @abstractmethod
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by file name."""


@dataclass(frozen=True)
class LabeledImages:
    """Images, N × H × W × C of 0 to 255, and the class of each."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def rows(self, first: int, stop: int) -> LabeledImages:
        """A view of some of the examples."""
        return LabeledImages(self.images[first:stop], self.labels[first:stop])


@dataclass(frozen=True)
class ImageDataset(Dataset):
    """Training and test images."""

    train: LabeledImages
    test: LabeledImages

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {
            "train-images.npy": self.train.images,
            "train-labels.npy": self.train.labels,
            "test-images.npy": self.test.images,
            "test-labels.npy": self.test.labels,
        }


@dataclass(frozen=True)
class TextDataset(Dataset):
    """Documents, one after the other: document i is `text[offsets[i]:offsets[i + 1]]`."""

    text: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    names: NDArray[np.bytes_]

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"text.npy": self.text, "offsets.npy": self.offsets, "names.npy": self.names}

    def document_names(self) -> list[str]:
        return [name.decode() for name in self.names.tolist()]


def create_images(entry: ImageEntry, directory: Path) -> ImageDataset:
    """New files to decode into. Labels are -1 until they are decoded, so that `check_images` notices a gap."""
    data = _image_dataset(_create(entry, directory))
    for part in (data.train, data.test):
        part.labels[:] = -1
    return data


def create_text(entry: TextEntry, directory: Path) -> TextDataset:
    """New files to decode into."""
    return _text_dataset(_create(entry, directory))


def _create(entry: DatasetEntry, directory: Path) -> dict[str, NDArray[Any]]:
    return {file: _create_array(directory / file, entry.shape_of(file), entry.dtype_of(file)) for file in entry.files}


def _create_array(path: Path, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
    if hasattr(os, "posix_fallocate"):
        # Writing to a map of a sparse file on a full disk would kill the process.
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def load_images(name: str) -> ImageDataset:
    """Memory maps of a data set of images in the cache, by its name.

    Sizes and shapes are checked each time, checksums only by `offbeat data get`. Raises `ConfigurationError` where the
    data set is missing or damaged.
    """
    return _image_dataset(_load(images_of(name)))


def load_text(name: str) -> TextDataset:
    """Memory maps of a data set of texts in the cache, by its name; as `load_images`."""
    return _text_dataset(_load(text_of(name)))


def _load(entry: DatasetEntry) -> dict[str, NDArray[Any]]:
    directory = directory_of(entry)
    manifest = read_manifest(entry)
    state = "is damaged"
    if manifest is None and not directory.exists():
        state = "is not on this machine"
    elif manifest is not None and sizes_fit(entry, manifest):
        with contextlib.suppress(OSError, ValueError, EOFError):
            return _open_arrays(entry, directory)
    raise ConfigurationError(f"the data set {entry.name} {state} ({directory}); type: offbeat data get {entry.name}")


def _open_arrays(entry: DatasetEntry, directory: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a directory, read-only. Raises `ValueError` for an array of another shape or type."""
    arrays = {}
    for file in entry.files:
        array = np.load(directory / file, mmap_mode="r", allow_pickle=False)
        if array.shape != entry.shape_of(file) or array.dtype != np.dtype(entry.dtype_of(file)):
            raise ValueError(f"{file} holds an array of shape {array.shape} and type {array.dtype}")
        arrays[file] = array
    return arrays


def _image_dataset(arrays: dict[str, NDArray[Any]]) -> ImageDataset:
    train, test = (
        LabeledImages(arrays[f"{part}-images.npy"], arrays[f"{part}-labels.npy"]) for part in ("train", "test")
    )
    return ImageDataset(train, test)


def _text_dataset(arrays: dict[str, NDArray[Any]]) -> TextDataset:
    return TextDataset(arrays["text.npy"], arrays["offsets.npy"], arrays["names.npy"])


def check(entry: DatasetEntry, data: Dataset, where: str) -> tuple[float, ...]:
    """Check decoded arrays: labels and channel means of images, and all checksums. Returns the channel means.

    `where` names the source in errors. Raises `ConfigurationError` for arrays that are not this data set.
    """
    means: tuple[float, ...] = ()
    if isinstance(entry, ImageEntry) and isinstance(data, ImageDataset):
        means = _check_images(entry, data, where)
    for file, array in data.arrays().items():
        if file in entry.sha256 and sha256_of(array) != entry.sha256[file]:
            raise ConfigurationError(
                f"what {where} decodes to is not {entry.name}: {file} has another checksum than expected; "
                "get it from another place"
            )
    return means


def _check_images(entry: ImageEntry, data: ImageDataset, where: str) -> tuple[float, ...]:
    for name, part in (("training", data.train), ("test", data.test)):
        in_range = part.labels.min() >= 0 and part.labels.max() < entry.classes
        if not in_range or not np.bincount(part.labels, minlength=entry.classes).all():
            raise ConfigurationError(
                f"the {name} labels from {where} are not those of {entry.name}: expected every class "
                f"of 0 to {entry.classes - 1} and nothing else; get it from another place"
            )
    means = channel_means(data.train.images)
    if any(abs(mean - known) > entry.means_tolerance for mean, known in zip(means, entry.means, strict=True)):
        raise ConfigurationError(
            f"the images from {where} are not those of {entry.name}: the means of their channels are "
            f"{_format_means(means)}, expected {_format_means(entry.means)}; get it from another place"
        )
    return means


def _format_means(means: tuple[float, ...]) -> str:
    return " ".join(f"{mean:.4f}" for mean in means)


def channel_means(images: NDArray[np.uint8]) -> tuple[float, ...]:
    """The mean of each channel, from exact sums; black is 0 and white is 1."""
    channels = images.shape[-1]
    totals = np.zeros(channels, np.int64)
    for block in _blocks(images):
        totals += block.reshape(-1, channels).sum(0, dtype=np.int64)
    return tuple(float(total) / (images.size // channels * 255) for total in totals)


def sha256_of(array: NDArray[Any]) -> str:
    """SHA-256 of the bytes of an array in C order."""
    digest = hashlib.sha256()
    for block in _blocks(array):
        digest.update(np.ascontiguousarray(block).view(np.uint8).data)
    return digest.hexdigest()


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    rows = max(1, BLOCK_BYTES * len(array) // array.nbytes)
    for start in range(0, len(array), rows):
        yield np.asarray(array[start : start + rows])
