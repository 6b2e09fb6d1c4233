"""A live run and a simulated run of the same experiment agree."""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.core.actions import Budget, Finish
from offbeat.core.strategy import Node, NodeContext
from offbeat.records.schema import Round, RunRecords, Update, of_kind
from offbeat.strategies.hub.hub_server import HubServer
from offbeat.strategies.hub.work_sizing import WorkSizing

WORKERS = 3


def regression() -> ob.Workload:
    """Small and in double precision, so that only the arithmetic can differ."""
    random = torch.Generator().manual_seed(5)
    inputs = torch.randn(512, 6, generator=random, dtype=torch.float64)
    targets = inputs @ torch.randn(6, 1, generator=random, dtype=torch.float64)
    return ob.Workload(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
        loss=lambda outputs, targets: (outputs - targets).square().sum(1),
        train=(inputs, targets),
        optimizer=ob.SGD(lr=0.02, momentum=0.9),
    )


def result_of(run: ob.Run) -> Finish:
    assert run.summary.failure is None
    assert run.finish is not None
    return run.finish


def test_fixed_minibatch_parameter_for_parameter_over_fifty_updates() -> None:
    strategy = ob.FixedMinibatch(batch=24, microbatch=8)
    until = ob.Samples(50 * WORKERS * 24)
    live = ob.train(regression(), strategy, until, workers=WORKERS, seed=3, evaluate=None)
    simulated = ob.simulate(regression(), strategy, until=until, workers=WORKERS, seed=3, evaluate=None)
    assert live.summary.updates == simulated.summary.updates == 50
    assert contributions(live.records) == contributions(simulated.records)
    torch.testing.assert_close(result_of(live).parameters, result_of(simulated).parameters, rtol=1e-9, atol=1e-12)


def contributions(run: RunRecords) -> list[list[tuple[int, int, int, int]]]:
    """The contributions of each update: rank, first and last draw, staleness."""
    return [[(c.rank, c.first, c.stop, c.staleness) for c in update.contributions] for update in of_kind(run, Update)]


def joined(workload: ob.Workload, strategy: ob.Strategy, until: ob.Samples, seed: int) -> Finish:
    """The result of a training loop of one's own, hub and worker in this process."""
    model = workload.initial_model(seed)
    strategy = strategy.with_default_optimizer(workload.optimizer)
    with ob.join(model, strategy, until, every=None, seed=seed) as run:
        for batch in run.batches(workload.train):
            run.backward(workload.losses(model, batch))
    assert run.finish is not None
    return run.finish


def test_dropout_depends_on_the_samples_alone_in_every_engine() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()

    workload = dataclasses.replace(regression(), model=model)
    strategy, until = ob.FixedMinibatch(batch=24, microbatch=24), ob.Samples(240)
    expected = result_of(ob.simulate(workload, strategy, until=until, workers=1, seed=7, evaluate=None)).parameters
    torch.manual_seed(99)
    for live in (
        joined(workload, strategy, until, seed=7),
        result_of(ob.train(workload, strategy, until, workers=1, seed=7, evaluate=None)),
    ):
        torch.testing.assert_close(live.parameters, expected, rtol=1e-9, atol=1e-12)


