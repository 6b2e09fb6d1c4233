"""Records of a rank that shares no disk with rank 0: they are sent there as messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from offbeat.core.actions import Record
from offbeat.core.messages import Message
from offbeat.records.files import Writer

LINES_MAX = 200
"""Lines per message: small enough never to delay a gradient."""


@dataclass(frozen=True)
class RecordLines(Message):
    """Some lines of a records file."""

    lines: tuple[str, ...]


class RemoteRecordWriter:
    """Queues records as lines for the collecting rank, and passes them to a local writer, `also`.

    With `whole`, a new collecting rank gets the lines that an earlier one has received, too. Any thread may write.
    """

    def __init__(self, also: Writer, whole: bool = False) -> None:
        self._also = also
        self._whole = whole
        self._collector = 0
        self._sent: list[str] = []
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def write(self, record: Record) -> None:
        self._also.write(record)
        with self._lock:
            self._lines.append(msgspec.json.encode(record).decode())

    def __len__(self) -> int:
        return len(self._lines)

    def drain(self, collector: int = 0) -> Iterator[RecordLines]:
        """Messages with the lines that this collecting rank does not have yet."""
        with self._lock:
            if self._whole and collector != self._collector:
                self._lines, self._sent = self._sent + self._lines, []
            lines, self._lines, self._collector = self._lines, [], collector
            if self._whole:
                self._sent += lines
        for first in range(0, len(lines), LINES_MAX):
            yield RecordLines(tuple(lines[first : first + LINES_MAX]))
