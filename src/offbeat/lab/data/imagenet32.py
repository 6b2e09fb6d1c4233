"""ImageNet32: ten training batches and one for validation, as pickles or as .npz, in folders or .zip files.

Its labels begin with 1; ours with 0. Batches are decoded in the order of their numbers.
"""

from __future__ import annotations

import io
import math
import re
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError
from offbeat.lab.data.archives import ZIP, Member, members, open_in_zip
from offbeat.lab.data.arrays import DataSet, Part, create
from offbeat.lab.data.catalogue import Entry
from offbeat.lab.data.cifar import batch_of_pickle, channels_last, whole_numbers
from offbeat.lab.data.formats import Advance, content_of, lacks, nothing_known
from offbeat.lab.data.pickled import read_pickle

TRAIN = re.compile(r"train_data_batch_(\d+)(?:\.npz)?")
TEST = re.compile(r"val_data(?:\.npz)?")
EXPECTED = "train_data_batch_1 to 10 and val_data, as pickles or .npz, in a folder or in .zip files of one"


def decode(entry: Entry, path: Path, directory: Path, advance: Advance) -> DataSet:
    """Fill the training images batch after batch, however many each of them holds."""
    numbers = _numbers(path)
    if not numbers:
        raise nothing_known(entry, path, EXPECTED)
    if None not in numbers or len(numbers) < 2:
        raise lacks(entry, path, ["val_data" if None not in numbers else "train_data_batch_1"], EXPECTED)
    made = create(entry, directory)
    filled = 0
    for number in sorted(number for number in numbers if number is not None):
        rest = Part(made.train.images[filled:], made.train.labels[filled:])
        filled += _decode_batch(entry, _content(entry, path, number), rest, advance)
    if filled != entry.train:
        missing = f"{entry.train - filled:,} of its {entry.train:,} training images"
        raise lacks(entry, path, [missing], EXPECTED)
    if _decode_batch(entry, _content(entry, path, None), made.test, advance) != entry.test:
        raise lacks(entry, path, [f"some of its {entry.test:,} validation images"], EXPECTED)
    return made


def _numbers(path: Path) -> set[int | None]:
    """The numbers of the batches that are there; None is the one for validation."""
    return {number for member in members(path) for number in _number(member)}


def _number(member: Member) -> list[int | None]:
    name = PurePosixPath(member.name).name
    if train := TRAIN.fullmatch(name):
        return [int(train[1])]
    return [None] if TEST.fullmatch(name) else []


def _content(entry: Entry, path: Path, number: int | None) -> tuple[bytes, str]:
    """The bytes and the name of one batch."""
    for member in members(path):
        if number in _number(member):
            return content_of(member, 2 * entry.train * (entry.image_bytes + 8)), member.name
    raise ConfigurationError(f"{path} has changed while it was read; try again")


def _decode_batch(entry: Entry, batch: tuple[bytes, str], rows: Part, advance: Advance) -> int:
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
            raise ConfigurationError(f"{name} has no array called {key}; expected {EXPECTED}")
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