def test_a_single_sample_that_is_left_over_joins_the_last_micro_batch_in_every_engine() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()

    workload = dataclasses.replace(regression(), model=model)
    strategy, until = ob.FixedMinibatch(batch=49, microbatch=16), ob.Samples(490)
    simulated = result_of(ob.simulate(workload, strategy, until=until, workers=1, seed=8, evaluate=None))
    for live in (
        joined(workload, strategy, until, seed=8),
        result_of(ob.train(workload, strategy, until, workers=1, seed=8, evaluate=None)),
    ):
        torch.testing.assert_close(live.parameters, simulated.parameters, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(live.buffers, simulated.buffers, rtol=1e-9, atol=1e-12)


class Replayed(WorkSizing):
    """Budgets with the numbers of samples of a recorded run."""

    def __init__(self, counts: dict[int, list[int]]) -> None:
        self._left = {rank: deque(of_rank) for rank, of_rank in counts.items()}

    def budget(self, rank: int, live: Collection[int]) -> Budget:
        left = self._left[rank]
        return ob.Samples(left.popleft() if len(left) > 1 else left[0])


@dataclass(frozen=True)
class ReplayedAnytime(ob.AnytimeMinibatch):
    """Anytime mini-batch with the sample counts of a recorded run."""

    counts: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def node(self, context: NodeContext) -> Node:
        node = super().node(context)
        if isinstance(node, HubServer):
            node._sizing = Replayed({rank: list(of_rank) for rank, of_rank in self.counts})
        return node


def test_anytime_minibatch_parameter_for_parameter_when_its_counts_are_replayed() -> None:
    strategy = ob.AnytimeMinibatch(seconds=0.02, microbatch=8, samples_max=100_000)
    until = ob.Samples(20_000)
    live = ob.train(regression(), strategy, until, workers=WORKERS, seed=4, evaluate=None)
    counts: dict[int, list[int]] = defaultdict(list)
    for update in of_kind(live.records, Update):
        for part in update.contributions:
            counts[part.rank].append(part.stop - part.first)
    replayed = ReplayedAnytime(
        **{item.name: getattr(strategy, item.name) for item in dataclasses.fields(strategy)},
        counts=tuple((rank, tuple(of_rank)) for rank, of_rank in counts.items()),
    )
    simulated = ob.simulate(regression(), replayed, until=until, workers=WORKERS, seed=4, evaluate=None)
    assert contributions(live.records) == contributions(simulated.records)
    assert len(set(counts[1])) > 1  # the counts really vary, or nothing was shown
    torch.testing.assert_close(result_of(live).parameters, result_of(simulated).parameters, rtol=1e-9, atol=1e-12)


def test_timed_rounds_last_until_their_limit_and_staleness_counts_the_updates_since_their_version() -> None:
    """However slow the machine is. That both engines have the same rounds at given speeds, a test with one clock shows;
    how well a simulation predicts the speeds of processes, `bench/prediction.py` measures.
    """
    strategy = ob.AsyncTimed(worker_seconds=0.1, hub_seconds=0.15, microbatch=4, samples_max=None)
    # Every micro-batch is prolonged, so that a limit allows several and not thousands.
    cluster = ob.Cluster(workers=(ob.stragglers.WorkerOverride((0, 1, 2), seconds_per_call=0.01),))
    live = ob.train(regression(), strategy, ob.Samples(1_500), workers=WORKERS, cluster=cluster, seed=5, evaluate=None)
    rounds = {(record.rank, record.draws[0]): record for record in of_kind(live.records, Round)}
    updates = list(of_kind(live.records, Update))
    assert len(updates) > 1
    assert [update.version for update in updates] == list(range(1, len(updates) + 1))
    applied = [(update, part) for update in updates for part in update.contributions]
    for update, part in applied:
        computed = rounds[part.rank, part.first]
        assert computed.draws == (part.first, part.stop)
        assert computed.seconds >= 0.1
        assert computed.induced_seconds >= 0.01 * computed.samples / 4
        assert part.staleness == update.version - 1 - computed.version
    mean = sum(part.staleness for _, part in applied) / len(applied)
    assert live.summary.staleness_mean == pytest.approx(mean)
    assert live.summary.samples_per_update == pytest.approx(sum(update.samples for update in updates) / len(updates))


def test_a_live_worker_draws_its_data_without_gaps() -> None:
    strategy = ob.AsyncFixed(batch=16, microbatch=8)
    live = ob.train(regression(), strategy, ob.Samples(2_000), workers=2, seed=6, evaluate=None)
    for rank in (1, 2):
        draws = sorted(record.draws for record in of_kind(live.records, Round) if record.rank == rank)
        edges = np.array(draws)
        assert edges[0, 0] == 0
        assert (edges[1:, 0] == edges[:-1, 1]).all()  # nothing skipped, nothing twice
