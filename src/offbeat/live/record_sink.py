"""The records of a live rank: on the time axis of rank 0, and sent to the rank that stores them if need be.

Records from before the clock was synchronized are held back, until it is or until they cannot wait any longer. Traffic
is recorded at intervals, and at the end with the use of the links. Beyond a limit of size, records are aggregated.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from offbeat.core.actions import Record
from offbeat.errors import InvalidMessage, shortened
from offbeat.live.live_outbox import LiveOutbox
from offbeat.records.aggregation import BoundedWriter
from offbeat.records.files import RankWriter, Writer
from offbeat.records.schema import RECORD_DECODER, AnyRecord, Ended
from offbeat.records.traffic import TrafficCounter
from offbeat.transports.remote_records import LINES_MAX, RecordLines, RemoteRecordWriter
from offbeat.transports.transport import Transport

FLUSH_SECONDS = 1.0
"""Interval between two messages with records."""

OnRemoteRecords = Callable[[int, list[AnyRecord]], None]
"""Called with another rank and the records that it has sent here."""

LINE_CHARACTERS_MAX = 1 << 20
"""The longest line of a record that another rank may send."""


class RecordSink:
    """Writes the records of one rank. Not thread-safe: the caller holds the lock of the runner.

    rank: the rank whose records these are.
    writer: receives them.
    transport, outbox: the links of this rank, over which a `RemoteRecordWriter` is emptied.
    traffic: counts the messages of this rank.
    on_remote_records: receives records of other ranks; None if this rank never stores them.
    bytes_max: the size from which records are aggregated; None for no limit.
    """

    def __init__(
        self,
        rank: int,
        writer: Writer,
        transport: Transport,
        outbox: LiveOutbox,
        traffic: TrafficCounter,
        on_remote_records: OnRemoteRecords | None = None,
        bytes_max: float | None = None,
    ) -> None:
        self._rank = rank
        self._writer = writer
        self._bounded: BoundedWriter | None = None
        if bytes_max is not None:
            bytes_before = writer.position() if isinstance(writer, RankWriter) else 0
            self._bounded = BoundedWriter(writer, rank, bytes_max, bytes_before)
        self._transport = transport
        self._outbox = outbox
        self._traffic = traffic
        self._on_remote_records = on_remote_records
        self._undated: list[Record] = []
        self.is_dated = rank == 0
        """Whether the clock shows the time of the run; that of rank 0 always does."""
        self._flushed_at = 0.0
        self._link_use_recorded = False

    def write(self, record: Record) -> None:
        if self.is_dated:
            (self._bounded or self._writer).write(record)
        else:
            self._undated.append(record)

    def write_pending(self) -> None:
        """Write the records that wait to be aggregated."""
        if self._bounded is not None:
            self._bounded.write_pending()

    def date(self, shift: float = 0.0) -> None:
        """Write the records held back, `shift` seconds later: the clock was adjusted by it, or they cannot wait."""
        self.is_dated, undated, self._undated = True, self._undated, []
        for record in undated:
            self.write(msgspec.structs.replace(record, at=record.at + shift))

    def traffic_due(self) -> float | None:
        """When the next record of traffic is due; None if nothing is new or the clock is not synchronized."""
        return self._traffic.next_at() if self.is_dated else None

    def record_traffic_if_due(self, now: float) -> None:
        due = self.traffic_due()
        if due is not None and due <= now:
            self._record_traffic(now)

    def _record_traffic(self, at: float) -> None:
        record = self._traffic.record(at)
        if record is not None:
            self.write(record)

    def write_last(self, ended: Ended) -> None:
        """Write the last records: traffic, use of links, and how this rank has ended."""
        self.date()
        self._record_traffic(ended.at)
        link_use = None if self._link_use_recorded else self._outbox.link_use(ended.at, self._rank)
        if link_use is not None:
            self._link_use_recorded = True
            self.write(link_use)
        self.write(ended)

    # Records of a rank that shares no directory with rank 0

    def send_last(self, ended: Ended) -> None:
        """Send all records before `Stopped`, the last message that rank 0 waits for."""
        if isinstance(self._writer, RemoteRecordWriter):
            self.write_last(ended)
            self.flush(ended.at)

    def receive(self, source: int, received: RecordLines) -> None:
        """Store the records of another rank; raises InvalidMessage if they are none, or not of that rank."""
        if self._on_remote_records is None:
            return
        what = None
        if len(received.lines) > LINES_MAX or any(len(line) > LINE_CHARACTERS_MAX for line in received.lines):
            what = f" with {len(received.lines)} lines, the longest of {max(map(len, received.lines))} characters"
        try:
            records = [] if what else [RECORD_DECODER.decode(line) for line in received.lines]
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            what = f" with a line that is not a record ({shortened(error)})"
        if what is None and any(getattr(record, "rank", source) != source for record in records):
            what = " with records of another rank"
        if what is not None:
            raise InvalidMessage(source, RecordLines.__name__, self._rank, what)
        self._on_remote_records(source, records)

    def flush(self, now: float, interval_seconds: float = 0.0) -> None:
        """Send the records to the rank that stores them, unless that was done within the interval."""
        destination = self._destination()
        if not isinstance(self._writer, RemoteRecordWriter) or destination is None:
            return
        if now - self._flushed_at >= interval_seconds:
            self._flushed_at = now
            for lines in self._writer.drain(destination):
                self._transport.send(destination, self._outbox.linked[destination], lines)

    def _destination(self) -> int | None:
        """The rank that stores the records: rank 0, or the lowest linked rank once a decentralized run has lost it."""
        linked = self._outbox.linked
        if 0 in linked or self._on_remote_records is None or 0 not in self._outbox.ever_linked:
            return 0 if 0 in linked else None
        return min((rank for rank in linked if rank < self._rank), default=None)
