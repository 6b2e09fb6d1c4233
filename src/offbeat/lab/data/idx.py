"""The IDX format of MNIST and Fashion-MNIST: a few numbers about the shape, then the bytes.

Which part a file belongs to is seen from how many examples it has, whatever it is called.
"""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError
from offbeat.lab.data.archives import Stream, members
from offbeat.lab.data.arrays import FILES, DataSet, create
from offbeat.lab.data.catalogue import Entry
from offbeat.lab.data.formats import Advance, lacks, nothing_known

GZIP = b"\x1f\x8b"
EXPECTED = "IDX files such as train-images-idx3-ubyte, plain or .gz, or an archive with them"


def decode(entry: Entry, path: Path, directory: Path, advance: Advance) -> DataSet:
    """Read all four files, in whatever order they come."""
    made = create(entry, directory)
    shapes = {entry.shape_of(file)[:3]: file for file in FILES}
    missing = set(FILES)
    for member in members(path):
        stream = member.open()
        try:
            content: Any = gzip.GzipFile(fileobj=stream) if stream.peek(2)[:2] == GZIP else stream  # type: ignore[call-overload]
            shape = _shape(content)
            if shape in shapes:
                file = shapes[shape]
                array = made.arrays()[file]
                array[:] = _bytes(content, shape, member.name).reshape(array.shape)
                missing.discard(file)
                advance(array.nbytes)
        finally:
            stream.close()
    if len(missing) == len(FILES):
        raise nothing_known(entry, path, EXPECTED)
    if missing:
        raise lacks(entry, path, missing, EXPECTED)
    return made


def _shape(content: Stream) -> tuple[int, ...] | None:
    """What the head of an IDX file of bytes says, or None where it is something else."""
    try:
        head = content.read(4)
        if len(head) < 4 or head[:3] != b"\x00\x00\x08" or head[3] not in (1, 3):
            return None
        sizes = content.read(4 * head[3])
        return struct.unpack(f">{head[3]}I", sizes) if len(sizes) == 4 * head[3] else None
    except gzip.BadGzipFile:
        return None


def _bytes(content: Stream, shape: tuple[int, ...], name: str) -> NDArray[np.uint8]:
    count = math.prod(shape)
    data = content.read(count + 1)
    if len(data) != count:
        raise ConfigurationError(
            f"{name} is damaged: its head announces {count:,} bytes, but there are "
            f"{'more' if len(data) > count else f'{len(data):,}'}; get it again"
        )
    return np.frombuffer(data, np.uint8)
