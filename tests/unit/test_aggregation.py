"""Records beyond the limit of size: aggregates have the same sums, stay small, and show a sample that counts twice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_records import a_gossip, a_round, a_toy, a_traffic, an_exchange, an_update, header, run

from offbeat.cli.run_state import RunState
from offbeat.core.actions import Record
from offbeat.errors import RunFailed
from offbeat.lab.live_runs import _truncate_records
from offbeat.records import curves
from offbeat.records.aggregation import STEP, WINDOW_SECONDS_MAX, BoundedWriter
from offbeat.records.exchanges import exchange_counts
from offbeat.records.files import MemoryWriter, RankWriter, read_rank, read_run, write_header
from offbeat.records.metrics import summarize
from offbeat.records.sample_accounts import SampleAccount, sample_accounts
from offbeat.records.schema import (
    RECORD_DECODER,
    AnyRecord,
    Contribution,
    Dropped,
    Ended,
    Evaluation,
    Exchange,
    Membership,
    Notice,
    Round,
    RunRecords,
    Traffic,
    Undone,
    Update,
    of_kind,
)
from offbeat.records.thinning import STALENESS, fields_of, thin, union

WITHIN_A_WINDOW = {"updates_to_target", "bytes_to_target", "consensus_distance"}
"""Metrics that depend on the time of something within a window."""


def size(records: Iterable[Record]) -> int:
    return sum(len(msgspec.json.encode(record)) + 1 for record in records)


def bounded(records: Iterable[Record], bytes_max: float, rank: int = 0) -> list[AnyRecord]:
    """The records as they are read from the file of a rank with this limit."""
    memory = MemoryWriter()
    writer = BoundedWriter(memory, rank, bytes_max)
    for record in records:
        writer.write(record)
    writer.write_pending()
    read = [RECORD_DECODER.decode(msgspec.json.encode(record)) for record in memory.records]
    return sorted(read, key=lambda record: record.at)


def without_notices(records: Iterable[AnyRecord]) -> list[AnyRecord]:
    return [record for record in records if not isinstance(record, Notice)]


Step = tuple[str, int, int, float]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["round", "round", "round", "apply", "apply", "drop", "nonfinite", "no loss", "empty", "evaluate", "meet"]
        ),
        st.integers(1, 4),
        st.integers(1, 9),
        st.sampled_from([0.001, 0.01, 0.3, 20.0]),
    ),
    max_size=150,
)
LIMITS = st.sampled_from([1.0, 200.0, 1000.0, 5000.0, 1e9])


class Stream:
    """The records of a hub and its workers: each draw is applied or dropped once, in the order of its rank."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.records: list[AnyRecord] = []
        self.at, self.version, self.total = 0.0, 0, 0
        self.computed: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in range(1, 5)}
        self.draws = dict.fromkeys(self.computed, 0)
        for step in steps:
            self._do(*step)
        self.records.append(Ended(at=self.at, bytes_sent=9, messages_sent=1, failure=None))

    def _do(self, what: str, rank: int, number: int, seconds: float) -> None:
        self.at += seconds
        if what in ("round", "nonfinite", "no loss", "empty"):
            self._compute(what, rank, 0 if what == "empty" else number, seconds)
        elif what == "apply":
            self._apply(rank)
        elif what == "drop" and self.computed[rank]:
            first, stop, version = self.computed[rank].pop(0)
            reason = "stale" if number % 2 else "late"
            staleness = self.version - version
            self.records.append(Dropped(self.at, rank, first, stop, staleness, reason))  # type: ignore[arg-type]
        elif what == "evaluate":
            accuracy = min(1.0, self.version / 20)
            self.records.append(Evaluation(self.at, 0, self.version, self.total, 1.0 - accuracy, accuracy))
            self.records.append(a_traffic(self.at, Gradient=100 * self.version))
        elif what == "meet":
            outcome = "lost" if number == 9 else "averaged"
            apart = None if number == 9 else number / 8
            self.records.append(an_exchange(self.at, rank, number % 4, apart, outcome=outcome))  # type: ignore[arg-type]

    def _compute(self, what: str, rank: int, samples: int, seconds: float) -> None:
        first = self.draws[rank]
        self.draws[rank] += samples
        self.computed[rank].append((first, first + samples, self.version))
        made = a_round(rank, self.at - seconds, seconds, idle=seconds / 3, induced=seconds / 7)
        loss = None if what == "no loss" else math.nan if what == "nonfinite" else 0.5 * samples
        self.records.append(
            msgspec.structs.replace(
                made,
                samples=samples,
                draws=(first, first + samples),
                loss=loss,
                finite=what != "nonfinite",
                version=self.version,
                send_seconds=seconds / 5,
            )
        )

    def _apply(self, ranks: int) -> None:
        ready = [rank for rank in self.computed if self.computed[rank]][:ranks]
        if ready:
            parts = [(rank, *self.computed[rank].pop(0)) for rank in ready]
            self.add_update([(rank, first, stop, self.version - version) for rank, first, stop, version in parts])

    def add_update(self, contributions: Sequence[tuple[int, int, int, int]]) -> None:
        self.version += 1
        self.total += sum(stop - first for _, first, stop, _ in contributions)
        made = an_update(self.at, self.total, *contributions)
        self.records.append(msgspec.structs.replace(made, version=self.version))


