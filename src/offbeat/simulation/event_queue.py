"""The virtual clock and the calls that are scheduled on it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Protocol


class HasActive(Protocol):
    """Counts active processes."""

    @property
    def active(self) -> int: ...


class EventQueue:
    """A heap of (time, sequence number, call): calls at the same time are made in the order of their scheduling.

    No call refers to itself, so that the gradients that it holds are freed as soon as it has been made.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """The virtual time, in seconds since the run began."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def schedule(self, time: float, call: Callable[..., None], *arguments: Any) -> int:
        """Make a call with these arguments at `time`; returns its sequence number."""
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, call, arguments))
        return self._sequence

    def run_while(self, table: HasActive, otherwise: Callable[[], bool]) -> None:
        """Advance the clock from call to call and make each, while there is one and a process is active.

        table: counts the active processes; read before each call, which must be cheap.
        otherwise: whether to go on though no process is active.
        """
        heap = self._heap
        while heap and (table.active or otherwise()):
            self.now, _, call, arguments = heapq.heappop(heap)
            call(*arguments)
