"""Aggregation of records beyond a limit of size, so that the records of a long live run stay bounded.

Up to the limit every record is written as it is. Beyond it, records are merged over a window of time: the rounds of a
rank become one record, and so do its updates, its dropped samples of one reason, its exchanges with one peer, and its
counts of traffic. Sums, numbers and maxima are kept, so that metrics are the same; what is lost is when within a window
something happened. Other kinds of record are written at once.

A window ends when its records are so many times as large as their aggregates: twice at first, and twice as many times
for each further quarter of the limit. So the file grows by a quarter of the limit whenever the run has doubled what it
would have written: a thousand times the limit takes about four times the limit. A window also ends after a minute,
which adds less than 1 kB a minute in a run of few workers.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Protocol

import msgspec

from offbeat.core.actions import Record
from offbeat.records.files import Writer
from offbeat.records.schema import Dropped, Ended, Exchange, MergedContributions, Notice, Round, Traffic, Undone, Update

WINDOW_SECONDS_MAX = 60.0
"""The longest time that a record waits to be written, while others come."""

STEP = 0.25
"""The fraction of the limit after which records are aggregated twice as much."""

DOUBLINGS_MAX = 40
"""Bounds the ratio, for a limit of a few bytes."""


class Aggregate(Protocol):
    """Merges records of one kind and key."""

    def add(self, record: Record) -> None: ...

    def merged(self) -> Record:
        """One record for all that were added; of a single one, that record itself."""
        ...


class RoundAggregate:
    """Rounds of one rank. All have a finite loss or none has, so that the same samples count for training losses."""

    def __init__(self, record: Round) -> None:
        self._first = self._last = record
        self._sums = dict.fromkeys(("seconds", "induced_seconds", "idle_seconds", "send_seconds", "loss"), 0.0)
        self._samples = self._rounds = self._added = 0
        self._draws = record.draws
        self.add(record)

    def add(self, record: Record) -> None:
        assert isinstance(record, Round)
        self._last = record
        self._added += 1
        for name in self._sums:
            self._sums[name] += getattr(record, name) or 0.0
        self._samples += record.samples
        self._rounds += record.rounds
        self._draws = min(self._draws[0], record.draws[0]), max(self._draws[1], record.draws[1])

    def merged(self) -> Round:
        if self._added == 1:
            return self._first
        sums = self._sums if _has_loss(self._first) else {**self._sums, "loss": None}
        return msgspec.structs.replace(
            self._last, start=self._first.start, samples=self._samples, rounds=self._rounds, draws=self._draws, **sums
        )


class UpdateAggregate:
    """Updates of one rank."""

    def __init__(self, record: Update) -> None:
        self._first = self._last = record
        self._messages = self._samples = self._updates = self._added = 0
        self._parts: dict[int, MergedContributions] = {}
        self.add(record)

    def add(self, record: Record) -> None:
        assert isinstance(record, Update)
        self._last = record
        self._added += 1
        self._messages += record.messages
        self._samples += record.samples
        self._updates += record.updates
        for part in record.parts():
            before = self._parts.get(part.rank)
            self._parts[part.rank] = part if before is None else _joined(before, part)

    def merged(self) -> Update:
        first = self._first
        if self._added == 1:
            return first
        return msgspec.structs.replace(
            self._last,
            messages=self._messages,
            samples=self._samples,
            contributions=(),
            updates=self._updates,
            since=first.at if first.since is None else first.since,
            merged=tuple(self._parts[rank] for rank in sorted(self._parts)),
        )


def _joined(one: MergedContributions, other: MergedContributions) -> MergedContributions:
    return MergedContributions(
        one.rank,
        min(one.first, other.first),
        max(one.stop, other.stop),
        one.samples + other.samples,
        one.contributions + other.contributions,
        one.staleness_sum + other.staleness_sum,
        max(one.staleness_max, other.staleness_max),
    )


class DroppedAggregate:
    """Dropped samples of one rank, for one reason."""

    def __init__(self, record: Dropped) -> None:
        self._merged = record

    def add(self, record: Record) -> None:
        assert isinstance(record, Dropped)
        before = self._merged
        first, stop = min(before.first, record.first), max(before.stop, record.stop)
        samples = before.samples + record.samples
        self._merged = msgspec.structs.replace(
            record,
            first=first,
            stop=stop,
            staleness=max(before.staleness, record.staleness),
            messages=before.messages + record.messages,
            partly=None if samples == stop - first else samples,
        )

    def merged(self) -> Dropped:
        return self._merged


class ExchangeAggregate:
    """Exchanges of a rank with one peer, of one outcome; all have a distance, or none has."""

    def __init__(self, record: Exchange) -> None:
        self._merged = record

    def add(self, record: Record) -> None:
        assert isinstance(record, Exchange)
        before, distance = self._merged, record.distance
        exchanges = before.exchanges + record.exchanges
        if distance is not None and before.distance is not None:
            distance = before.distance + (distance - before.distance) * record.exchanges / exchanges
        self._merged = msgspec.structs.replace(
            record, seconds=before.seconds + record.seconds, distance=distance, exchanges=exchanges
        )

    def merged(self) -> Exchange:
        return self._merged


class LatestTraffic:
    """The counts of a process; they are cumulative, so that the last one has them all."""

    def __init__(self, record: Traffic) -> None:
        self._latest: Record = record

    def add(self, record: Record) -> None:
        self._latest = record

    def merged(self) -> Record:
        return self._latest


def _has_loss(record: Round) -> bool:
    return record.loss is not None and math.isfinite(record.loss)


def aggregation_key(record: Record) -> Hashable | None:
    """Records of the same key can be merged; None for a record of a kind that is not aggregated."""
    match record:
        case Round():
            return Round, record.rank, record.finite, _has_loss(record), record.samples > 0
        case Update():
            return Update, record.rank
        case Dropped():
            return Dropped, record.rank, record.reason
        case Exchange():
            return Exchange, record.rank, record.peer, record.outcome, record.distance is None
        case Traffic():
            return Traffic, record.rank, record.since
    return None


def _aggregate_of(record: Record) -> Aggregate:
    match record:
        case Round():
            return RoundAggregate(record)
        case Update():
            return UpdateAggregate(record)
        case Dropped():
            return DroppedAggregate(record)
        case Exchange():
            return ExchangeAggregate(record)
        case Traffic():
            return LatestTraffic(record)
    raise AssertionError(f"internal error: a record of kind {type(record).__name__} is not aggregated")


class BoundedWriter:
    """Passes records on to a writer, aggregated beyond a limit. Not thread-safe.

    A record that was passed on is final. `write_pending` passes on those of an unfinished window: a checkpoint refers
    to all records before it, and the last record of a run comes after all others.

    writer: receives the records.
    rank: the rank whose records these are.
    bytes_max: the limit, in bytes as JSON lines.
    bytes_before: the bytes of records of the rank that exist already.
    """

    def __init__(self, writer: Writer, rank: int, bytes_max: float, bytes_before: int = 0) -> None:
        self._writer = writer
        self._rank = rank
        self._bytes_max = bytes_max
        self._bytes = bytes_before
        """Bytes that were passed on."""
        self._has_notice = bytes_before > bytes_max
        self._pending: dict[Hashable, Aggregate] = {}
        self._pending_bytes = 0
        """Bytes of the records that were merged."""
        self._pending_since = 0.0
        self._check_at_bytes = 0.0
        """Bytes of records from which the window may be complete."""
        self._encoder = msgspec.json.Encoder()

    def write(self, record: Record) -> None:
        nbytes = self._size(record)
        if not self._has_notice and self._bytes + nbytes <= self._bytes_max:
            self._pass_on(record, nbytes)
            return
        if not self._has_notice:
            self._has_notice = True
            notice = self._notice(record.at)
            self._pass_on(notice, self._size(notice))
        if isinstance(record, Undone | Ended) or record.at - self._pending_since >= WINDOW_SECONDS_MAX:
            self.write_pending()  # what is undone or has ended must come before
        key = aggregation_key(record)
        if key is None:
            self._pass_on(record, nbytes)
        else:
            self._merge(key, record, nbytes)

    def write_pending(self) -> None:
        """Pass on the aggregates of the records so far."""
        while self._pending:
            key = next(iter(self._pending))
            record = self._pending[key].merged()
            self._pass_on(record, self._size(record))
            del self._pending[key]  # not before it was written, which may fail
        self._pending_bytes = 0

    def _merge(self, key: Hashable, record: Record, nbytes: int) -> None:
        if not self._pending:
            self._pending_since, self._check_at_bytes = record.at, 0.0
        if key in self._pending:
            self._pending[key].add(record)
        else:
            self._pending[key] = _aggregate_of(record)
        self._pending_bytes += nbytes
        if self._pending_bytes >= self._check_at_bytes:
            self._check_at_bytes = self._ratio() * sum(map(self._size, self._merged()))
            if self._pending_bytes >= self._check_at_bytes:
                self.write_pending()

    def _merged(self) -> Iterator[Record]:
        return (aggregate.merged() for aggregate in self._pending.values())

    def _ratio(self) -> float:
        """How many times as large as their aggregates the records of a window are, at least."""
        doublings = 1.0 + max(0.0, self._bytes - self._bytes_max) // (STEP * self._bytes_max)
        return float(2.0 ** min(doublings, DOUBLINGS_MAX))

    def _size(self, record: Record) -> int:
        return len(self._encoder.encode(record)) + 1

    def _pass_on(self, record: Record, nbytes: int) -> None:
        self._writer.write(record)
        self._bytes += nbytes

    def _notice(self, at: float) -> Notice:
        return Notice(
            at=at,
            rank=self._rank,
            text=f"the records of rank {self._rank} have reached their limit of {self._bytes_max:,.0f} bytes "
            "(records_max_bytes): from here on a record stands for several rounds, updates, drops or exchanges, and "
            "has their number and their sums",
        )