def metrics(records: Iterable[AnyRecord]) -> dict[str, Any]:
    return {
        name: pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        for name, value in msgspec.structs.asdict(summarize(run(records))).items()
        if name not in WITHIN_A_WINDOW
    }


def live_totals(records: Sequence[AnyRecord]) -> list[Any]:
    """What the live view counts from the beginning of a run."""
    state = RunState()
    state.add(records)
    workers = [
        (rank, one.rounds, one.samples, one.compute_seconds, one.idle_seconds, one.send_seconds)
        for rank, one in sorted(state.workers.items())
    ]
    numbers = [state.version, state.updates, state.samples, *(number for worker in workers for number in worker)]
    return [pytest.approx(number, rel=1e-9) for number in numbers]


# The same sums


@given(STEPS, LIMITS)
def test_metrics_of_aggregates_are_those_of_the_original_records(steps: list[Step], bytes_max: float) -> None:
    original = Stream(steps).records
    aggregated = bounded(original, bytes_max)
    assert metrics(aggregated) == metrics(original)
    assert live_totals(aggregated) == live_totals(original)
    assert exchange_counts(run(aggregated)) == exchange_counts(run(original))


@given(STEPS, LIMITS)
def test_distributions_and_curves_of_aggregates_have_the_same_number_sum_and_end(
    steps: list[Step], bytes_max: float
) -> None:
    before, after = run(Stream(steps).records), run(bounded(Stream(steps).records, bytes_max))
    for kind, field in ((Round, "seconds"), (Round, "idle_seconds"), (Update, "samples"), (Update, "messages")):
        values = [curves.field_values(kind, field, [one]) for one in (before, after)]
        assert len(values[0]) == len(values[1])
        assert values[1].sum() == pytest.approx(values[0].sum())
    stale = [curves.stalenesses([one]) for one in (before, after)]
    assert len(stale[0]) == len(stale[1])
    assert stale[1].sum() == pytest.approx(stale[0].sum())
    assert stale[1].max(initial=0.0) == stale[0].max(initial=0.0)
    groups = [curves.round_groups(one)[:, 1:].sum(axis=0) for one in (before, after)]
    assert groups[1] == pytest.approx(groups[0])
    for curve in (curves.samples_curve, curves.steps_curve, curves.bytes_curve):
        assert curve(after).values[-1:] == pytest.approx(curve(before).values[-1:])


@given(STEPS, LIMITS, LIMITS)
def test_aggregates_can_be_aggregated_again(steps: list[Step], bytes_max: float, again_max: float) -> None:
    original = Stream(steps).records
    assert metrics(bounded(bounded(original, bytes_max), again_max)) == metrics(original)


def test_what_is_estimated_within_a_window_is_close() -> None:
    for original in (a_toy("async-fmb", 3), a_gossip(live=True)):
        aggregated = bounded(original.records, 0.2 * size(original.records))
        assert len(aggregated) < 0.7 * len(original.records)
        before, after = summarize(original), summarize(run(aggregated, workers=original.header.workers))
        for name in WITHIN_A_WINDOW:
            value = getattr(before, name)
            assert getattr(after, name) == (None if value is None else pytest.approx(value, rel=0.1))


