"""Traffic: the counter of messages behind `Traffic` records, and what is computed from these records.

Counts are cumulative, one series per process. A killed process has recorded its count up to about a second before; a
process that is restarted under its rank starts a new series, and both are added. Without such records results are None.
"""

from __future__ import annotations

import operator
from bisect import bisect_left

import msgspec

from offbeat.core.wire_size import MessageSize
from offbeat.records.schema import RECORD_LINES_KIND, Flow, RunRecords, Traffic, of_kind


def traffic_series(run: RunRecords) -> list[list[Traffic]]:
    """The records of each counter, in the order of time."""
    series: dict[tuple[int, float], list[Traffic]] = {}
    for record in of_kind(run, Traffic):
        series.setdefault((record.rank, record.since), []).append(record)
    return [sorted(records, key=lambda record: record.at) for records in series.values()]


def sent_by_kind(run: RunRecords) -> dict[str, Flow]:
    """The total traffic sent by all ranks, by kind of message; empty if it was not counted."""
    sums: dict[str, list[int]] = {}
    for records in traffic_series(run):
        for kind, flow in records[-1].sent.items():
            total = sums.setdefault(kind, [0, 0, 0])
            total[:] = map(operator.add, total, msgspec.structs.astuple(flow))
    return _flows(sums)


def bytes_received(run: RunRecords) -> int | None:
    """The bytes received by all ranks."""
    series = traffic_series(run)
    return sum(flow.bytes for records in series for flow in records[-1].received.values()) if series else None


class BytesSent:
    """The training traffic sent by all ranks over time; messages that carry records do not count."""

    def __init__(self, run: RunRecords) -> None:
        self._series = [
            ([records[0].since, *(record.at for record in records)], [0, *map(_for_training, records)])
            for records in traffic_series(run)
        ]

    @property
    def known(self) -> bool:
        """Whether traffic was counted."""
        return bool(self._series)

    def by(self, seconds: float) -> float | None:
        """The bytes sent up to `seconds`, interpolated between records; of several at one time the first counts."""
        return sum(_value_at(seconds, *series) for series in self._series) if self._series else None


def _for_training(record: Traffic) -> int:
    return sum(flow.bytes for kind, flow in record.sent.items() if kind != RECORD_LINES_KIND)


def _value_at(seconds: float, times: list[float], totals: list[int]) -> float:
    index = bisect_left(times, seconds)
    if index == len(times):
        return totals[-1]
    if index == 0 or times[index] == seconds:
        return totals[index]
    before, after = times[index - 1], times[index]
    return totals[index - 1] + (totals[index] - totals[index - 1]) * (seconds - before) / (after - before)


RECORD_SECONDS = 1.0
"""Interval between two records of a live rank, and thus what a killed process leaves unrecorded at most."""


class TrafficCounter:
    """Counts the messages of a process from its start, for one rank or for all ranks of a simulation.

    Engines count every message here, so counting must be cheap. Not thread-safe.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._since = self._recorded_at = 0.0
        self._sent: dict[str, list[int]] = {}
        self._received: dict[str, list[int]] = {}
        self._recorded: Traffic | None = None
        self.moved = False
        """Whether anything has been sent or received since the last record."""
        self.bytes_sent = 0
        self.messages_sent = 0

    def sent(self, size: MessageSize) -> None:
        """Count a message that was sent."""
        self.moved = True
        self.bytes_sent += size.nbytes
        self.messages_sent += 1
        _add(self._sent, size)

    def received(self, size: MessageSize) -> None:
        """Count a message that was received."""
        self.moved = True
        _add(self._received, size)

    def begin(self, since: float) -> None:
        """Set the time at which counting began, in seconds since the run began."""
        self._since = self._recorded_at = since

    def shift(self, seconds: float) -> None:
        """The clock was adjusted. After the first record `since` stays, since it identifies the series."""
        self._recorded_at += seconds
        if self._recorded is None:
            self._since += seconds

    def next_at(self) -> float | None:
        """When a live rank records its traffic next; None if nothing has moved since the last record."""
        return self._recorded_at + RECORD_SECONDS if self.moved else None

    def record(self, at: float) -> Traffic | None:
        """A record of the counts at time `at`; None if it is equal to the last one."""
        self._recorded_at = at
        traffic = Traffic(
            at=at, rank=self._rank, since=self._since, sent=_flows(self._sent), received=_flows(self._received)
        )
        if traffic == self._recorded:
            return None
        self._recorded, self.moved = traffic, False
        return traffic


def _add(flows: dict[str, list[int]], size: MessageSize) -> None:
    kind, nbytes, uncompressed = size
    name = kind.__name__
    flow = flows.get(name)
    if flow is None:
        flows[name] = [1, nbytes, uncompressed]
    else:
        flow[0] += 1
        flow[1] += nbytes
        flow[2] += uncompressed


def _flows(flows: dict[str, list[int]]) -> dict[str, Flow]:
    return {kind: Flow(*flows[kind]) for kind in sorted(flows)}
