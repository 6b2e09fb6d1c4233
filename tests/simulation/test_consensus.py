"""Consensus distance in simulations: exact with replicas, and not recorded without."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from scenes import play

import offbeat as ob
from offbeat.core.actions import Action, Compute, Evaluate, Finish
from offbeat.core.events import Evaluated, Event, GradientReady, Started
from offbeat.core.strategy import State
from offbeat.records.schema import Consensus, Ended, Evaluation, Record
from offbeat.simulation.simulation_records import consensus_distance

STEPS = 4


@dataclass(frozen=True)
class IsolatedPeers(ob.Strategy):
    """Peers without communication: each takes some steps of its own, and rank 0 evaluates after each."""

    equal_result: bool = False
    """Whether all finish with the same parameters."""
    diverge: bool = False
    """Whether the parameters become NaN."""
    hidden: bool = False
    """Whether only rank 0 has a replica to measure."""

    def processes(self, workers: int) -> int:
        return workers

    def computes(self, rank: int) -> bool:
        return True

    def peers(self, rank: int, processes: int) -> Iterable[int]:
        return ()

    def node(self, context: ob.nodes.NodeContext) -> ob.nodes.Node:
        return IsolatedNode(self, context)


class IsolatedNode(ob.nodes.Node):
    def __init__(self, config: IsolatedPeers, context: ob.nodes.NodeContext) -> None:
        self.config, self.context, self.x, self.steps = config, context, context.parameters.clone(), 0

    def handle(self, event: Event) -> Iterable[Action]:
        if isinstance(event, GradientReady):
            self.x -= (math.nan if self.config.diverge else 0.1) / event.samples * event.gradient
            self.steps += 1
            if self.context.rank == 0:
                yield Evaluate(self.x, (), self.steps)
        if isinstance(event, Started) or (isinstance(event, GradientReady) and self.steps < STEPS):
            yield Compute(self.x, (), self.steps, 16 * self.steps, ob.Samples(16), 16)
        elif isinstance(event, Evaluated if self.context.rank == 0 else GradientReady) and self.steps == STEPS:
            yield Finish(torch.ones_like(self.x) if self.config.equal_result else self.x, (), self.steps)

    def replica(self) -> torch.Tensor | None:
        return None if self.config.hidden and self.context.rank else self.x

    def state(self) -> State:
        raise NotImplementedError

    def restore(self, state: State) -> None:
        raise NotImplementedError


def two_pass(replicas: list[torch.Tensor]) -> float:
    table = torch.stack(replicas).double()
    return float((table - table.mean(dim=0)).square().sum(dim=1).mean())


def test_the_distance_is_measured_with_every_evaluation_and_at_the_end() -> None:
    scene = play(IsolatedPeers(), workers=3, checked=False)
    assert scene.outcome.failure is None
    measured = scene.of(Consensus)
    assert len(measured) == STEPS + 1
    assert {record.peers for record in measured} == {3}
    assert isinstance(scene.records[-1], Ended)
    assert scene.records[-2] == measured[-1]
    assert measured[-1].at == scene.outcome.seconds
    last = [scene.outcome.finishes[rank].parameters for rank in range(3)]
    assert measured[-1].distance == pytest.approx(two_pass(last), rel=1e-9)
    assert measured[-1].distance > 0


def test_peers_that_end_with_the_same_model_have_distance_zero() -> None:
    assert play(IsolatedPeers(equal_result=True), workers=3, checked=False).of(Consensus)[-1].distance == 0.0


def test_a_crashed_peer_is_not_measured() -> None:
    crash = ob.Cluster(faults=(ob.faults.Crash(2, 1e-9),))
    assert {record.peers for record in play(IsolatedPeers(), cluster=crash, checked=False).of(Consensus)} == {2}


@pytest.mark.parametrize("strategy", [IsolatedPeers(hidden=True), ob.FixedMinibatch(), ob.AsyncFixed()])
def test_with_fewer_than_two_replicas_nothing_is_measured(strategy: ob.Strategy) -> None:
    scene = play(strategy, evaluate=ob.EveryUpdates(), checked=False)
    assert scene.of(Consensus) == []
    assert scene.of(Evaluation) or isinstance(strategy, IsolatedPeers)


def test_measuring_changes_no_other_record() -> None:
    def others(records: list[Record]) -> list[Record]:
        return [record for record in records if not isinstance(record, Consensus)]

    measured, unmeasured = (play(IsolatedPeers(hidden=hidden), checked=False) for hidden in (False, True))
    assert others(measured.records) == others(unmeasured.records)


def test_parameters_that_are_not_finite_have_no_distance() -> None:
    assert math.isnan(consensus_distance([torch.zeros(2), torch.tensor([1.0, float("nan")])]))
    assert play(IsolatedPeers(diverge=True), checked=False).of(Consensus) == []


@given(some.integers(2, 9), some.integers(0, 2**31), some.sampled_from([torch.float32, torch.float64]))
def test_the_one_pass_formula_equals_two_passes(peers: int, seed: int, kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    far = 1000 * torch.randn(7, generator=generator, dtype=kind)
    replicas = [far + torch.randn(7, generator=generator, dtype=kind) for _ in range(peers)]
    replicas[0] = replicas[0] + 50  # differences are taken from the first, which may be an outlier
    before = [replica.clone() for replica in replicas]
    assert consensus_distance(replicas) == pytest.approx(two_pass(replicas), rel=1e-10)
    assert all(torch.equal(one, other) for one, other in zip(replicas, before, strict=True))
    assert consensus_distance([far] * peers) == 0.0
