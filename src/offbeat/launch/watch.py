"""What a supervisor sees of a run: the records that its processes write."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from offbeat.records.schema import AnyRecord, Membership, Round
from offbeat.records.tail import Tail


class Watcher(Protocol):
    """Looks on while a run goes on."""

    def records(self, records: Sequence[AnyRecord]) -> None: ...
    def say(self, sentence: str) -> None: ...
    def line(self, rank: int, text: str) -> None: ...


class Watch:
    """Reads on in the files of a run whenever it is called, and remembers who has ever joined or computed."""

    def __init__(self, directory: Path, watcher: Watcher) -> None:
        self.joined: set[int] = set()
        self.rounds: Counter[int] = Counter()
        """How often each rank has computed."""
        self._zero: float | None = None
        self._tail = Tail(directory)
        self._watcher = watcher

    def has_joined(self, rank: int) -> bool:
        """Whether a rank has ever joined: others have said so, or it has computed."""
        return rank in self.joined or self.rounds[rank] > 0

    def __call__(self) -> None:
        records = self._tail.poll()
        self.joined.update(record.peer for record in records if isinstance(record, Membership) and record.joined)
        self.rounds.update(record.rank for record in records if isinstance(record, Round))
        if records:
            self._zero = min(time.monotonic() - records[-1].at, self._zero or float("inf"))
            self._watcher.records(records)

    @property
    def began(self) -> float | None:
        """When the run began, by this machine's monotonic clock: no record can be read before it was written."""
        return self._zero
