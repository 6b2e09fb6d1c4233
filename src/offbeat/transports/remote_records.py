"""Records of a rank that shares no disk with rank 0: they travel there as messages of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from offbeat.core.actions import Record
from offbeat.core.messages import Message
from offbeat.records.files import Writer

LINES_MAX = 200
"""Lines per message: small enough never to be in the way of a gradient."""


@dataclass(frozen=True)
class RecordLines(Message):
    """Some lines of a records file."""

    lines: tuple[str, ...]


class RemoteRecordWriter:
    """Keeps lines until somebody takes them to their keeper, rank 0; `also` keeps the records for who is here.

    With `whole`, another keeper begins with nothing, and gets what the one before has had, too.
    """

    def __init__(self, also: Writer, whole: bool = False) -> None:
        self._also = also
        self._whole = whole
        self._keeper = 0
        self._taken: list[str] = []
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def write(self, record: Record) -> None:
        self._also.write(record)
        with self._lock:
            self._lines.append(msgspec.json.encode(record).decode())

    def __len__(self) -> int:
        return len(self._lines)

    def take(self, keeper: int = 0) -> Iterator[RecordLines]:
        """What this keeper does not have yet."""
        with self._lock:
            if self._whole and keeper != self._keeper:
                self._lines, self._taken = self._taken + self._lines, []
            lines, self._lines, self._keeper = self._lines, [], keeper
            if self._whole:
                self._taken += lines
        for first in range(0, len(lines), LINES_MAX):
            yield RecordLines(tuple(lines[first : first + LINES_MAX]))
