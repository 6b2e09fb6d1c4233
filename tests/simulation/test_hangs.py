"""A worker whose computation hangs, in virtual time: announced, treated as lost, and admitted again."""

from __future__ import annotations

import dataclasses

import pytest

import offbeat as ob
from offbeat.records.schema import Membership, Notice, Round, of_kind
from offbeat.strategies.hang_detection import LOST_FACTOR, HangDetector

HANG = ob.faults.Hang(1, at_seconds=20, seconds=300)


def simulated(strategy: ob.Strategy, *faults: ob.faults.Fault, **settings: object) -> ob.Run:
    cluster = ob.Cluster(seconds_per_sample=0.02, faults=faults, **settings)  # type: ignore[arg-type]
    return ob.simulate(ob.workloads.Quadratic(), strategy, cluster, workers=3, until=60_000)


def changes(run: ob.Run, rank: int) -> list[tuple[bool, float]]:
    """Whether a rank joined or was lost, and when, after the start."""
    return [(record.joined, record.at) for record in of_kind(run.records, Membership) if record.peer == rank][1:]


@pytest.mark.parametrize(
    "strategy",
    [
        ob.FixedMinibatch(batch=64),
        ob.LocalSGD(every=1),
        pytest.param(ob.AnytimeMinibatch(seconds=2.0), marks=pytest.mark.slow),
        pytest.param(ob.AsyncFixed(batch=64), marks=pytest.mark.slow),
    ],
    ids=lambda strategy: strategy.name,
)
def test_a_worker_that_hangs_is_announced_then_lost_and_joins_when_it_has_ended(strategy: ob.Strategy) -> None:
    run = simulated(strategy, HANG)
    texts = [(notice.at, notice.text) for notice in of_kind(run.records, Notice) if "worker 1" in notice.text]
    (announced_at, announced), (lost_at, lost), (back_at, back) = texts
    assert "has not answered for" in announced
    assert "raise hang_factor or hang_seconds" in announced
    assert "is treated as lost" in lost
    assert "has answered after" in back
    assert 45 < announced_at < lost_at < 110
    assert back_at == pytest.approx(320, abs=1), "as soon as the hang is over"
    (was_joined, at), (is_joined, _) = changes(run, 1)
    assert (was_joined, is_joined) == (False, True)
    assert at == pytest.approx(lost_at, abs=0.1)
    assert run.summary.samples >= 60_000


def test_synchronous_training_goes_on_while_a_worker_hangs() -> None:
    run = simulated(ob.FixedMinibatch(batch=64), HANG)
    waiting = simulated(ob.FixedMinibatch(batch=64, hang_factor=0), HANG)
    assert run.summary.seconds < waiting.summary.seconds - 150
    assert not list(of_kind(waiting.records, Notice))
    assert not changes(waiting, 1)


def test_a_worker_that_is_merely_slow_is_lost_once_at_the_most() -> None:
    """Sixty times slower than its peers: its first round is lost, and from then on its own pace is known."""
    run = simulated(ob.FixedMinibatch(batch=64), factors=(60.0,))
    assert [joined for joined, _ in changes(run, 1)] == [False, True]
    assert sum(record.samples for record in of_kind(run.records, Round) if record.rank == 1) > 0


def test_a_worker_that_hangs_at_the_end_does_not_keep_the_run_from_ending() -> None:
    run = simulated(ob.FixedMinibatch(batch=64), ob.faults.Hang(1, at_seconds=20, seconds=100_000))
    assert run.summary.seconds < 2_000
    assert run.summary.samples >= 60_000


@pytest.mark.parametrize("seconds", [100.0, 100_000.0])
def test_peers_train_and_end_without_one_that_hangs(seconds: float) -> None:
    cluster = ob.Cluster(seconds_per_sample=0.02, faults=(ob.faults.Hang(1, at_seconds=20, seconds=seconds),))
    run = ob.simulate(ob.workloads.Quadratic(), ob.Gossip(batch=16), cluster, workers=4, until=20_000)
    assert run.summary.samples >= 20_000
    assert run.summary.seconds < 400
    texts = [notice.text for notice in of_kind(run.records, Notice)]
    assert any("the computation of peer 1 has not ended" in text for text in texts) == (seconds > 1000)


def test_the_only_worker_is_waited_for() -> None:
    cluster = ob.Cluster(seconds_per_sample=0.02, faults=(HANG,))
    run = ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(batch=64), cluster, workers=1, until=5_000)
    assert not list(of_kind(run.records, Notice))
    assert not changes(run, 1)


def test_limits_follow_from_peers_from_the_rank_itself_and_from_the_least_seconds() -> None:
    detector = HangDetector(factor=10.0, seconds_min=30.0)
    for rank, seconds in ((1, 2.0), (2, 4.0), (3, 9.0)):
        detector.sent(rank, 100.0)
        detector.sent(rank, 101.0)  # does not begin the round anew
        assert detector.answered(rank, 100.0 + seconds) is None, "it was not announced"
    assert detector.limit(1, {1, 2, 3}) == 65.0, "ten times the median of 4 and 9"
    assert detector.limit(3, {1, 2, 3}) == 30.0, "at least the least seconds"
    assert detector.limit(3, {3}) is None, "no peer to compare it with"
    detector.sent(3, 200.0)
    detector.answered(3, 300.0)
    assert detector.limit(3, {1, 2, 3}) == 200.0, "twice its own last round"
    assert LOST_FACTOR > 1, "announced before it is lost"


@pytest.mark.parametrize("strategy", [ob.FixedMinibatch, ob.LocalSGD, ob.Population, ob.Gossip])
def test_negative_limits_are_refused(strategy: type[ob.Strategy]) -> None:
    limits = [item.name for item in dataclasses.fields(strategy) if item.name in ("hang_factor", "hang_seconds")]
    assert "hang_seconds" in limits
    for name in limits:
        with pytest.raises(ob.ConfigurationError, match=f"{name} .*-1"):
            strategy(**{name: -1.0})
