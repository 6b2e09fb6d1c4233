"""What each parameter-server algorithm does, as its records show."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from scenes import NAMES, play, quadratic

import offbeat as ob
from offbeat.records.schema import Dropped, Evaluation, Notice, Round, Update

STRAGGLING = ob.Cluster(seconds_per_sample=0.01, straggle=ob.stragglers.Mixture(((0.0, 0.0, 0.7), (1.0, 0.3, 0.3))))


def test_fixed_minibatch_waits_for_all_workers() -> None:
    scene = play(ob.FixedMinibatch(batch=20), cluster=STRAGGLING, workers=4)
    for update in scene.of(Update):
        assert [part.rank for part in update.contributions] == [1, 2, 3, 4]
        assert {part.stop - part.first for part in update.contributions} == {20}


def test_slow_workers_contribute_less_to_anytime_minibatch() -> None:
    cluster = ob.Cluster(seconds_per_sample=0.01, factors=(1.0, 3.0))
    scene = play(ob.AnytimeMinibatch(batch=60, microbatch=4), cluster=cluster, workers=2, until=ob.Samples(12_000))
    fast, slow = (statistics.mean(r.samples for r in scene.of(Round)[20:] if r.rank == rank) for rank in (1, 2))
    assert 2.5 < fast / slow < 3.5


def test_a_worker_that_reaches_samples_max_reports_it_once() -> None:
    strategy = ob.AnytimeMinibatch(seconds=1.0, samples_max=32)
    scene = play(strategy, cluster=ob.Cluster(seconds_per_sample=0.01), workers=2)
    notices = scene.of(Notice)
    assert [notice.rank for notice in notices] == [1, 2]
    assert "samples_max = 32" in notices[0].text


def test_async_fixed_updates_on_every_kth_message_and_no_worker_waits() -> None:
    scene = play(ob.AsyncFixed(batch=10, messages=3), cluster=STRAGGLING, workers=5)
    assert {update.messages for update in scene.of(Update)} == {3}
    assert all(round.idle_seconds == 0 for round in scene.of(Round))
    assert max(part.staleness for update in scene.of(Update) for part in update.contributions) > 0


def test_async_fixed_takes_as_many_messages_as_there_are_workers_by_default() -> None:
    scene = play(ob.AsyncFixed(batch=10), cluster=STRAGGLING, workers=5)
    assert {update.messages for update in scene.of(Update)} == {5}


def test_async_timed_updates_at_fixed_times_even_if_updates_take_long() -> None:
    cluster = ob.Cluster(seconds_per_sample=0.01, seconds_per_update=0.3)
    scene = play(ob.AsyncTimed(worker_seconds=0.4, hub_seconds=0.5), cluster=cluster, until=ob.Samples(10_000))
    times = [update.at for update in scene.of(Update)]
    assert [later - sooner for sooner, later in itertools.pairwise(times)] == pytest.approx([0.5] * (len(times) - 1))


def test_apam_updates_on_every_gradient_and_answers_its_sender_alone() -> None:
    scene = play(ob.AsyncAdaptive(batch=10), cluster=ob.Cluster(seconds_per_sample=0.01), workers=4)
    assert {update.messages for update in scene.of(Update)} == {1}
    staleness = [update.contributions[0].staleness for update in scene.of(Update)][4:]
    assert set(staleness) == {3}, "with equal speeds, the three others have updated in between"
    # One message each way per round, besides the welcome, Stop and Stopped of each worker.
    assert scene.simulation.delivery.traffic.messages_sent == pytest.approx(2 * len(scene.of(Round)) + 4, abs=8)


def test_apam_uses_amsgrad_at_the_learning_rate_that_suits_the_workload() -> None:
    assert ob.AsyncAdaptive().with_default_optimizer(ob.Adam(lr=0.02)).optimizer == ob.AMSGrad(lr=0.02)
    assert ob.AsyncAdaptive(optimizer=ob.SGD(lr=0.1)).with_default_optimizer(ob.Adam()).optimizer == ob.SGD(lr=0.1)


def test_sync_amsgrad_splits_one_batch_as_evenly_as_possible() -> None:
    scene = play(ob.SyncAdaptive(batch=64), workers=3, until=ob.Samples(640))
    for update in scene.of(Update):
        assert [part.stop - part.first for part in update.contributions] == [22, 21, 21]


def test_k_of_n_updates_with_the_first_k_gradients_and_drops_late_ones() -> None:
    cluster = ob.Cluster(seconds_per_sample=0.01, factors=(1.0, 1.1, 1.2, 2.5))
    scene = play(ob.BackupWorkers(batch=20, k=3), cluster=cluster, workers=4, until=ob.Samples(6000))
    assert {update.messages for update in scene.of(Update)} == {3}
    late = [record for record in scene.of(Dropped) if record.reason == "late"]
    assert late
    assert {record.rank for record in late} == {4}


def test_k_of_n_waits_for_eight_of_ten_by_default_and_refuses_more_than_all_workers() -> None:
    scene = play(ob.BackupWorkers(batch=4), cluster=STRAGGLING, workers=10, until=ob.Samples(400))
    assert {update.messages for update in scene.of(Update)} == {8}
    with pytest.raises(ob.ConfigurationError, match="k = 5 of 3 workers"):
        play(ob.BackupWorkers(k=5), workers=3)


@pytest.mark.parametrize("strategy", [ob.AsyncFixed(batch=10, messages=1, staleness_max=2)])
def test_gradients_staler_than_the_bound_are_dropped_and_counted(strategy: ob.Strategy) -> None:
    cluster = ob.Cluster(seconds_per_sample=0.01, factors=(1.0, 1.0, 8.0))
    scene = play(strategy, cluster=cluster, until=ob.Samples(3000))
    stale = [record for record in scene.of(Dropped) if record.reason == "stale"]
    assert stale
    assert all(record.staleness > 2 for record in stale)


def test_a_waiting_worker_whose_gradient_was_too_stale_gets_new_parameters() -> None:
    cluster = ob.Cluster(seconds_per_sample=0.01, factors=(1.0, 1.0, 8.0))
    scene = play(ob.AsyncAdaptive(batch=10, staleness_max=2), cluster=cluster, until=ob.Samples(3000))
    assert [record.rank for record in scene.of(Dropped) if record.reason == "stale"].count(3) > 3


def test_batch_statistics_are_sent_and_merged_by_samples() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(256, 4) * 3 + 5
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    workload = ob.Workload(
        model, lambda out, y: (out.squeeze(1) - y).square(), (inputs, inputs.sum(1)), optimizer=ob.SGD(lr=1e-3)
    )
    scene = play(ob.FixedMinibatch(batch=64, microbatch=64), workload, until=ob.Samples(64 * 3 * 60))
    finish = scene.outcome.finishes[0]
    flat = scene.simulation.gradient_computer.flat
    flat.load(finish.parameters, finish.buffers)
    norm = flat.module[1]
    with torch.no_grad():
        expected = flat.module[0](inputs).mean(0)
    torch.testing.assert_close(norm.running_mean, expected, rtol=0.1, atol=0.2)
    assert int(norm.num_batches_tracked) == 180, "counters add: three workers, sixty updates"


def test_evaluation_follows_its_cadence() -> None:
    every_fifth = play(ob.FixedMinibatch(batch=10), evaluate=ob.EveryUpdates(5), until=ob.Samples(600))
    assert [e.version for e in every_fifth.of(Evaluation)] == [0, 5, 10, 15, 20]
    timed = play(ob.FixedMinibatch(batch=10), evaluate=ob.EverySeconds(1.0), until=ob.Samples(600))
    gaps = [b.at - a.at for a, b in itertools.pairwise(timed.of(Evaluation)[:-1])]
    assert all(gap >= 1.0 for gap in gaps)
    assert timed.of(Evaluation)[-1].version == timed.of(Update)[-1].version, "the result is always evaluated"


def test_training_can_end_after_a_number_of_seconds() -> None:
    scene = play(ob.AsyncTimed(worker_seconds=0.5, hub_seconds=0.5), until=ob.Seconds(20.0))
    assert 20.0 <= scene.outcome.seconds < 22.0


def test_learning_rates_follow_the_samples_of_the_whole_run() -> None:
    schedule = ob.schedules.Linear(start=0.1, end=0.0, samples=600)
    scene = play(ob.FixedMinibatch(batch=20, optimizer=ob.SGD(lr=schedule)), until=ob.Samples(600))
    rates = [update.learning_rate for update in scene.of(Update)]
    assert rates == pytest.approx([0.1 * (1 - i / 10) for i in range(10)])


def test_data_can_be_sharded_by_label() -> None:
    workload = ob.workloads.Digits(split=ob.workloads.ByLabel(labels=1)).build()
    scene = play(ob.FixedMinibatch(batch=32), workload, workers=10, until=ob.Samples(3200))
    seen = []
    for rank in range(1, 11):
        indices = workload.split.indices(workload.train.targets, rank - 1, 10, 0)
        seen.append(set(workload.train.targets[torch.from_numpy(indices)].tolist()))
    assert all(len(labels) <= 3 for labels in seen)
    assert set().union(*seen) == set(range(10))
    assert scene.outcome.failure is None


FEW = ("fmb", "amb", "async-timed", "apam")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in NAMES])
def test_every_strategy_lowers_the_loss(name: str) -> None:
    strategy = ob.Strategy.members[name]()
    scene = play(strategy, quadratic(), cluster=STRAGGLING, evaluate=ob.EveryUpdates(), until=ob.Samples(40_000))
    losses = [evaluation.loss for evaluation in scene.of(Evaluation)]
    assert losses[-1] < 0.2 * losses[0]
