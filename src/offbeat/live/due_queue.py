"""What a live rank has to do later: timers, delayed messages, and turns of the rate limit."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from offbeat.core.events import MessageArrived, PeerLost


@dataclass(frozen=True, slots=True)
class TimerDue:
    """A timer of the node expires."""

    name: str


@dataclass(frozen=True, slots=True)
class OutboxDue:
    """The rate limit lets the next queued message to this peer leave."""

    peer: int


Unique = TimerDue | OutboxDue
"""Entries that replace an earlier equal one."""

Entry = Unique | MessageArrived | PeerLost


class DueQueue:
    """Entries in the order of their time. Not thread-safe: the caller holds the lock of the runner."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry]] = []
        self._numbers = itertools.count()
        self._valid: dict[Unique, int] = {}
        """entry → the number of its valid place in the heap"""

    def put(self, at: float, entry: Entry) -> None:
        """Add an entry; one that is unique replaces the equal one that is queued."""
        number = next(self._numbers)
        if isinstance(entry, Unique):
            self._valid[entry] = number
        heapq.heappush(self._heap, (at, number, entry))

    def remove(self, entry: Unique) -> None:
        """Remove a unique entry, if it is queued."""
        self._valid.pop(entry, None)

    def clear_timers(self) -> None:
        """Remove all timers of the node."""
        for entry in [entry for entry in self._valid if isinstance(entry, TimerDue)]:
            self.remove(entry)

    def pop(self, now: float) -> Entry | None:
        """Remove and return the first entry that is due; None if there is none."""
        at = self.next_at()
        if at is None or at > now:
            return None
        entry = heapq.heappop(self._heap)[2]
        if isinstance(entry, Unique):
            del self._valid[entry]
        return entry

    def next_at(self) -> float | None:
        """When the first entry is due; None if there is none."""
        while self._heap:
            at, number, entry = self._heap[0]
            if not isinstance(entry, Unique) or self._valid.get(entry) == number:
                return at
            heapq.heappop(self._heap)
        return None

    def last_message_at(self, source: int) -> float | None:
        """When the last delayed message of a rank is due; None if none is delayed."""
        times = [at for at, _, entry in self._heap if isinstance(entry, MessageArrived) and entry.source == source]
        return max(times, default=None)

    def shift(self, seconds: float) -> None:
        """The clock was adjusted by `seconds`."""
        self._heap = [(at + seconds, number, entry) for at, number, entry in self._heap]
