"""Checks of the records of live runs, under any faults."""

from __future__ import annotations

from pathlib import Path

from offbeat.records.sample_accounts import sample_accounts
from offbeat.records.schema import Ended, RunRecords, Traffic, Update, of_kind
from offbeat.records.traffic import traffic_series


def check_accounts(run: RunRecords) -> None:
    """No sample was applied twice, none was skipped, and the counters add up."""
    version = total = 0
    for update in of_kind(run, Update):
        version += update.updates
        assert update.version == version
        counted = sum(part.samples for part in update.parts())
        assert counted == update.samples
        total += counted
        assert update.samples_total == total
    for rank, account in sample_accounts(run).items():
        assert account.repeated == 0, f"samples of rank {rank} were counted twice"
        assert account.missing == 0, f"samples of rank {rank} were skipped unnoticed"


def check_traffic(run: RunRecords) -> None:
    """The last traffic record of each finished process equals its `ended` record, and counts never decrease."""
    last = {(record.rank, record.at): record.sent.values() for record in of_kind(run, Traffic)}
    ends = list(of_kind(run, Ended))
    assert ends
    for end in ends:
        sent = last[end.rank, end.at]
        assert sum(flow.bytes for flow in sent) == end.bytes_sent
        assert sum(flow.messages for flow in sent) == end.messages_sent
    for records in traffic_series(run):
        assert records[0].since <= records[0].at
        for way in ("sent", "received"):
            totals = [sum(flow.bytes for flow in getattr(record, way).values()) for record in records]
            assert totals == sorted(totals)
        assert all(flow.bytes_uncompressed >= flow.bytes > 0 for flow in records[-1].sent.values())


def processes_of(parent: int) -> dict[int, int]:
    """The ranks that a process has started, and their process ids."""
    found = {}
    for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
        for number in tasks.read_text().split():
            name = (Path("/proc") / number / "comm").read_text().strip()
            if name.startswith("offbeat "):
                found[int(name.removeprefix("offbeat "))] = int(number)
    return found
