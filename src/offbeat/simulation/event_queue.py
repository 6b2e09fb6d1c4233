"""The virtual clock and the calls that are scheduled on it."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventQueue:
    """A heap of (time, sequence number, call): calls at the same time are made in the order of their scheduling.

    No call refers to itself, so that the gradients that it holds are freed as soon as it has been made.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """The virtual time, in seconds since the run began."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def schedule(self, time: float, call: Callable[[], None]) -> int:
        """Make a call at `time`; returns its sequence number."""
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, call))
        return self._sequence

    def run_while(self, condition: Callable[[], bool]) -> None:
        """Advance the clock from call to call and make each, while there is one and the condition holds."""
        heap = self._heap
        while heap and condition():
            self.now, _, call = heapq.heappop(heap)
            call()
