"""Thin records: keep only what given computations read, for archives that are stored for long.

A computation declares the kinds of record that it reads, and which of their fields. Records of other kinds are dropped,
and other fields set to zero, which compresses to almost nothing. What is read is kept exactly, so that curves and
histograms are the same to the last bit; the metrics of `metrics.summarize` are not, and must be stored beside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from offbeat.core.actions import Record
from offbeat.records.curves import round_groups
from offbeat.records.schema import (
    AnyRecord,
    Consensus,
    Contribution,
    Ended,
    Evaluation,
    Exchange,
    MergedContributions,
    Round,
    RunRecords,
    Traffic,
    Undone,
    Update,
    of_kind,
)

Reads = Mapping[type[Record], frozenset[str]]
"""The fields that are read of each kind of record; of a kind that is not in `BLANKS`, all are kept."""

BLANKS: dict[type[Record], AnyRecord] = {
    Round: Round(
        at=0.0,
        rank=0,
        start=0.0,
        seconds=0.0,
        induced_seconds=0.0,
        samples=0,
        loss=None,
        version=0,
        draws=(0, 0),
        idle_seconds=0.0,
        send_seconds=0.0,
        finite=True,
    ),
    Update: Update(
        at=0.0, rank=0, version=0, messages=0, samples=0, samples_total=0, learning_rate=0.0, contributions=()
    ),
    Exchange: Exchange(at=0.0, rank=0, peer=0, seconds=0.0, distance=None, outcome="averaged"),
    Traffic: Traffic(at=0.0, rank=0, since=0.0, sent={}, received={}),
}
"""The frequent kinds of record, without content."""

COUNTS: Reads = {
    Round: frozenset({"rounds"}),
    Update: frozenset({"updates", "since"}),
    Exchange: frozenset({"exchanges"}),
}
"""The fields that say what an aggregate stands for, which are always kept."""


def fields_of(kind: type[Record], *names: str) -> Reads:
    """The reads of these fields of one kind of record; of `contributions`, only the staleness is kept."""
    return {kind: frozenset(names)}


def union(reads: Iterable[Reads]) -> Reads:
    """What any of several computations reads."""
    result: dict[type[Record], frozenset[str]] = {}
    for one in reads:
        for kind, names in one.items():
            result[kind] = result.get(kind, frozenset()) | names
    return result


EVALUATIONS = fields_of(Evaluation)
TRAFFIC = fields_of(Traffic, "at", "rank", "since", "sent")
STEPS = union([fields_of(Update, "at"), fields_of(Undone)])
SAMPLES = union([fields_of(Update, "at", "samples_total"), fields_of(Undone)])
STALENESS = fields_of(Update, "contributions")
TRAINING_LOSS = fields_of(Round, "at", "samples", "loss", "finite")
CONSENSUS = union([fields_of(Consensus), fields_of(Exchange, "at", "rank", "peer", "distance", "outcome")])


def thin(run: RunRecords, reads: Reads) -> Iterator[AnyRecord]:
    """The records of a run that are read, in their order, without the fields that are not.

    Rounds of which only the training loss is read come first, merged into those groups that its curve is computed from.

    `Ended` records are always kept, and an update of each rank, by which `metrics.end_of` tells a decentralized run.
    """
    wanted = dict(union([fields_of(Ended), reads]))
    if Exchange in wanted and any(of_kind(run, Consensus)):
        del wanted[Exchange]  # distances are estimated from exchanges only if none is recorded
    if Round in wanted and wanted[Round] <= TRAINING_LOSS[Round]:
        del wanted[Round]
        yield from _merged_rounds(run)
    ranks: set[int] = set()
    for record in run.records:
        names = wanted.get(type(record))
        if isinstance(record, Update) and record.rank not in ranks:
            ranks.add(record.rank)
            names = (names or frozenset()) | {"rank"}
        if names is not None:
            yield _without_unread(record, names)


def _merged_rounds(run: RunRecords) -> Iterator[AnyRecord]:
    for at, samples, loss in round_groups(run).tolist():
        yield msgspec.structs.replace(BLANKS[Round], at=at, samples=int(samples), loss=loss)


def _without_unread(record: AnyRecord, names: frozenset[str]) -> AnyRecord:
    blank = BLANKS.get(type(record))
    if blank is None:
        return record
    names = names | COUNTS.get(type(record), frozenset()) | ({"merged"} if "contributions" in names else frozenset())
    return msgspec.structs.replace(blank, **{name: _value(record, name) for name in sorted(names)})


def _value(record: AnyRecord, name: str) -> object:
    if name == "contributions" and isinstance(record, Update):
        return tuple(Contribution(0, 0, 0, contribution.staleness) for contribution in record.contributions)
    if name == "merged" and isinstance(record, Update):
        return tuple(
            MergedContributions(0, 0, 0, 0, one.contributions, one.staleness_sum, one.staleness_max)
            for one in record.merged
        )
    return getattr(record, name)
