"""Records of a rank that shares no disk with rank 0: they travel there as messages of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from offbeat.actions import Record
from offbeat.messages import Message
from offbeat.records.files import Writer

LINES_MAX = 200
"""Lines per message: small enough never to be in the way of a gradient."""


@dataclass(frozen=True)
class Journal(Message):
    """Some lines of a records file."""

    lines: tuple[str, ...]


class JournalWriter:
    """Keeps lines until somebody takes them to rank 0; `also` keeps the records for who is here."""

    def __init__(self, also: Writer) -> None:
        self._also = also
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def write(self, record: Record) -> None:
        self._also.write(record)
        with self._lock:
            self._lines.append(msgspec.json.encode(record).decode())

    def __len__(self) -> int:
        return len(self._lines)

    def take(self) -> Iterator[Journal]:
        """What has been written since the last time."""
        with self._lock:
            lines, self._lines = self._lines, []
        for first in range(0, len(lines), LINES_MAX):
            yield Journal(tuple(lines[first : first + LINES_MAX]))
