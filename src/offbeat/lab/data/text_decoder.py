"""The decoder of texts: the documents of an archive or folder, in the order of their names, as one array of bytes.

Documents are files whose path fits the pattern of the catalogue entry, plain or gzipped; everything else in an archive
is ignored. Bytes are kept as they are.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.errors import ConfigurationError
from offbeat.lab.data.archives import ArchiveMember, members
from offbeat.lab.data.arrays import TextDataset, create_text
from offbeat.lab.data.catalogue import NAME_BYTES_MAX, TextEntry

GZIP = b"\x1f\x8b"


def decode_text(entry: TextEntry, path: Path, directory: Path, on_decoded: Callable[[int], None]) -> TextDataset:
    """Decode all documents. Raises `ConfigurationError` for input that is something else, incomplete or damaged."""
    data = create_text(entry, directory)
    documents: dict[str, bytes] = {}
    for member in members(path):
        if (match := re.fullmatch(entry.pattern, member.name)) is None:
            continue
        name = match[1]
        if name in documents or len(name.encode()) > NAME_BYTES_MAX or not name.isascii():
            raise ConfigurationError(f"{path} has a document {name!r} too many; expected {entry.expected}")
        documents[name] = _content(member, entry.bytes)
        on_decoded(len(documents[name]))
    _check_complete(entry, path, documents)
    ordered = sorted(documents)
    lengths = [len(documents[name]) for name in ordered]
    data.offsets[:] = np.concatenate([[0], np.cumsum(lengths)])
    data.names[:] = [name.encode() for name in ordered]
    for name, start, stop in zip(ordered, data.offsets[:-1], data.offsets[1:], strict=True):
        data.text[start:stop] = np.frombuffer(documents[name], np.uint8)
    return data


def _content(member: ArchiveMember, bytes_max: int) -> bytes:
    """The bytes of a document, decompressed; one more than `bytes_max` at most."""
    with closing(member.open()) as stream:
        content: Any = gzip.GzipFile(fileobj=stream) if stream.peek(2)[:2] == GZIP else stream  # type: ignore[call-overload]
        return content.read(bytes_max + 1)  # type: ignore[no-any-return]


def _check_complete(entry: TextEntry, path: Path, documents: dict[str, bytes]) -> None:
    if not documents:
        raise ConfigurationError(
            f"{path} holds nothing that {entry.name} could be read from; expected {entry.expected}"
        )
    total = sum(map(len, documents.values()))
    if (len(documents), total) != (entry.documents, entry.bytes):
        raise ConfigurationError(
            f"{path} is not {entry.name}: it has {len(documents):,} documents of {total:,} bytes in all, but expected "
            f"are {entry.documents:,} of {entry.bytes:,}; get it from another place"
        )
