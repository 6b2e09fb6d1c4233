"""Follows the records of a run while it goes on, for the supervisor and for what shows the run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from offbeat.records.files import Tail
from offbeat.records.schema import AnyRecord, Membership, Round


class RunObserver(Protocol):
    """Is notified of what happens in a run."""

    def records(self, records: Sequence[AnyRecord]) -> None: ...
    def say(self, sentence: str) -> None: ...
    def line(self, rank: int, text: str) -> None: ...


class RunMonitor:
    """Reads the new records of a run whenever it is called, and remembers which ranks have joined or computed."""

    def __init__(self, directory: Path, observer: RunObserver) -> None:
        self.joined: set[int] = set()
        self.rounds: Counter[int] = Counter()
        """Rounds that each rank has computed."""
        self.began: float | None = None
        """When the run began, by this machine's monotonic clock: no record can be read before it was written."""
        self._tail = Tail(directory)
        self._observer = observer

    def has_joined(self, rank: int) -> bool:
        """Whether a rank has ever joined: another rank recorded it, or it has computed."""
        return rank in self.joined or self.rounds[rank] > 0

    def __call__(self) -> None:
        records = self._tail.poll()
        self.joined.update(record.peer for record in records if isinstance(record, Membership) and record.joined)
        for record in records:
            if isinstance(record, Round):
                self.rounds[record.rank] += record.rounds
        if records:
            self.began = min(time.monotonic() - records[-1].at, self.began or float("inf"))
            self._observer.records(records)
