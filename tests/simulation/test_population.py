"""Populations: which members are averaged, what a diverging member does to others, and how it is replaced."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scenes import Scene, play

import offbeat as ob
from offbeat.core.actions import Action, Evaluate, Send
from offbeat.core.events import Evaluated, GradientReady, MessageArrived, PeerJoined, Started
from offbeat.core.examples import Examples
from offbeat.core.flat import layout_of
from offbeat.core.messages import Message
from offbeat.core.strategy import Node
from offbeat.engine.gradient_computer import GradientComputer
from offbeat.records.schema import Evaluation, Notice, Update
from offbeat.strategies.local_training import Begin, GlobalUpdate, LocalParameters
from offbeat.strategies.population.population_member import (
    GradientReport,
    PopulationMember,
    Replace,
    Snapshot,
    SnapshotRequest,
    SourceGradients,
    flatten_state,
    unflatten_state,
)

DIVERGING_RATE = 3000.0
SCORES = st.dictionaries(st.integers(1, 9), st.sampled_from([0.1, 0.2, 0.2, 0.5, math.inf, math.nan]), max_size=9)


@given(rank=st.integers(1, 9), scores=SCORES)
def test_sources_of_better_are_strictly_better(rank: int, scores: dict[int, float]) -> None:
    mine = scores.get(rank, math.inf)
    mine = mine if math.isfinite(mine) else math.inf
    sources = ob.parts.Better().of(rank, scores)
    assert rank not in sources
    assert all(math.isfinite(scores[source]) and scores[source] < mine for source in sources)
    missed = [other for other in scores if other != rank and other not in sources]
    assert all(not scores[other] < mine or not math.isfinite(scores[other]) for other in missed)


@given(rank=st.integers(1, 9), scores=SCORES)
def test_all_selects_every_member_with_a_finite_score_and_best_the_lowest(rank: int, scores: dict[int, float]) -> None:
    finite = {other: score for other, score in scores.items() if other != rank and math.isfinite(score)}
    assert ob.parts.AllMembers().of(rank, scores) == sorted(finite)
    best = ob.parts.Best().of(rank, scores)
    assert len(best) <= 1
    assert all(scores[source] == min(finite.values()) for source in best)


def test_a_nested_state_is_sent_as_tensors_and_json() -> None:
    state = {"updates": 3, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "slots": {"weight": {"m": torch.ones(2)}}}
    tensors, text = flatten_state(state)
    again = unflatten_state(tensors, text)
    assert again["groups"] == [{"lr": 0.1, "betas": [0.9, 0.99]}]
    assert torch.equal(again["slots"]["weight"]["m"], torch.ones(2))
    assert again["updates"] == 3


def trained(sources: object, preempt_above: float | None, rates: tuple[float, ...] = (DIVERGING_RATE,)) -> Scene:
    strategy = ob.Population(
        every=5,
        batch=32,
        sources=sources,
        preempt_above=preempt_above,
        rates=rates,
        optimizer=ob.SGD(lr=0.2),  # type: ignore[arg-type]
    )
    until = ob.Samples(30_000)
    return play(strategy, ob.workloads.Digits().build(), workers=3, until=until, evaluate=ob.EverySeconds(20.0))


def losses(scene: Scene) -> list[float]:
    """The held-out loss of every member at the end."""
    computing = GradientComputer(scene.simulation.gradient_computer.workload, seed=0)
    members = [cast(PopulationMember, process.node) for process in scene.simulation.processes[1:]]
    return [computing.evaluate(member._parameters, member._buffers.current)[0] for member in members]


@pytest.mark.slow
def test_a_diverging_member_does_not_harm_the_others_with_better_but_with_all() -> None:
    better, everyone = losses(trained(ob.parts.Better(), None)), losses(trained(ob.parts.AllMembers(), None))
    undisturbed = losses(trained(ob.parts.Better(), None, rates=()))
    assert better[0] > 2.3  # worse than guessing
    assert max(better[1:]) < 1.2 * max(undisturbed[1:])
    assert min(everyone) > 2.3


def test_preemption_replaces_a_diverging_member_and_its_settings() -> None:
    scene = trained(ob.parts.Better(), 1.25)
    replaced = cast(PopulationMember, scene.simulation.processes[1].node)
    assert replaced._replacements >= 1
    assert replaced._settings != 1
    first, *others = losses(scene)
    assert first < 1.25 * min(others)


def test_the_result_is_the_member_with_the_best_validation_score_and_a_notice_names_it() -> None:
    scene = trained(ob.parts.Better(), None)
    (notice,) = scene.of(Notice)
    assert notice.text.startswith("the result is worker ")
    assert "validation loss" in notice.text
    assert "worker 1's" not in notice.text
    computing = GradientComputer(scene.simulation.gradient_computer.workload, seed=0)
    result = scene.outcome.finishes[0]
    assert f"{computing.evaluate(result.parameters, (), is_score=True).loss:.4g}" in notice.text
    assert computing.evaluate(result.parameters, ()).loss == pytest.approx(scene.of(Evaluation)[-1].loss)


def test_no_test_example_influences_the_result() -> None:
    def played(workload: ob.Workload) -> Scene:
        strategy = ob.Population(every=5, batch=16, optimizer=ob.SGD(lr=0.05), rates=(0.1, 1.0, 3.0))
        return play(strategy, workload, until=ob.Samples(4000), evaluate=ob.EveryUpdates(5))

    workload = ob.workloads.DigitsLogistic().build()
    wrong = Examples(workload.test.inputs, workload.test.targets.flip(0))
    one, other = played(workload), played(dataclasses.replace(workload, test=wrong))
    assert one.of(Evaluation)[-1].loss != other.of(Evaluation)[-1].loss
    assert [notice.text for notice in one.of(Notice)] == [notice.text for notice in other.of(Notice)]
    assert torch.equal(one.outcome.finishes[0].parameters, other.outcome.finishes[0].parameters)


def test_only_a_population_that_evaluates_gives_up_training_data_for_validation() -> None:
    workload = ob.workloads.DigitsLogistic()
    population, fixed = (ob.Experiment(workload, one).resolved()[1] for one in (ob.Population(), ob.FixedMinibatch()))
    assert (len(population.train), len(population.validation)) == (1295, 143)
    assert (len(fixed.train), fixed.validation) == (1438, None)
    alone = ob.Experiment(workload, ob.Population(), evaluate=None)
    assert alone.resolved()[1] is fixed


def test_without_evaluation_the_training_loss_is_the_score() -> None:
    strategy = ob.Population(every=5, batch=16, optimizer=ob.SGD(lr=0.05))
    scene = play(strategy, ob.workloads.DigitsLogistic().build(), workers=3, until=ob.Samples(4000))
    (notice,) = scene.of(Notice)
    assert "training loss" in notice.text


def test_members_begin_with_different_parameters_by_default() -> None:
    def initial(strategy: ob.Population) -> list[torch.Tensor]:
        scene = play(strategy, ob.workloads.DigitsLogistic().build(), workers=2, until=ob.Samples(1))
        return [cast(PopulationMember, process.node)._context.parameters for process in scene.simulation.processes[1:]]

    one, other = initial(ob.Population())
    assert not torch.equal(one, other)
    assert torch.equal(one.sort().values, other.sort().values)
    same = initial(ob.Population(initial=ob.parts.Same()))
    assert torch.equal(*same)


def test_a_population_survives_the_crash_of_a_member() -> None:
    cluster = ob.Cluster(
        seconds_per_sample=0.005, factors=(5.0,), faults=(ob.faults.Crash(2, 2.0, back_after_seconds=1.0),)
    )
    strategy = ob.Population(every=5, batch=16, optimizer=ob.SGD(lr=0.05))
    scene = play(strategy, ob.workloads.DigitsLogistic().build(), cluster=cluster, workers=3, until=ob.Samples(8000))
    assert scene.outcome.failure is None


def test_the_best_member_without_sources_keeps_sending_reports() -> None:
    strategy = ob.Population(every=5, batch=16, rates=(1.0, 0.01), preempt_above=None, optimizer=ob.SGD(lr=0.05))
    scene = play(strategy, ob.workloads.DigitsLogistic().build(), workers=2, until=ob.Samples(8000))
    reports = [update.contributions[0].rank for update in scene.of(Update)]
    assert reports.count(1) > 40
    best = cast(PopulationMember, scene.simulation.processes[1].node)
    assert len(best._fragments[0].unmerged) <= 2


def test_a_population_in_which_all_members_diverge_fails() -> None:
    strategy = ob.Population(every=5, batch=16, optimizer=ob.SGD(lr=1e38))
    scene = play(strategy, ob.workloads.DigitsLogistic().build(), workers=2, until=ob.Samples(50_000))
    assert scene.outcome.failure is not None
    assert "every worker has sent 5 reports in a row without a finite gradient" in scene.outcome.failure


def context_of(rank: int, evaluate: ob.EveryUpdates | None = None) -> ob.nodes.NodeContext:
    layout = layout_of(torch.nn.Linear(1, 1))
    random = np.random.default_rng(rank)
    return ob.nodes.NodeContext(rank, (0, 1, 2), layout, torch.zeros(2), (), random, ob.Samples(10**9), evaluate)


def report(exchange: int, value: float, replacements: int = 0, first: int = 0, score: float = 1.0) -> LocalParameters:
    parameters = torch.full((2,), value)
    complete = ((first, first + 5, 0),)
    return LocalParameters(parameters, (), exchange, 0, 5, complete, (), 0, score, replacements, ())


def deliver(node: Node, source: int, message: Message) -> list[Action]:
    return list(node.handle(MessageArrived(1.0, source, message, lambda: message)))


def sends(actions: list[Action], kind: type[Message]) -> list[Send]:
    return [action for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def server(evaluate: ob.EveryUpdates | None = None, **settings: Any) -> Node:
    node = ob.Population(optimizer=ob.SGD(lr=0.1), **settings).node(context_of(0, evaluate))
    for event in (Started(0.0), PeerJoined(0.0, 1, 0), PeerJoined(0.0, 2, 0)):
        list(node.handle(event))
    return node


def test_a_report_from_before_a_replacement_is_not_answered_when_its_score_arrives() -> None:
    node = server(ob.EveryUpdates(1000))
    (good,) = [action for action in deliver(node, 1, report(0, 1.0)) if isinstance(action, Evaluate)]
    list(node.handle(Evaluated(1.0, good.version, 0.1, None)))
    (bad,) = [action for action in deliver(node, 2, report(0, 9.0)) if isinstance(action, Evaluate)]
    actions = list(node.handle(Evaluated(1.0, bad.version, 5.0, None)))
    assert [send.to for send in sends(actions, SnapshotRequest)] == [1]
    (late,) = [action for action in deliver(node, 2, report(1, 9.5, first=5)) if isinstance(action, Evaluate)]
    (given,) = sends(deliver(node, 1, Snapshot(torch.ones(2), (), (), "", 1)), Replace)
    assert (given.to, given.message.replacements) == (2, 1)  # type: ignore[attr-defined]
    assert list(node.handle(Evaluated(1.0, late.version, 0.01, None))) == []


def test_a_snapshot_that_is_not_finite_replaces_no_member() -> None:
    node = server()
    deliver(node, 1, report(0, 1.0, score=0.1))
    assert sends(deliver(node, 2, report(0, 9.0, score=5.0)), SnapshotRequest)
    assert deliver(node, 1, Snapshot(torch.full((2,), math.nan), (), (), "", 1)) == []
    assert sends(deliver(node, 2, report(1, 9.0, first=5, score=5.0)), SnapshotRequest), "another snapshot is requested"


def gradient_report(exchange: int, gradient: float, score: float, replacements: int = 0) -> GradientReport:
    reported = report(exchange, 1.0, replacements, first=5 * exchange, score=score)
    fields = {item.name: getattr(reported, item.name) for item in dataclasses.fields(reported)}
    return GradientReport(**fields, gradient=torch.full((2,), gradient))


def test_a_member_is_sent_the_mean_gradient_of_its_sources_each_once() -> None:
    node = server(send=ob.parts.Gradients(), preempt_above=None)
    list(node.handle(PeerJoined(0.0, 3, 0)))
    assert not sends(deliver(node, 1, gradient_report(0, 2.0, score=0.1)), SourceGradients), "none is better"
    (one,) = sends(deliver(node, 2, gradient_report(0, 4.0, score=0.2)), SourceGradients)
    (both,) = sends(deliver(node, 3, gradient_report(0, 8.0, score=0.3)), SourceGradients)
    assert one.message.tensors()[0].tolist() == [2.0, 2.0]
    assert both.message.tensors()[0].tolist() == [3.0, 3.0]
    again = deliver(node, 3, gradient_report(1, 8.0, score=0.3))
    assert not sends(again, SourceGradients), "both have been sent already"
    assert [send.message.included for send in sends(again, GlobalUpdate)] == [1]  # type: ignore[attr-defined]
    deliver(node, 1, gradient_report(1, 6.0, score=0.1))
    (newer,) = sends(deliver(node, 3, gradient_report(2, 8.0, score=0.3)), SourceGradients)
    assert newer.message.tensors()[0].tolist() == [6.0, 6.0]


def test_a_gradient_that_is_not_finite_is_sent_to_no_member() -> None:
    node = server(send=ob.parts.Gradients())
    deliver(node, 1, gradient_report(0, math.inf, score=0.1))
    assert not sends(deliver(node, 2, gradient_report(0, 4.0, score=0.11)), SourceGradients)


def test_a_member_reports_the_sum_of_its_mean_gradients_and_steps_with_those_of_its_sources() -> None:
    node = member(every=2, send=ob.parts.Gradients())
    for step, size in enumerate((5.0, 10.0)):
        gradient, draws = torch.full((2,), size), (5 * step, 5 * step + 5)
        actions = list(node.handle(GradientReady(1.0, gradient, 5, 1.0, (), 0, draws, 0.1, 0.0, True)))
    (sent,) = sends(actions, GradientReport)
    assert sent.message.gradient.tolist() == [3.0, 3.0]  # type: ignore[attr-defined]
    before = node._parameters.clone()
    deliver(node, 0, SourceGradients(torch.full((2,), 4.0), 1, 0, 20, 2))
    torch.testing.assert_close(node._parameters, before - 0.1 * 4.0)
    assert not node._fragments[0].unmerged, "the exchange is answered"
    deliver(node, 0, Replace(torch.full((2,), 7.0), (), (), "", 2, 1, 9))
    deliver(node, 0, SourceGradients(torch.full((2,), 4.0), 2, 0, 20, 2))
    assert torch.equal(node._parameters, torch.full((2,), 7.0)), "gradients for the member before its replacement"
    assert not cast(torch.Tensor, node._gradients).any()


@pytest.mark.slow
@pytest.mark.parametrize("sources", [ob.parts.AllMembers(), ob.parts.Best(), ob.parts.Better()])
def test_a_population_that_exchanges_gradients_learns(sources: ob.parts.Sources) -> None:
    strategy = ob.Population(every=4, batch=16, sources=sources, send=ob.parts.Gradients(), optimizer=ob.SGD(lr=0.05))
    workload = ob.workloads.DigitsLogistic(split=ob.workloads.Sharded()).build()
    scene = play(strategy, workload, until=ob.Samples(12_000), evaluate=ob.EveryUpdates(50))
    alone = play(
        dataclasses.replace(strategy, every=10**6), workload, until=ob.Samples(12_000), evaluate=ob.EveryUpdates(50)
    )
    assert scene.of(Evaluation)[-1].loss < alone.of(Evaluation)[-1].loss


def member(**settings: Any) -> PopulationMember:
    node = ob.Population(**{"every": 1, "optimizer": ob.SGD(lr=0.1), **settings}).node(context_of(1))
    assert isinstance(node, PopulationMember)
    list(node.handle(Started(0.0)))
    deliver(node, 0, Begin(torch.empty(0), (), 0, 0, 0, 2, 0, ()))
    return node


def test_a_member_ignores_answers_from_before_a_replacement_and_overtaken_replacements() -> None:
    node = member()
    for exchange in range(2):
        gradient = GradientReady(1.0, torch.ones(2), 5, 1.0, (), 0, (5 * exchange, 5 * exchange + 5), 0.1, 0.0, True)
        assert sends(list(node.handle(gradient)), LocalParameters)
    deliver(node, 0, Replace(torch.full((2,), 7.0), (), (), "", 2, 2, 9))
    deliver(node, 0, Replace(torch.full((2,), 3.0), (), (), "", 2, 1, 8))
    deliver(node, 0, GlobalUpdate(torch.zeros(2), (), 10, 0, 1, 0, 2))
    assert torch.equal(node._parameters, torch.full((2,), 7.0))
    assert (node._replacements, node._settings) == (2, 2)


def test_the_snapshot_of_a_member_that_has_diverged_is_its_last_report() -> None:
    node = member()
    list(node.handle(GradientReady(1.0, torch.ones(2), 5, 1.0, (), 0, (0, 5), 0.1, 0.0, True)))
    reported = node._parameters.clone()
    node._parameters.fill_(math.inf)
    (snapshot,) = sends(deliver(node, 0, SnapshotRequest()), Snapshot)
    assert torch.equal(snapshot.message.tensors()[0], reported)


def test_bad_settings_are_refused_in_a_sentence() -> None:
    with pytest.raises(ob.ConfigurationError, match="in multiples of the best score, so 1 or more"):
        ob.Population(preempt_above=0.5)
    with pytest.raises(ob.ConfigurationError, match="send values or gradients; for differences use"):
        ob.Population(send=ob.parts.Differences())
    with pytest.raises(ob.ConfigurationError, match="2 rates for 1 workers"):
        ob.Population(rates=(1.0, 2.0)).processes(1)