def test_an_aggregate_has_numbers_sums_and_what_came_last() -> None:
    rounds = [
        msgspec.structs.replace(a_round(1, float(start), 0.5, idle=0.5), draws=(10 * start, 10 * start + 10))
        for start in range(4)
    ]
    updates = [
        msgspec.structs.replace(
            an_update(start + 1.0, 10 * start + 10, (1, 10 * start, 10 * start + 10, start)), version=start + 1
        )
        for start in range(4)
    ]
    drops = [Dropped(5.0, 2, 0, 5, 3, "stale"), Dropped(5.5, 2, 5, 8, 7, "stale"), Dropped(6.0, 2, 10, 11, 0, "stale")]
    meetings = [an_exchange(6.0, 1, 2, 1.0), an_exchange(7.0, 1, 2, 4.0, seconds=0.2)]
    writer = BoundedWriter(memory := MemoryWriter(), 0, 1.0)
    writer._check_at_bytes = math.inf
    for record in (*rounds, *updates, *drops, *meetings):
        writer._pending_bytes = -(10**9)
        writer.write(record)
    writer.write_pending()
    notice, round_, update, dropped, met = memory.records
    assert isinstance(notice, Notice)
    assert isinstance(round_, Round)
    assert (round_.rounds, round_.samples, round_.loss, round_.draws) == (4, 40, 4.0, (0, 40))
    assert (round_.start, round_.at, round_.seconds, round_.idle_seconds) == (0.0, 3.5, 2.0, 2.0)
    assert isinstance(update, Update)
    assert (update.updates, update.version, update.since, update.at, update.samples_total) == (4, 4, 1.0, 4.0, 40)
    assert [msgspec.structs.astuple(part) for part in update.merged] == [(1, 0, 40, 40, 4, 6, 3)]
    assert [update.updates_by(at) for at in (0.5, 2.5, 4.0)] == [0, 2.0, 4]
    assert isinstance(dropped, Dropped)
    assert (dropped.first, dropped.stop, dropped.samples, dropped.messages, dropped.staleness) == (0, 11, 9, 3, 7)
    assert isinstance(met, Exchange)
    assert (met.exchanges, met.seconds, met.distance) == (2, pytest.approx(0.3), 2.5)


def test_undone_updates_count_as_before() -> None:
    stream = Stream([("round", 1, 5, 0.01), ("apply", 1, 1, 0.01)] * 30)
    end = stream.records.pop()
    undone = Undone(at=stream.at, rank=0, version=31, to_version=20, samples=50, samples_total=100)
    original = [*stream.records, undone, msgspec.structs.replace(end, at=stream.at + 1.0)]
    aggregated = bounded(original, 500.0)
    assert metrics(aggregated) == metrics(original)
    position = aggregated.index(undone)
    assert not any(isinstance(record, Update) for record in aggregated[position:])


# What is not aggregated


@given(STEPS)
def test_up_to_the_limit_every_record_is_written_as_it_is(steps: list[Step]) -> None:
    original = Stream(steps).records
    memory = MemoryWriter()
    writer = BoundedWriter(memory, 0, size(original))
    for record in original:
        writer.write(record)
    assert memory.records == original


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            a_round(1, 0.0, 2.0),
            '{"record":"round","at":2.0,"rank":1,"start":0.0,"seconds":2.0,"induced_seconds":0.0,"samples":10,'
            '"loss":1.0,"version":0,"draws":[0,10],"idle_seconds":0.0,"send_seconds":0.0,"finite":true}',
        ),
        (
            an_update(2.0, 20, (1, 0, 10, 0)),
            '{"record":"update","at":2.0,"rank":0,"version":1,"messages":1,"samples":10,"samples_total":20,'
            '"learning_rate":0.1,"contributions":[[1,0,10,0]]}',
        ),
        (
            Dropped(at=5.0, rank=1, first=20, stop=27, staleness=4, reason="stale"),
            '{"record":"dropped","at":5.0,"rank":1,"first":20,"stop":27,"staleness":4,"reason":"stale"}',
        ),
        (
            an_exchange(1.0, 0, 1, None, outcome="lost"),
            '{"record":"exchange","at":1.0,"rank":0,"peer":1,"seconds":0.1,"distance":null,"outcome":"lost"}',
        ),
    ],
)
def test_a_record_that_is_no_aggregate_has_the_bytes_it_always_had(record: Record, line: str) -> None:
    assert msgspec.json.encode(record).decode() == line


