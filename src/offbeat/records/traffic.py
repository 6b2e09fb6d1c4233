"""From records of traffic: how many bytes had been sent by when, and in what kind of message.

Counts are cumulative, and each process of a live run keeps its own. One that was killed has told what it had sent up to
a second before; whoever takes over its rank counts anew, and both are added up. Runs that were recorded before there
were such records have none, and what is asked about them is None.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from offbeat.records.files import RunRecords
from offbeat.records.schema import RECORD_LINES_KIND, Flow, Traffic


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
