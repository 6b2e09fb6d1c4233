"""Whether each sample was applied or dropped exactly once, from records alone, aggregated or not.

A record accounts for `samples` of the draws [first, stop) of a rank. A single contribution accounts for all of them; an
aggregate may leave gaps, which other records fill. Ranges that overlap are counted together: if their samples are more
than the draws that they cover, some were counted twice, and if they are fewer, some are missing. A repeated and a
missing sample within the same overlapping ranges cancel out; without aggregates a correct run has no such ranges.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from offbeat.records.schema import Dropped, RunRecords, Undone, Update


@dataclass(frozen=True)
class SampleAccount:
    """The samples of one rank.

    accounted: samples that were applied or dropped
    repeated: of these, how many were counted more than once
    missing: draws below the last one that were not counted
    """

    accounted: int
    repeated: int
    missing: int


def sample_accounts(run: RunRecords) -> dict[int, SampleAccount]:
    """The account of each rank that computed for a hub, in the order of ranks.

    What was undone does not count; an aggregate of which some updates were undone counts as undone.
    """
    ranges: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    applied: list[Update] = []
    for record in run.records:
        if isinstance(record, Update):
            applied.append(record)
        elif isinstance(record, Undone):
            applied = [update for update in applied if update.version <= record.to_version]
        elif isinstance(record, Dropped):
            ranges[record.rank].append((record.first, record.stop, record.samples))
    for update in applied:
        for part in update.parts():
            ranges[part.rank].append((part.first, part.stop, part.samples))
    return {rank: _account(sorted(ranges[rank])) for rank in sorted(ranges)}


def _account(ranges: list[tuple[int, int, int]]) -> SampleAccount:
    """The account of ranges with their samples, in rising order."""
    repeated = missing = total = start = stop = counted = 0
    last = max(end for _, end, _ in ranges)
    for first, end, samples in [*ranges, (last, last, 0)]:
        if first >= stop:  # no range overlaps both sides
            repeated += max(0, counted - (stop - start))
            missing += max(0, (stop - start) - counted) + first - stop
            start, counted = first, 0
        stop = max(stop, end)
        counted += samples
        total += samples
    return SampleAccount(total, repeated, missing)
