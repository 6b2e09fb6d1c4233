"""Faults: crashes, pauses, partitions, workers that join again, and gradients that are not finite."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from scenes import HUB_NAMES, NAMES, Scene, play

import offbeat as ob
from offbeat.cluster.faults import RankFault
from offbeat.core.wire_size import HEAD_BYTES
from offbeat.records.schema import Dropped, Membership, Round, Update

SPEED = 0.01


def with_faults(
    *faults: ob.faults.Crash | ob.faults.Pause | ob.faults.Partition | ob.faults.Corrupt, **settings: object
) -> ob.Cluster:
    return ob.Cluster(seconds_per_sample=SPEED, faults=faults, **settings)


FEW = ("fmb", "async-fmb", "local-sgd", "population", "gossip")
"""One of each family; `make test-slow` has the others."""
EACH = [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in NAMES]


def ranks_of_last(scene: Scene, count: int = 3) -> set[int]:
    return {part.rank for update in scene.of(Update)[-count:] for part in update.contributions}


def changes_at_rank_0(scene: Scene) -> list[Membership]:
    return [membership for membership in scene.of(Membership) if membership.rank == 0]


@pytest.mark.parametrize("name", EACH)
def test_training_continues_without_a_lost_worker(name: str) -> None:
    scene = play(ob.Strategy.members[name](), cluster=with_faults(ob.faults.Crash(2, 1.0)), until=ob.Samples(20_000))
    assert scene.outcome.failure is None
    assert ranks_of_last(scene) == set(scene.simulation.computing_ranks) - {2}
    assert [(m.peer, m.joined) for m in changes_at_rank_0(scene) if not m.joined] == [(2, False)]


@pytest.mark.parametrize("name", EACH)
def test_a_worker_that_joins_again_repeats_lost_samples_and_skips_none(name: str) -> None:
    scene = play(
        ob.Strategy.members[name](batch=16) if name != "async-timed" else ob.AsyncTimed(worker_seconds=0.2),
        cluster=with_faults(ob.faults.Crash(2, 1.0, back_after_seconds=3.0)),
        until=ob.Samples(8_000),
    )
    assert 2 in ranks_of_last(scene)
    joins = [m.incarnation for m in changes_at_rank_0(scene) if m.peer == 2 and m.joined]
    assert joins == [0, 1]
    positions = [r.draws for r in scene.of(Round) if r.rank == 2]
    assert all(later[0] <= sooner[1] for sooner, later in itertools.pairwise(positions)), "nothing was skipped"


def test_samples_in_flight_at_a_crash_are_computed_again() -> None:
    link = ob.Link(latency_seconds=0.1, bytes_per_second=5500.0)
    cluster = with_faults(ob.faults.Crash(2, 1.0, back_after_seconds=3.0), link=link)
    scene = play(ob.AsyncFixed(batch=8), cluster=cluster)
    draws = [r.draws for r in scene.of(Round) if r.rank == 2]
    repeated = [pair for pair in set(draws) if draws.count(pair) > 1]
    assert repeated, "the invariants of the scene say that they were applied once all the same"


def test_a_short_pause_has_no_effect_and_after_a_long_one_the_worker_is_lost() -> None:
    short = play(ob.FixedMinibatch(batch=16), cluster=with_faults(ob.faults.Pause(1, 1.0, 5.0)))
    assert all(m.joined for m in short.of(Membership))
    assert max(r.seconds for r in short.of(Round)) > 5.0

    long = play(ob.FixedMinibatch(batch=16), cluster=with_faults(ob.faults.Pause(1, 1.0, 30.0)), until=ob.Samples(9000))
    assert [m.joined for m in long.of(Membership) if m.peer == 1] == [True, False, True]
    assert ranks_of_last(long) == {1, 2, 3}


def test_asynchronous_strategies_continue_while_a_worker_is_paused() -> None:
    scene = play(ob.AsyncFixed(batch=16, messages=1), cluster=with_faults(ob.faults.Pause(1, 1.0, 8.0)))
    meanwhile = [update for update in scene.of(Update) if 1.5 < update.at < 9.0]
    assert len(meanwhile) > 50


def test_a_partition_delays_messages_and_a_long_one_breaks_the_link() -> None:
    short = play(ob.FixedMinibatch(batch=16), cluster=with_faults(ob.faults.Partition((1,), 1.0, 5.0)))
    assert all(m.joined for m in short.of(Membership))
    long = play(ob.FixedMinibatch(batch=16), cluster=with_faults(ob.faults.Partition((1, 2), 1.0, 20.0)))
    assert sorted(m.peer for m in long.of(Membership) if not m.joined) == [1, 2]


def test_workers_that_lose_the_hub_for_good_fail_with_a_sentence() -> None:
    scene = play(ob.FixedMinibatch(patience_seconds=30.0), cluster=with_faults(ob.faults.Crash(0, 1.0)), checked=False)
    assert scene.outcome.failure is not None
    assert scene.outcome.failure.startswith("worker 1 had no link to the hub for 30 s (patience_seconds); ")
    assert scene.outcome.seconds == pytest.approx(32.0)


def test_a_hub_that_loses_every_worker_for_good_fails_with_a_sentence() -> None:
    crashes = with_faults(ob.faults.Crash(1, 1.0), ob.faults.Crash(2, 1.5), ob.faults.Crash(3, 2.0))
    scene = play(ob.AsyncFixed(), cluster=crashes)
    assert scene.outcome.failure is not None
    assert "every worker was lost" in scene.outcome.failure


def test_a_gradient_that_is_not_finite_is_dropped_and_the_run_continues() -> None:
    scene = play(ob.FixedMinibatch(batch=16), cluster=with_faults(ob.faults.Corrupt(2, 1.0, 0.3)))
    dropped = scene.of(Dropped)
    assert {(record.rank, record.reason) for record in dropped} == {(2, "nonfinite")}
    assert scene.outcome.failure is None
    assert torch.isfinite(scene.outcome.finishes[0].parameters).all()


@pytest.mark.parametrize("name", [name for name in HUB_NAMES if name != "population"])
def test_too_many_nonfinite_gradients_in_a_row_fail_the_run_and_name_the_rank(name: str) -> None:
    scene = play(ob.Strategy.members[name](nonfinite_max=3), cluster=with_faults(ob.faults.Corrupt(2, 0.0, 1e9)))
    assert scene.outcome.failure is not None
    assert "worker 2 reported 3 gradients in a row that were not finite" in scene.outcome.failure


def test_workers_continue_after_a_round_in_which_no_gradient_is_finite() -> None:
    spans = [ob.faults.Corrupt(rank, 1.0, 0.4) for rank in (1, 2, 3)]
    scene = play(ob.FixedMinibatch(batch=16), cluster=with_faults(*spans))
    assert scene.outcome.failure is None
    assert len({record.rank for record in scene.of(Dropped)}) == 3


def test_messages_may_overtake_one_another() -> None:
    cluster = ob.Cluster(seconds_per_sample=SPEED, link=ob.Link(delay_std_seconds=0.5))
    scene = play(ob.AsyncFixed(batch=8, messages=2), cluster=cluster, until=ob.Samples(4000))
    versions = [r.version for r in scene.of(Round) if r.rank == 1]
    assert versions == sorted(versions)


def test_on_a_slow_link_parameters_are_superseded_and_the_worker_waits() -> None:
    link = ob.Link(bytes_per_second=4400.0)
    cluster = ob.Cluster(seconds_per_sample=1e-4, link=link)
    scene = play(ob.AsyncFixed(batch=8, messages=1, in_flight_max=2), cluster=cluster, until=ob.Samples(2000))
    assert max(r.idle_seconds for r in scene.of(Round)) > 0, "the link is the bottleneck"
    assert all(r.send_seconds == pytest.approx((HEAD_BYTES + 32) / 4400.0) for r in scene.of(Round)[20:])
    used = {r.version for r in scene.of(Round) if r.rank == 1}
    assert max(used) > len(used), "superseded versions are never used"


@dataclass(frozen=True)
class Overheat(RankFault):
    """A fault that the simulator has no case for."""


def test_a_fault_without_a_case_in_the_simulator_is_refused() -> None:
    with pytest.raises(ob.RunFailed, match="internal error: Overheat has no case"):
        play(ob.AsyncFixed(), cluster=ob.Cluster(faults=(Overheat(1, 1.0),)))