def test_one_notice_says_so_with_the_limit_and_a_restarted_rank_does_not_repeat_it() -> None:
    original = [a_round(1, float(start), 0.5) for start in range(100)]
    (notice,) = [record for record in bounded(original, 1000.0, rank=1) if isinstance(record, Notice)]
    assert notice.rank == 1
    assert notice.text.startswith("the records of rank 1 have reached their limit of 1,000 bytes (records_max_bytes):")
    writer = BoundedWriter(memory := MemoryWriter(), 1, 1000.0, bytes_before=2000)
    for record in original:
        writer.write(record)
    assert not any(isinstance(record, Notice) for record in memory.records)


def test_evaluations_and_members_are_written_at_once_and_the_end_after_all_others() -> None:
    joined = Membership(at=0.3, rank=0, peer=1, incarnation=0, joined=True)
    end = Ended(at=0.4, bytes_sent=0, messages_sent=0, failure=None)
    writer = BoundedWriter(memory := MemoryWriter(), 0, 1.0)
    for record in (a_round(0, 0.0, 0.1), a_round(0, 0.1, 0.1), joined, end):
        writer.write(record)
    assert [type(record) for record in memory.records] == [Notice, Membership, Round, Ended]


# Size


@given(STEPS, st.floats(2000.0, 8000.0))
def test_the_size_grows_with_the_logarithm_of_what_it_would_be(steps: list[Step], bytes_max: float) -> None:
    kinds = {"round", "apply", "drop"}
    quick = [(what, 1 + rank % 2, number, 0.001) for what, rank, number, _ in steps if what in kinds] * 20
    original = Stream(quick).records
    assert original[-1].at < WINDOW_SECONDS_MAX
    doublings = math.log2(max(1.0, size(original) / bytes_max))
    window = 7 * 220  # aggregates of two ranks that compute, of the hub's updates, and of four kinds of drops
    assert size(bounded(original, bytes_max)) <= bytes_max * (1 + STEP * (2 + doublings)) + 2 * window


def test_a_long_run_takes_a_small_multiple_of_the_limit() -> None:
    writer = BoundedWriter(memory := MemoryWriter(), 0, 5000.0)
    original = 0
    for step in range(40_000):
        update = an_update(step / 1000, 32 * step, (1 + step % 8, 32 * step, 32 * step + 32, 7))
        original += size([update])
        writer.write(update)
    writer.write_pending()
    assert original > 1000 * 5000
    assert size(memory.records) < 4.5 * 5000
    assert sum(record.updates for record in memory.records if isinstance(record, Update)) == 40_000


def test_a_window_ends_after_a_minute_so_that_a_slow_run_can_be_watched() -> None:
    writer = BoundedWriter(memory := MemoryWriter(), 0, 100.0, bytes_before=10**6)
    for start in range(0, 600, 10):
        writer.write(a_round(0, float(start), 5.0))
    assert [record.rounds for record in memory.records if isinstance(record, Round)] == [6] * 9
    writer.write(Membership(at=700.0, rank=0, peer=1, incarnation=0, joined=False))
    assert [record.rounds for record in memory.records if isinstance(record, Round)] == [6] * 10


# Files


def test_a_checkpoint_position_follows_pending_records_and_a_failed_write_keeps_them(tmp_path: Path) -> None:
    write_header(tmp_path, header(engine="live"))
    with RankWriter(tmp_path, 0) as file:
        writer = BoundedWriter(file, 0, 1.0)
        for start in range(3):
            writer.write(a_round(0, float(start), 0.5))
        before = file.position()
        write, file.write = file.write, _fail  # type: ignore[method-assign]
        with pytest.raises(RunFailed):
            writer.write_pending()
        file.write = write  # type: ignore[method-assign]
        writer.write_pending()
        assert file.position() > before
        writer.write_pending()
    rounds = list(of_kind(read_run(tmp_path), Round))
    assert sum(record.rounds for record in rounds) == 3


def _fail(record: Record) -> None:
    raise RunFailed("the disk is full")


@given(STEPS, LIMITS)
def test_thinned_aggregates_still_say_what_they_stand_for(steps: list[Step], bytes_max: float) -> None:
    aggregated = run(bounded(Stream(steps).records, bytes_max))
    reads = union([STALENESS, fields_of(Round, "seconds"), fields_of(Update, "at", "samples")])
    thinned = run(thin(aggregated, reads))
    for kind, field in ((Round, "seconds"), (Update, "samples")):
        values = [curves.field_values(kind, field, [one]) for one in (aggregated, thinned)]
        np.testing.assert_array_equal(*values)
    np.testing.assert_array_equal(curves.stalenesses([aggregated]), curves.stalenesses([thinned]))


