"""From records of traffic: how many bytes had been sent by when, and in what kind of message.

Counts are cumulative, and each process of a live run keeps its own. One that was killed has told what it had sent up to
a second before; whoever takes over its rank counts anew, and both are added up. Runs that were recorded before there
were such records have none, and what is asked about them is None.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from offbeat.core.compression import saved_bytes
from offbeat.core.messages import Message
from offbeat.records.schema import RECORD_LINES_KIND, Flow, RunRecords, Traffic


def counts(run: RunRecords) -> list[list[Traffic]]:
    """The records of each count, in the order of time."""
    found: dict[tuple[int, float], list[Traffic]] = {}
    for record in run.records:
        if isinstance(record, Traffic):
            found.setdefault((record.rank, record.since), []).append(record)
    return [sorted(records, key=lambda record: record.at) for records in found.values()]


def sent_by_kind(run: RunRecords) -> dict[str, Flow]:
    """What all ranks sent in all, by kind of message; empty where nobody counted."""
    return _added(records[-1].sent for records in counts(run))


def bytes_received(run: RunRecords) -> int | None:
    """What all ranks received in all."""
    found = counts(run)
    return sum(flow.bytes for records in found for flow in records[-1].received.values()) if found else None


class BytesSent:
    """What all ranks together had sent by when, for the sake of training: records on their way to rank 0 are not."""

    def __init__(self, run: RunRecords) -> None:
        self._series = [
            ([records[0].since, *(record.at for record in records)], [0, *map(_for_training, records)])
            for records in counts(run)
        ]

    @property
    def known(self) -> bool:
        return bool(self._series)

    def by(self, seconds: float) -> float | None:
        """So many bytes, interpolated between records; of several at that very moment the first counts."""
        return sum(_value_at(seconds, *series) for series in self._series) if self._series else None


def _for_training(record: Traffic) -> int:
    return sum(flow.bytes for kind, flow in record.sent.items() if kind != RECORD_LINES_KIND)


def _value_at(seconds: float, times: list[float], totals: list[int]) -> float:
    place = bisect_left(times, seconds)
    if place == len(times):
        return totals[-1]
    if place == 0 or times[place] == seconds:
        return totals[place]
    before, after = times[place - 1], times[place]
    return totals[place - 1] + (totals[place] - totals[place - 1]) * (seconds - before) / (after - before)


def _added(several: Iterable[Mapping[str, Flow]]) -> dict[str, Flow]:
    sums: dict[str, Flow] = {}
    for flows in several:
        for kind, flow in flows.items():
            known = sums.get(kind, Flow(0, 0, 0))
            sums[kind] = Flow(
                known.messages + flow.messages,
                known.bytes + flow.bytes,
                known.bytes_uncompressed + flow.bytes_uncompressed,
            )
    return dict(sorted(sums.items()))


# How much is sent and received, by kind of message: the count behind `Traffic` records.
#
# Both engines count every message here, so that counting one is a look-up and a few additions.


class MessageSize(NamedTuple):
    """A message as it is counted."""

    kind: str
    nbytes: int
    nbytes_uncompressed: int


def message_size(message: Message, nbytes: int | None = None) -> MessageSize:
    """What a message weighs; `nbytes` of it on the wire, where there is one."""
    nbytes = message.nbytes if nbytes is None else nbytes
    return MessageSize(type(message).__name__, nbytes, nbytes + saved_bytes(message))


class TrafficCounter:
    """Counts from the beginning of a process's part in a run, for one rank or for all of a simulation."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._since = 0.0
        self._sent: dict[str, list[int]] = {}
        self._received: dict[str, list[int]] = {}
        self._recorded: Traffic | None = None
        self.moved = False
        """Whether anything has been sent or received since the last record."""
        self.bytes_sent = 0
        self.messages_sent = 0

    def sent(self, weight: MessageSize) -> None:
        self.moved = True
        self.bytes_sent += weight.nbytes
        self.messages_sent += 1
        _add(self._sent, weight)

    def received(self, weight: MessageSize) -> None:
        self.moved = True
        _add(self._received, weight)

    def begin(self, since: float) -> None:
        """Say when it began, by the clock of the run."""
        self._since = since

    def shift(self, seconds: float) -> None:
        """The clock was set. What a record has said once stays, for counts are told apart by when they began."""
        if self._recorded is None:
            self._since += seconds

    def record(self, at: float) -> Traffic | None:
        """All that was counted up to `at`; None where it has been recorded already."""
        traffic = Traffic(
            at=at, rank=self._rank, since=self._since, sent=_flows(self._sent), received=_flows(self._received)
        )
        if traffic == self._recorded:
            return None
        self._recorded, self.moved = traffic, False
        return traffic


def _add(flows: dict[str, list[int]], weight: MessageSize) -> None:
    kind, nbytes, uncompressed = weight
    flow = flows.get(kind)
    if flow is None:
        flows[kind] = [1, nbytes, uncompressed]
    else:
        flow[0] += 1
        flow[1] += nbytes
        flow[2] += uncompressed


def _flows(counts: dict[str, list[int]]) -> dict[str, Flow]:
    return {kind: Flow(*counts[kind]) for kind in sorted(counts)}
