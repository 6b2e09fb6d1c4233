"""The virtual clock and the calls that are scheduled on it."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

Entry = tuple[float, int, Callable[..., None], tuple[Any, ...]]
"""Time, sequence number, call and its arguments."""


class HasActive(Protocol):
    """Counts active processes."""

    @property
    def active(self) -> int: ...


class EventQueue:
    """A heap of (time, sequence number, call): calls at the same time are made in the order of their scheduling.

    Calls that are scheduled for the present time, as most are where messages take no time, wait in a queue of their
    own, which is in that order by itself.

    No call refers to itself, so that the gradients that it holds are freed as soon as it has been made.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """The virtual time, in seconds since the run began."""
        self._heap: list[Entry] = []
        self._present: deque[Entry] = deque()
        self._sequence = 0

    def schedule(self, time: float, call: Callable[..., None], *arguments: Any) -> int:
        """Make a call with these arguments at `time`; returns its sequence number."""
        self._sequence += 1
        entry = (time, self._sequence, call, arguments)
        present = self._present
        if time == self.now and (not present or present[-1][0] <= time):
            present.append(entry)
        else:
            heapq.heappush(self._heap, entry)
        return self._sequence

    def run_while(self, table: HasActive, otherwise: Callable[[], bool]) -> None:
        """Advance the clock from call to call and make each, while there is one and a process is active.

        table: counts the active processes; read before each call, which must be cheap.
        otherwise: whether to go on though no process is active.
        """
        heap, present = self._heap, self._present
        while (heap or present) and (table.active or otherwise()):
            is_present = present and not (heap and heap[0] < present[0])
            self.now, _, call, arguments = present.popleft() if is_present else heapq.heappop(heap)
            call(*arguments)