def test_peers_that_resume_keep_earlier_records_that_were_written_after_later_ones(tmp_path: Path) -> None:
    write_header(tmp_path, header(engine="live"))
    original = [a_round(1, at - 0.5, 0.5) for at in (1.0, 5.0, 3.0, 6.0)]
    with RankWriter(tmp_path, 1) as writer:
        for record in original:
            writer.write(record)
    _truncate_records(tmp_path, 4.0)
    assert list(read_rank(tmp_path, 1)) == [original[0], original[2]]


# Exactly once


def drained(steps: Sequence[Step]) -> Stream:
    """A stream in which all that was computed is applied at last."""
    return Stream([*steps, *[("apply", 4, 1, 0.001)] * len(steps)])


@given(STEPS, LIMITS)
def test_aggregates_account_for_every_sample_once(steps: list[Step], bytes_max: float) -> None:
    stream = drained(steps)
    accounts = sample_accounts(run(bounded(stream.records, bytes_max)))
    assert accounts == sample_accounts(run(stream.records))
    for rank, account in accounts.items():
        assert account == SampleAccount(stream.draws[rank], repeated=0, missing=0)


@given(STEPS, LIMITS, st.data())
def test_a_sample_that_is_applied_twice_is_found_in_aggregates(
    steps: list[Step], bytes_max: float, data: st.DataObject
) -> None:
    stream = drained(steps)
    end = stream.records.pop()
    parts = [part for record in stream.records if isinstance(record, Update) for part in record.contributions]
    parts = [part for part in parts if part.stop > part.first]
    if parts:
        twice: Contribution = data.draw(st.sampled_from(parts))
        stream.add_update([(twice.rank, twice.first, twice.stop, 3)])
        accounts = sample_accounts(run(bounded([*stream.records, end], bytes_max)))
        assert {rank: account.repeated for rank, account in accounts.items() if account.repeated} == {
            twice.rank: twice.stop - twice.first
        }


def test_missing_samples_are_counted() -> None:
    records = [an_update(1.0, 20, (1, 5, 10, 0)), an_update(2.0, 30, (1, 12, 20, 0))]
    assert sample_accounts(run(records)) == {1: SampleAccount(13, repeated=0, missing=7)}
    merged = bounded(records, 1.0)
    assert sample_accounts(run(without_notices(merged))) == {1: SampleAccount(13, repeated=0, missing=7)}


def test_samples_that_were_undone_may_be_applied_again() -> None:
    records: list[AnyRecord] = [
        an_update(1.0, 10, (1, 0, 10, 0)),
        msgspec.structs.replace(an_update(2.0, 20, (1, 10, 20, 0)), version=2),
        Undone(at=3.0, rank=0, version=3, to_version=1, samples=10, samples_total=10),
        msgspec.structs.replace(an_update(4.0, 20, (1, 10, 20, 0)), version=4),
    ]
    assert sample_accounts(run(records)) == {1: SampleAccount(20, repeated=0, missing=0)}


# The live view


def test_the_live_view_shows_the_rates_of_aggregates_while_no_newer_record_is_there() -> None:
    original: list[AnyRecord] = []
    for tick in range(600):
        original.append(msgspec.structs.replace(a_round(1, tick / 10, 0.1), samples=8))
        original.append(an_update(tick / 10 + 0.1, 8 * tick + 8, (1, 8 * tick, 8 * tick + 8, 2)))
    for tick in range(1, 60):
        original.append(a_traffic(float(tick), Gradient=1000 * tick))
    original.sort(key=lambda record: record.at)
    records = RunRecords(None, header(), tuple(bounded(original, 1.0)))
    state = RunState([1])
    state.add(records.records)
    state.add([Evaluation(at=63.0, rank=0, version=600, samples_total=4800, loss=1.0, accuracy=None)])
    assert state.samples_per_second == pytest.approx(80.0, rel=0.05)
    assert state.computed_per_second(state.workers[1]) == pytest.approx(80.0, rel=0.05)
    assert state.bytes_per_second == pytest.approx(1000.0, rel=0.05)
    assert state.workers[1].staleness_mean == 2.0
    assert len(list(of_kind(records, Traffic))) < 59
