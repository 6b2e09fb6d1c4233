"""The traffic of a live rank: counts messages, and says when the next record of it is due."""

from __future__ import annotations

from offbeat.core.wire_size import MessageSize
from offbeat.records.schema import Traffic
from offbeat.records.traffic import TrafficCounter

RECORD_SECONDS = 1.0
"""Interval between two records of traffic, and thus what a killed process leaves unrecorded at most."""


class TrafficMeter:
    """Counts the messages of one rank. Not thread-safe: the caller holds the lock of the runner."""

    def __init__(self, rank: int) -> None:
        self._counter = TrafficCounter(rank)
        self._recorded_at = 0.0

    def begin(self, at: float) -> None:
        """Counting begins."""
        self._recorded_at = at
        self._counter.begin(at)

    def sent(self, size: MessageSize) -> None:
        self._counter.sent(size)

    def received(self, size: MessageSize) -> None:
        self._counter.received(size)

    @property
    def bytes_sent(self) -> int:
        return self._counter.bytes_sent

    @property
    def messages_sent(self) -> int:
        return self._counter.messages_sent

    def next_at(self) -> float | None:
        """When the next record is due; None if nothing has been sent or received since the last one."""
        return self._recorded_at + RECORD_SECONDS if self._counter.moved else None

    def record(self, at: float) -> Traffic | None:
        """A record of the counts; None if it is equal to the last one."""
        self._recorded_at = at
        return self._counter.record(at)

    def shift(self, seconds: float) -> None:
        """The clock was adjusted by `seconds`."""
        self._recorded_at += seconds
        self._counter.shift(seconds)
