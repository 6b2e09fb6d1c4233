"""What a supervisor sees of a run: the records that its processes write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from offbeat.records.schema import AnyRecord, Membership
from offbeat.records.tail import Tail


class Watcher(Protocol):
    """Looks on while a run goes on."""

    def records(self, records: Sequence[AnyRecord]) -> None: ...
    def say(self, sentence: str) -> None: ...
    def line(self, rank: int, text: str) -> None: ...


class Watch:
    """Reads on in the files of a run whenever it is called, and remembers who has ever joined."""

    def __init__(self, directory: Path, watcher: Watcher) -> None:
        self.joined: set[int] = set()
        self._tail = Tail(directory)
        self._watcher = watcher

    def __call__(self) -> None:
        records = self._tail.poll()
        self.joined.update(record.peer for record in records if isinstance(record, Membership) and record.joined)
        if records:
            self._watcher.records(records)
