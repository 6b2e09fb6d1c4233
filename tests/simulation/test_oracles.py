"""Strategies against references: a plain loop, updates computed by hand, published figures."""

from __future__ import annotations

import math

import pytest
import torch
from scenes import play, quadratic

import offbeat as ob
from offbeat.core.examples import Order
from offbeat.records.schema import Round, Update

OPTIMIZERS = {
    "sgd": (ob.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (ob.SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "nesterov": (
        ob.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    ),
    "rmsprop": (ob.RMSprop(lr=1e-3), lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.9)),
    "adam": (ob.Adam(lr=3e-3), lambda p: torch.optim.Adam(p, lr=3e-3)),
    "adamw": (ob.AdamW(lr=3e-3, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1)),
    "any callable": (
        ob.TorchOptimizer(lambda p: torch.optim.Adagrad(p, lr=0.05)),
        lambda p: torch.optim.Adagrad(p, lr=0.05),
    ),
}


def plain_loop(workload: ob.Workload, batch: int, updates: int, step) -> torch.Tensor:
    """Train without offbeat, over the samples that worker 1 draws; `step(parameters)` updates."""
    model = workload.initial_model(0)
    order = Order(workload.split.indices(workload.train.targets, 0, 1, 0), 0, 1)
    parameters = list(model.parameters())
    for update in range(updates):
        model.zero_grad()
        inputs, targets = workload.train.take(order.take(update * batch, (update + 1) * batch))
        workload.loss(model(inputs), targets).mean().backward()
        step(parameters)
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_without_delay_reproduces_a_plain_loop(name: str) -> None:
    ours, theirs = OPTIMIZERS[name]
    workload = ob.workloads.Digits(hidden=16).build()
    scene = play(ob.FixedMinibatch(batch=64, optimizer=ours), workload, workers=1, until=ob.Samples(64 * 30))

    made = {}

    def step(parameters: list[torch.nn.Parameter]) -> None:
        made.setdefault("optimizer", theirs(parameters)).step()

    expected = plain_loop(workload, 64, 30, step)
    torch.testing.assert_close(scene.outcome.finishes[0].parameters, expected, rtol=1e-4, atol=1e-5)


def test_one_worker_with_amsgrad_reproduces_apams_formula() -> None:
    workload = ob.workloads.Digits(hidden=16).build()
    strategy = ob.FixedMinibatch(batch=64, optimizer=ob.AMSGrad(lr=3e-3))
    scene = play(strategy, workload, workers=1, until=ob.Samples(64 * 30))

    state: dict[int, list[torch.Tensor]] = {}
    k = 0

    @torch.no_grad()
    def step(parameters: list[torch.nn.Parameter]) -> None:
        nonlocal k
        k += 1
        rate = 3e-3 * math.sqrt(1 - 0.999**k) / (1 - 0.9**k)
        for i, x in enumerate(parameters):
            m, v, v_hat = state.setdefault(i, [torch.zeros_like(x) for _ in range(3)])
            m.mul_(0.9).add_(x.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(x.grad, x.grad, value=0.001)
            torch.maximum(v_hat, v, out=v_hat)
            x.sub_(rate * m / (v_hat.sqrt() + 1e-8))

    expected = plain_loop(workload, 64, 30, step)
    torch.testing.assert_close(scene.outcome.finishes[0].parameters, expected, rtol=1e-4, atol=1e-5)


def test_fixed_and_anytime_minibatch_on_the_same_samples_make_the_same_updates() -> None:
    # 64 samples in micro-batches of 16 take exactly the time limit, so both compute the same draws.
    workload = ob.workloads.Digits(hidden=16).build()
    cluster = ob.Cluster(seconds_per_sample=0.01)
    fixed = play(ob.FixedMinibatch(batch=64), workload, cluster=cluster, until=ob.Samples(3 * 64 * 20))
    timed = play(ob.AnytimeMinibatch(seconds=0.64), workload, cluster=cluster, until=ob.Samples(3 * 64 * 20))
    assert [u.contributions for u in fixed.of(Update)] == [u.contributions for u in timed.of(Update)]
    torch.testing.assert_close(fixed.outcome.finishes[0].parameters, timed.outcome.finishes[0].parameters)


def test_every_sample_weighs_the_same_however_the_work_was_split() -> None:
    workload = ob.workloads.Digits(hidden=16).build()
    uneven = play(
        ob.AnytimeMinibatch(seconds=0.64, optimizer=ob.SGD(lr=0.1)),
        workload,
        cluster=ob.Cluster(seconds_per_sample=0.01, factors=(4.0,)),
        workers=2,
        until=ob.Samples(1),
    )
    (update,) = uneven.of(Update)
    assert [part.stop - part.first for part in update.contributions] == [16, 64]

    model = workload.initial_model(0)
    for part in update.contributions:
        order = Order(workload.split.indices(workload.train.targets, part.rank - 1, 2, 0), 0, part.rank)
        inputs, targets = workload.train.take(order.take(part.first, part.stop))
        (workload.loss(model(inputs), targets).sum() / update.samples).backward()
    expected = torch.cat([(p - 0.1 * p.grad).detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(uneven.outcome.finishes[0].parameters, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(ob.Cluster(), marks=pytest.mark.slow),
        pytest.param(ob.Cluster(straggle=ob.stragglers.NIAGARA), marks=pytest.mark.slow),
        ob.Cluster(straggle=ob.stragglers.Lognormal(0.5), factors=(4.0, 2.0, 2.0)),
    ],
    ids=["uniform", "niagara", "uneven and noisy"],
)
def test_the_target_batch_controller_settles_within_one_percent(cluster: ob.Cluster) -> None:
    target = 10 * 64
    scene = play(ob.AnytimeMinibatch(batch=64), cluster=cluster, workers=10, until=ob.Samples(target * 300))
    batches = [update.samples for update in scene.of(Update)][100:]
    assert abs(sum(batches) / len(batches) / target - 1) < 0.01


@pytest.mark.slow
def test_the_target_batch_is_kept_when_workers_are_lost_and_join_again() -> None:
    faults = (ob.faults.Crash(1, at_seconds=100.0, back_after_seconds=200.0), ob.faults.Crash(2, at_seconds=100.0))
    cluster = ob.Cluster(faults=faults)
    scene = play(ob.AnytimeMinibatch(batch=64), cluster=cluster, workers=5, until=ob.Samples(5 * 64 * 300))
    sizes = [(update.at, update.samples) for update in scene.of(Update)]
    while_three = [samples for at, samples in sizes if 110 < at < 290]
    while_four = [samples for at, samples in sizes if at > 310]
    assert len({part.rank for part in scene.of(Update)[-1].contributions}) == 4
    assert abs(sum(while_three) / len(while_three) / 320 - 1) < 0.03
    assert abs(sum(while_four) / len(while_four) / 320 - 1) < 0.03


@pytest.mark.slow
def test_the_round_time_of_fixed_minibatch_under_niagara_is_as_published() -> None:
    # 5.65 s of computing and on average 4.02 s for the slowest of ten make a round of 9.67 s.
    cluster = ob.Cluster(straggle=ob.stragglers.NIAGARA)
    strategy = ob.FixedMinibatch(batch=256, microbatch=256)
    scene = play(strategy, cluster=cluster, workers=10, until=ob.Samples(2560 * 250))
    assert scene.outcome.seconds / 250 == pytest.approx(9.67, rel=0.02)


def test_anytime_overshoots_its_limit_by_one_microbatch_at_most() -> None:
    cluster = ob.Cluster(straggle=ob.stragglers.NIAGARA)
    scene = play(ob.AnytimeMinibatch(seconds=3.0, microbatch=16), cluster=cluster, until=ob.Samples(20_000))
    one = 16 * cluster.seconds_per_sample
    for record in scene.of(Round)[:-3]:
        longest = max(3.0, record.induced_seconds) + one
        assert record.samples >= 16
        assert record.seconds <= longest + 1e-9


def test_the_quadratic_converges_to_its_optimum() -> None:
    config = ob.workloads.Quadratic(dimension=8, noise=0.0, examples=64)
    scene = play(ob.AsyncFixed(batch=8, optimizer=ob.SGD(lr=0.3)), config.build(), until=ob.Samples(12_000))
    torch.testing.assert_close(scene.outcome.finishes[0].parameters, config.optimum, rtol=1e-3, atol=1e-3)


def test_the_result_on_the_quadratic_is_the_same_on_all_machines() -> None:
    scene = play(ob.FixedMinibatch(batch=16, optimizer=ob.SGD(lr=0.05)), quadratic(), until=ob.Samples(16 * 3 * 10))
    assert float(scene.outcome.finishes[0].parameters.double().norm()) == pytest.approx(GOLDEN, rel=1e-4)


GOLDEN = 0.6199586
