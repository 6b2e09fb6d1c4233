"""Evaluations in virtual time: how long they take, and what becomes of the rounds beside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from scenes import NAMES, play
from test_engine import Script, Scripted, perform, seen

import offbeat as ob
from offbeat.cluster.cluster import WorkerOverride
from offbeat.core.actions import Action, Evaluate, Report
from offbeat.core.events import Evaluated, Event, GradientReady, Started
from offbeat.records.schema import Contribution, Evaluation, Round, Update


def shared(**changed: Any) -> ob.Cluster:
    """Two cores, which two workers and evaluations of a second share."""
    return ob.Cluster(**{"seconds_per_sample": 0.01, "seconds_per_evaluation": 1.0, "cores": 2, **changed})


def evaluating(budget: ob.Samples | ob.Seconds, evaluations: int = 1) -> Script:
    """Rank 0 evaluates, and both ranks compute one round."""
    left = {0: evaluations + 1, 1: 1}

    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            yield node.compute(budget, microbatch=10)
            if node.rank == 0:
                for version in range(evaluations):
                    yield Evaluate(node.context.parameters, (), version)
        if isinstance(event, GradientReady | Evaluated):
            left[node.rank] -= 1
            if left[node.rank] == 0:
                yield node.finish()

    return script


def test_without_a_time_an_evaluation_ends_at_once() -> None:
    log = perform(evaluating(ob.Samples(100)), ob.Cluster(seconds_per_sample=0.01, cores=2))
    assert [event.at for event in seen(log, Evaluated)] == [0.0]
    assert [event.seconds for rank in (0, 1) for event in seen(log, GradientReady, rank)] == [1.0, 1.0]


def test_evaluations_with_a_core_of_their_own_follow_each_other_and_slow_down_nothing() -> None:
    log = perform(evaluating(ob.Samples(500), evaluations=2), shared(cores=None))
    assert [event.at for event in seen(log, Evaluated)] == pytest.approx([1.0, 2.0])
    assert [event.seconds for rank in (0, 1) for event in seen(log, GradientReady, rank)] == pytest.approx([5.0, 5.0])


def test_an_evaluation_and_the_rounds_beside_it_share_the_cores() -> None:
    log = perform(evaluating(ob.Samples(500)), shared())
    assert [event.at for event in seen(log, Evaluated)] == pytest.approx([1.5])
    assert [event.seconds for rank in (0, 1) for event in seen(log, GradientReady, rank)] == pytest.approx([5.5, 5.5])


def test_when_the_rounds_have_ended_an_evaluation_has_a_core_to_itself() -> None:
    log = perform(evaluating(ob.Samples(50)), shared())
    assert [event.seconds for rank in (0, 1) for event in seen(log, GradientReady, rank)] == pytest.approx([0.75, 0.75])
    assert [event.at for event in seen(log, Evaluated)] == pytest.approx([0.75 + 0.5])


def test_within_a_time_limit_fewer_samples_fit_beside_an_evaluation() -> None:
    log = perform(evaluating(ob.Seconds(3.0)), shared())
    (gradient,) = seen(log, GradientReady, 1)
    assert gradient.samples == 250  # half a second is lost
    assert gradient.seconds == pytest.approx(3.0)


def test_the_delay_of_a_round_is_not_prolonged() -> None:
    sleeping = ob.stragglers.Mixture(((2.0, 0.0, 1.0),))
    log = perform(evaluating(ob.Samples(100)), shared(straggle=sleeping))
    assert [event.seconds for event in seen(log, GradientReady)] == pytest.approx([3.0])


def test_a_worker_on_another_machine_is_as_fast_as_ever() -> None:
    log = perform(evaluating(ob.Samples(500)), shared(cores=1, workers=(WorkerOverride((1,), is_remote=True),)))
    assert [event.seconds for event in seen(log, GradientReady, 0)] == pytest.approx([6.0])
    assert [event.seconds for event in seen(log, GradientReady, 1)] == pytest.approx([5.0])


def test_an_evaluation_stands_still_during_an_update_of_its_process() -> None:
    usual = evaluating(ob.Samples(500))

    def script(node: Scripted, event: Event) -> Iterable[Action]:
        yield from usual(node, event)
        if node.rank == 0 and isinstance(event, Started):
            yield Report(Update(event.at, 0, 1, 1, 1, 1, 0.1, (Contribution(0, 0, 1, 0),)))

    log = perform(script, shared(seconds_per_update=2.0))
    assert [event.at for event in seen(log, Evaluated)] == pytest.approx([3.5])
    assert [event.seconds for event in seen(log, GradientReady, 1)] == pytest.approx([5.5])


@pytest.mark.parametrize("cores", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_ends_and_keeps_its_invariants(name: str, cores: int) -> None:
    cluster = shared(cores=cores, seconds_per_update=0.05, straggle=ob.stragglers.CEDAR)
    strategy = ob.Strategy.members[name]()
    scenes = [
        play(strategy, cluster=cluster, workers=4, until=ob.Seconds(8.0), evaluate=ob.EverySeconds(0.5), seed=2)
        for _ in range(2)
    ]
    assert scenes[0].outcome.failure is None
    assert scenes[0].of(Evaluation)
    assert scenes[0].of(Round) == scenes[1].of(Round)
