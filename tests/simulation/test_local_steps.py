"""Local steps: what each algorithm of the family does, and which settings make two algorithms equal."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import pytest
import torch
from scenes import Scene, play
from torch import Tensor

import offbeat as ob
from offbeat.core.examples import Order
from offbeat.core.wire_size import HEAD_BYTES
from offbeat.engine.gradient_computer import GradientComputer, GradientRequest
from offbeat.records.schema import Dropped, Membership, Round, Traffic, Update
from offbeat.strategies.local_steps_worker import LocalStepsWorker

UNEVEN = ob.Cluster(seconds_per_sample=0.01, factors=(1.0, 1.7), straggle=ob.stragglers.Lognormal(0.3))
SLOW_LINK = ob.Cluster(seconds_per_sample=0.001, link=ob.Link(latency_seconds=0.05))
MOMENTUM = ob.SGD(lr=0.05, momentum=0.9, weight_decay=1e-3)


def digits() -> ob.Workload:
    return ob.workloads.DigitsLogistic().build()


def final(scene: Scene) -> Tensor:
    assert scene.outcome.failure is None
    return scene.outcome.finishes[0].parameters


def fixed(optimizer: ob.nodes.Optimizer, cluster: ob.Cluster = UNEVEN) -> Tensor:
    return final(play(ob.FixedMinibatch(batch=32, optimizer=optimizer), digits(), cluster=cluster, until=UNTIL))


UNTIL = ob.Samples(3 * 32 * 25)


@pytest.mark.parametrize("optimizer", [ob.SGD(lr=0.1), MOMENTUM, ob.Adam(lr=1e-3)])
def test_delayed_exchange_of_every_gradient_without_a_delay_is_fixed_minibatch(optimizer: ob.nodes.Optimizer) -> None:
    strategy = ob.DelayedExchange(every=1, delay=0, batch=32, optimizer=optimizer)
    scene = play(strategy, digits(), cluster=UNEVEN, until=UNTIL)
    torch.testing.assert_close(final(scene), fixed(optimizer), rtol=1e-4, atol=1e-6)
    assert len(scene.of(Update)) == 25


@pytest.mark.parametrize("optimizer", [ob.SGD(lr=0.1), MOMENTUM])
def test_local_sgd_that_averages_every_step_is_fixed_minibatch(optimizer: ob.nodes.Optimizer) -> None:
    scene = play(ob.LocalSGD(every=1, batch=32, optimizer=optimizer), digits(), cluster=UNEVEN, until=UNTIL)
    torch.testing.assert_close(final(scene), fixed(optimizer), rtol=1e-4, atol=1e-6)


def test_delayed_exchange_of_differences_every_step_is_fixed_minibatch() -> None:
    strategy = ob.DelayedExchange(every=1, delay=0, batch=32, send=ob.parts.Differences(), optimizer=MOMENTUM)
    scene = play(strategy, digits(), cluster=UNEVEN, until=UNTIL)
    torch.testing.assert_close(final(scene), fixed(MOMENTUM), rtol=1e-4, atol=1e-6)


def test_diloco_with_a_plain_outer_step_is_local_sgd_to_the_last_bit() -> None:
    inner, outer = ob.AdamW(lr=1e-2), ob.SGD(lr=1.0, momentum=0.0)
    diloco = play(ob.DiLoCo(every=5, batch=32, inner=inner, outer=outer), digits(), cluster=UNEVEN, until=UNTIL)
    local = play(ob.LocalSGD(every=5, batch=32, optimizer=inner), digits(), cluster=UNEVEN, until=UNTIL)
    assert torch.equal(final(diloco), final(local))
    momentum = ob.DiLoCo(every=5, batch=32, inner=inner)
    assert not torch.equal(final(play(momentum, digits(), cluster=UNEVEN, until=UNTIL)), final(local))


def test_a_step_counts_the_schedule_of_the_learning_rate_in_samples_of_the_whole_run() -> None:
    falling = ob.SGD(lr=ob.schedules.Linear(start=0.2, end=0.0, samples=UNTIL.count))
    scene = play(ob.LocalSGD(every=1, batch=32, optimizer=falling), digits(), cluster=UNEVEN, until=UNTIL)
    torch.testing.assert_close(final(scene), fixed(falling), rtol=1e-4, atol=1e-6)


# Delay


@pytest.mark.parametrize(("every", "delay"), [(4, 2), (2, 5), (1, 3)])
def test_a_result_that_is_applied_at_a_fixed_step_does_not_depend_on_the_network(every: int, delay: int) -> None:
    strategy = ob.DelayedExchange(every=every, delay=delay, batch=16, send=ob.parts.Differences(), optimizer=MOMENTUM)
    even = ob.Cluster(seconds_per_sample=0.01)
    slow_link = dataclasses.replace(even, link=ob.Link(latency_seconds=0.03))
    runs = [play(strategy, digits(), cluster=cluster, until=UNTIL) for cluster in (even, slow_link)]
    assert torch.equal(final(runs[0]), final(runs[1]))


def test_with_a_delay_no_worker_waits_for_the_network_and_without_one_all_wait() -> None:
    def idle_seconds(delay: int) -> float:
        strategy = ob.DelayedExchange(every=10, delay=delay, batch=16)
        scene = play(strategy, digits(), cluster=SLOW_LINK, until=ob.Samples(5000))
        begun = [round for round in scene.of(Round) if round.start > 0.1]
        return sum(round.idle_seconds for round in begun)

    assert idle_seconds(delay=8) == pytest.approx(0.0, abs=1e-9)
    assert idle_seconds(delay=0) > 0.1 * 10


# Different initial parameters


def offsets(scene: Scene) -> list[Tensor]:
    nodes = [cast(LocalStepsWorker, process.node) for process in scene.simulation.processes[1:]]
    return [torch.zeros(650) if node._offset is None else node._offset for node in nodes]


def shuffled(send: ob.parts.Content, every: int = 1, delay: int = 0) -> ob.DelayedExchange:
    optimizer, initial = ob.SGD(lr=0.1), ob.parts.Shuffled()
    return ob.DelayedExchange(every=every, delay=delay, batch=32, send=send, initial=initial, optimizer=optimizer)


@pytest.mark.parametrize("send", [ob.parts.Gradients(), ob.parts.Differences()])
def test_replicas_that_begin_apart_share_the_displacement_by_their_mean_gradient(send: ob.parts.Content) -> None:
    workload = digits()
    scene = play(shuffled(send), workload, cluster=UNEVEN, until=UNTIL)
    computer = GradientComputer(workload, seed=0)
    orders = [Order(np.arange(len(workload.train)), 0, rank) for rank in (1, 2, 3)]
    reference = computer.flat.parameters.clone()
    for first in range(0, 25 * 32, 32):
        total = torch.zeros_like(reference)
        for rank, (order, offset) in enumerate(zip(orders, offsets(scene), strict=True), start=1):
            request = GradientRequest(order, first, 32, 32, (0, rank))
            total += computer.gradient(reference + offset, (), request).gradient
        reference -= 0.1 * total / (3 * 32)
    torch.testing.assert_close(final(scene), reference, rtol=1e-4, atol=1e-6)


def test_what_replicas_differ_by_at_the_start_stays_and_the_result_is_that_of_the_first_worker() -> None:
    scene = play(shuffled(ob.parts.Differences(), every=3, delay=2), digits(), cluster=SLOW_LINK, until=UNTIL)
    first, second, third = offsets(scene)
    assert not first.any()
    assert len({float(offset.abs().sum()) for offset in (first, second, third)}) == 3
    model = torch.cat([parameter.detach().flatten() for parameter in digits().initial_model(0).parameters()])
    torch.testing.assert_close((model + second).sort().values, model.sort().values)
    nodes = [cast(LocalStepsWorker, process.node) for process in scene.simulation.processes[1:]]
    applied = [node._fragments[0] for node in nodes]
    assert [fragment.version for fragment in applied] == [8, 8, 8]
    for fragment, offset in zip(applied, (first, second, third), strict=True):
        torch.testing.assert_close(fragment.anchor - offset, applied[0].anchor, rtol=0.0, atol=1e-6)


def test_a_worker_that_crashes_continues_with_its_own_replica() -> None:
    crash = ob.faults.Crash(2, 1.0, back_after_seconds=0.5)
    cluster = ob.Cluster(seconds_per_sample=0.005, faults=(crash,))
    with_crash = play(shuffled(ob.parts.Differences()), digits(), cluster=cluster, until=UNTIL)
    without = play(shuffled(ob.parts.Differences()), digits(), until=UNTIL)
    assert [m.peer for m in with_crash.of(Membership) if m.joined].count(2) == 2
    assert torch.equal(offsets(with_crash)[1], offsets(without)[1])
    assert with_crash.outcome.failure is None


# Staleness


def test_gradients_from_before_a_delay_are_recorded_as_stale() -> None:
    scene = play(ob.DelayedExchange(every=2, delay=2, batch=16), digits(), cluster=SLOW_LINK, until=ob.Samples(4000))
    assert {part.staleness for update in scene.of(Update)[2:] for part in update.contributions} <= {1, 2}
    fresh = play(ob.LocalSGD(every=2, batch=16), digits(), cluster=SLOW_LINK, until=ob.Samples(4000))
    assert {part.staleness for update in fresh.of(Update) for part in update.contributions} == {0}


# Decoupled DiLoCo

SLOW_ONE = ob.Cluster(seconds_per_sample=0.01, factors=(8.0,))


def decoupled(**fields: object) -> ob.DecoupledDiLoCo:
    settings = {"every": 8, "fragments": 4, "batch": 8, "inner": ob.SGD(lr=0.05), **fields}
    return ob.DecoupledDiLoCo(**settings)  # type: ignore[arg-type]


def test_no_worker_waits_for_a_slow_worker_or_for_a_link() -> None:
    slow_link = dataclasses.replace(SLOW_ONE, link=ob.Link(latency_seconds=0.5))
    scene = play(decoupled(), digits(), cluster=slow_link, workers=4, until=ob.Samples(4000))
    assert all(round.idle_seconds == 0 for round in scene.of(Round) if round.draws[0] > 0)
    shares = {rank: sum(r.samples for r in scene.of(Round) if r.rank == rank) for rank in (1, 2)}
    assert shares[2] > 6 * shares[1]


@pytest.mark.slow
def test_a_merge_needs_a_quorum_and_the_grace_window_admits_others() -> None:
    cluster = ob.Cluster(seconds_per_sample=0.01, factors=(1.0, 1.05, 1.1, 1.15))

    def messages(**fields: object) -> list[int]:
        scene = play(decoupled(**fields), digits(), cluster=cluster, workers=4, until=ob.Samples(6000))
        return [update.messages for update in scene.of(Update)]

    none, some = messages(quorum=2, grace=0.0), messages(quorum=2, grace=0.5)
    assert set(none) == {2}
    assert sum(some) / len(some) > 3
    assert min(messages(quorum=4, grace=0.0)) >= 4


def test_a_quorum_is_no_more_than_the_connected_workers() -> None:
    cluster = dataclasses.replace(
        SLOW_ONE, faults=(ob.faults.Crash(1, 2.0), ob.faults.Crash(2, 3.0)), crash_seen_seconds=0.1
    )
    scene = play(decoupled(quorum=4), digits(), cluster=cluster, workers=4, until=ob.Samples(3000))
    assert scene.outcome.failure is None
    assert len([change for change in scene.of(Membership) if not change.joined and change.at < 4]) == 2


def test_fragments_are_sent_in_turn_and_a_draw_counts_when_all_are_sent() -> None:
    cluster = ob.Cluster(seconds_per_sample=0.01)
    whole = play(decoupled(fragments=1, quorum=2), digits(), cluster=cluster, workers=2, until=ob.Samples(2048))
    parts = play(decoupled(fragments=4, quorum=2), digits(), cluster=cluster, workers=2, until=ob.Samples(2048))
    assert len(parts.of(Update)) > 3 * len(whole.of(Update))
    sizes = [scene.of(Traffic)[-1].sent["LocalDelta"] for scene in (whole, parts)]
    per_message = [flow.bytes / flow.messages - HEAD_BYTES for flow in sizes]
    assert per_message[0] > 3.5 * per_message[1]
    assert [update.samples for update in parts.of(Update)[:3]] == [0, 0, 0]
    assert whole.of(Update)[0].samples == 2 * 8 * 8


@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_updates_from_the_hub_change_nothing_for_a_single_worker(fragments: int) -> None:
    """With a plain outer step, the merged values of a single worker are its own."""
    cluster = ob.Cluster(seconds_per_sample=0.01, link=ob.Link(latency_seconds=0.13))
    strategy = decoupled(inner=MOMENTUM, outer=ob.SGD(lr=1.0), every=4, batch=16, fragments=fragments)
    scene = play(strategy, digits(), cluster=cluster, workers=1, until=ob.Samples(16 * 40))
    replica = scene.simulation.processes[1].node.replica()
    assert replica is not None
    steps = len([round for round in scene.of(Round) if round.samples == 16]) - 1  # the last one arrived after the end
    torch.testing.assert_close(replica, _trained_alone(steps), rtol=1e-4, atol=1e-5)


def _trained_alone(steps: int) -> Tensor:
    strategy = ob.LocalSGD(every=steps, batch=16, optimizer=MOMENTUM)
    return final(play(strategy, digits(), workers=1, until=ob.Samples(16 * steps)))


@pytest.mark.slow
@pytest.mark.parametrize("fragments", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_worker_without_answers_skips_exchanges(fragments: int) -> None:
    cluster = ob.Cluster(seconds_per_sample=0.01, factors=(100.0,))
    strategy = decoupled(quorum=2, fragments=fragments)
    scene = play(strategy, digits(), cluster=cluster, workers=2, until=ob.Seconds(300.0))
    fast = cast(LocalStepsWorker, scene.simulation.processes[2].node)
    assert fast._steps > 1000
    assert all(len(fragment.unmerged) <= strategy.in_flight_max for fragment in fast._fragments)


# Faults


@pytest.mark.parametrize("name", ["local-sgd", "diloco", "delayed-exchange", "decoupled-diloco"])
def test_a_worker_that_joins_again_begins_with_the_parameters_of_the_hub(name: str) -> None:
    faults = (ob.faults.Crash(2, 1.0, back_after_seconds=1.0),)
    cluster = ob.Cluster(seconds_per_sample=0.005, faults=faults, crash_seen_seconds=0.1)
    strategy = dataclasses.replace(ob.Strategy.members[name](), every=4, batch=8)
    scene = play(strategy, digits(), cluster=cluster, until=ob.Samples(6000))
    assert scene.outcome.failure is None
    assert [change.joined for change in scene.of(Membership) if change.peer == 2][:3] == [True, False, True]


@pytest.mark.parametrize("name", ["local-sgd", "decoupled-diloco"])
def test_gradients_that_are_not_finite_are_dropped_and_too_many_fail_the_run(name: str) -> None:
    strategy = dataclasses.replace(ob.Strategy.members[name](), every=4, batch=8)
    some = ob.Cluster(seconds_per_sample=0.01, faults=(ob.faults.Corrupt(1, 1.0, 0.2),))
    scene = play(strategy, digits(), cluster=some, until=ob.Samples(3000))
    assert scene.outcome.failure is None
    assert {dropped.reason for dropped in scene.of(Dropped) if dropped.rank == 1} >= {"nonfinite"}
    for_long = ob.Cluster(seconds_per_sample=0.01, faults=(ob.faults.Corrupt(1, 1.0, 100.0),))
    failed = play(strategy, digits(), cluster=for_long, until=ob.Samples(30_000))
    assert failed.outcome.failure is not None
    assert "worker 1 reported 5 gradients in a row that were not finite" in failed.outcome.failure


def test_parameters_that_diverge_are_not_merged() -> None:
    """A step that makes the parameters overflow can have a finite gradient; it must not reach the hub."""
    strategy = ob.LocalSGD(every=2, batch=8, optimizer=ob.SGD(lr=1e38))
    scene = play(strategy, digits(), until=ob.Samples(1000))
    assert scene.outcome.failure is not None
    assert torch.isfinite(scene.outcome.finishes[0].parameters).all()


@pytest.mark.parametrize("every", [1, 3])
def test_parameters_that_diverge_repeatedly_fail_the_run(every: int) -> None:
    strategy = ob.LocalSGD(every=every, batch=8, optimizer=ob.SGD(lr=3e38))
    scene = play(strategy, digits(), until=ob.Samples(5000))
    assert scene.outcome.failure is not None
    assert "gradients in a row that were not finite" in scene.outcome.failure


def test_a_quorum_of_one_does_not_wait_for_the_other_worker() -> None:
    cluster = ob.Cluster(seconds_per_sample=0.01, factors=(1e6,))
    strategy = decoupled(quorum=1, in_flight_max=1)
    scene = play(strategy, digits(), cluster=cluster, workers=2, until=ob.Seconds(60.0))
    assert len(scene.of(Update)) > 100


def test_a_small_quorum_does_not_make_steps_larger() -> None:
    """Two changes merged one after the other move the parameters as far as two merged together."""
    cluster = ob.Cluster(seconds_per_sample=0.01)
    plain = {"inner": ob.SGD(lr=0.01), "outer": ob.SGD(lr=1.0), "fragments": 1, "every": 4, "grace": 0.0}

    def total_step(quorum: int, merges: int) -> Tensor:
        until = ob.Samples(2 * 4 * 8)
        scene = play(decoupled(**plain, quorum=quorum), digits(), cluster=cluster, workers=2, until=until)
        assert len(scene.of(Update)) == merges
        return final(scene) - scene.simulation.initial

    torch.testing.assert_close(total_step(quorum=1, merges=2), total_step(quorum=2, merges=1), rtol=1e-3, atol=1e-6)


def test_a_user_can_step_an_optimizer_of_their_own() -> None:
    strategy = ob.LocalSGD(every=5, batch=16)
    scene = play(strategy, digits(), user_optimizer=ob.SGD(lr=0.1), until=ob.Samples(6000), workers=2)
    expected = play(
        dataclasses.replace(strategy, optimizer=ob.SGD(lr=0.1)), digits(), until=ob.Samples(6000), workers=2
    )
    torch.testing.assert_close(final(scene), final(expected), rtol=1e-4, atol=1e-6)


def test_a_run_with_fewer_steps_than_every_has_one_exchange_at_its_end() -> None:
    scene = play(ob.LocalSGD(every=1000, batch=10), digits(), workers=2, until=ob.Samples(200))
    assert [update.samples for update in scene.of(Update)] == [200]


def test_settings_that_exclude_each_other_are_refused_in_a_sentence() -> None:
    with pytest.raises(ob.ConfigurationError, match="fragments cannot all be sent in 2 steps"):
        ob.DecoupledDiLoCo(every=2, fragments=3)
    with pytest.raises(ob.ConfigurationError, match=r"LocalSGD.every must be greater than 0"):
        ob.LocalSGD(every=0)
    with pytest.raises(ob.ConfigurationError, match="a quorum of 9 among 3 workers"):
        ob.DecoupledDiLoCo(quorum=9).processes(3)
    with pytest.raises(ob.ConfigurationError, match="650 parameters cannot be sent in 700 fragments"):
        play(ob.DecoupledDiLoCo(every=700, fragments=700), digits())
    with pytest.raises(ob.ConfigurationError, match="gradients are sent in one piece"):
        ob.LocalSteps(content=ob.parts.Gradients(), fragments=2)
