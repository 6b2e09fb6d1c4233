"""The size of the records of a long live run: with the limit of `--records-max-bytes`, and without.

    python bench/record_size.py [--hours 24] [--workers 4] [--rounds-per-second 120] [--limit 1e8]

No run takes place: the records of a hub and its workers are made up at the rate of a small model, one update for each
round and a drop for every tenth, and written as a live run writes them, but not to a disk. Printed are bytes for each
minute and in all, of the hub and of one worker, and what aggregation costs the hub for each record.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator

import msgspec

from offbeat.core.actions import Record
from offbeat.records.aggregation import BoundedWriter
from offbeat.records.schema import Contribution, Dropped, Round, Update

BATCH = 32


class CountingWriter:
    """Counts the bytes and the records that it is given."""

    def __init__(self) -> None:
        self.bytes = self.records = 0
        self._encoder = msgspec.json.Encoder()

    def write(self, record: Record) -> None:
        self.bytes += len(self._encoder.encode(record)) + 1
        self.records += 1


def hub_records(seconds: float, rate: float, workers: int) -> Iterator[Record]:
    """An update for each round, of any worker; every tenth round is dropped instead."""
    random_order = random.Random(0)
    draws, version, total = [0] * (workers + 1), 0, 0
    for index in range(int(seconds * rate)):
        at, rank = (index + random_order.random()) / rate, random_order.randrange(1, workers + 1)
        first = draws[rank]
        draws[rank] += BATCH
        staleness = random_order.randrange(2 * workers)
        if index % 10 == 9:
            yield Dropped(at, rank, first, first + BATCH, staleness, "stale")
            continue
        version, total = version + 1, total + BATCH
        yield Update(at, 0, version, 1, BATCH, total, 0.1, (Contribution(rank, first, first + BATCH, staleness),))


def worker_records(seconds: float, rate: float) -> Iterator[Record]:
    """The rounds of one worker."""
    uneven = random.Random(1)
    for index in range(int(seconds * rate)):
        start, lasts = (index + 0.1 * uneven.random()) / rate, 0.8 / rate
        draws = (BATCH * index, BATCH * index + BATCH)
        loss = BATCH * uneven.random()
        yield Round(start + lasts, 1, start, lasts, 0.0, BATCH, loss, index, draws, 0.2 / rate, 1e-4, True)


def measure(records: Iterator[Record], limit: float, seconds: float) -> str:
    plain, bounded = CountingWriter(), CountingWriter()
    writer = BoundedWriter(bounded, 0, limit)
    spent = 0.0
    for record in records:
        plain.write(record)
        before = time.perf_counter()
        writer.write(record)
        spent += time.perf_counter() - before
    writer.write_pending()
    minutes = seconds / 60
    return (
        f"{plain.bytes / minutes:>12,.0f} {bounded.bytes / minutes:>12,.0f} {plain.bytes:>16,} {bounded.bytes:>14,} "
        f"{plain.records:>12,} {bounded.records:>10,} {1e6 * spent / max(1, plain.records):>10.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds-per-second", type=float, default=120.0, help="of all workers")
    parser.add_argument("--limit", type=float, default=1e8)
    chosen = parser.parse_args()
    seconds, rate = 3600 * chosen.hours, chosen.rounds_per_second
    print("          bytes/minute      bounded            bytes        bounded      records    bounded  µs/record")
    hub = hub_records(seconds, rate, chosen.workers)
    print("hub    ", measure(hub, chosen.limit, seconds))
    print("worker ", measure(worker_records(seconds, rate / chosen.workers), chosen.limit, seconds))


if __name__ == "__main__":
    main()
