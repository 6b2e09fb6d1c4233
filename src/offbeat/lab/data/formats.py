"""What all decoders share: how they say how far they are, what was not found, and how pictures are read."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError, MissingDependency
from offbeat.lab.data.archives import Member
from offbeat.lab.data.arrays import DataSet
from offbeat.lab.data.catalogue import Entry

PNG = b"\x89PNG\r\n\x1a\n"


class Advance(Protocol):
    """Is told how many bytes more have been decoded."""

    def __call__(self, count: int, /) -> None: ...


class Readable(Protocol):
    """Anything with bytes to read."""

    def read(self, size: int = -1, /) -> bytes: ...


class Decoder(Protocol):
    """Reads an archive or a folder into new files of a directory."""

    def __call__(self, entry: Entry, path: Path, directory: Path, advance: Advance, /) -> DataSet: ...


def nothing_known(entry: Entry, path: Path, expected: str) -> ConfigurationError:
    """The answer to an archive or folder that is something else."""
    return ConfigurationError(f"{path} holds nothing that {entry.name} could be read from; expected {expected}")


def lacks(entry: Entry, path: Path, missing: Iterable[str], expected: str) -> ConfigurationError:
    """The answer to an archive or folder that is incomplete."""
    return ConfigurationError(
        f"{path} lacks {', '.join(sorted(missing))} of {entry.name}; expected all of it: {expected}"
    )


def content_of(member: Member, bytes_max: int) -> bytes:
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
