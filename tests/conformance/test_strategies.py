"""Every strategy on random clusters, and sabotaged ones that the checks must detect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import offbeat as ob
from offbeat.core.actions import Action, Finish, Report, Send
from offbeat.core.events import Event, MessageArrived
from offbeat.core.messages import Stop
from offbeat.core.sample_ledger import SampleLedger
from offbeat.records.schema import Update
from offbeat.strategies.hub.hub_server import HubServer
from offbeat.strategies.hub.hub_worker import Gradient, HubWorker, Parameters, Welcome
from offbeat.testing import Violation, check_strategy, draw_case, replay, strategy_conformance

VARIED = {"gossip-acid", "local-sgd", "serial"}
"""Strategies that differ from a checked one by a default that its cases vary."""
NAMES = sorted({name for name, cls in ob.Strategy.members.items() if cls.__module__.startswith("offbeat.")} - VARIED)
CHUNK = 4
CHUNKS = 10
"""Chunks of seeds per strategy; `make fuzz` continues with the next seed."""


def test_five_hundred_cases_are_checked() -> None:
    assert len(NAMES) * CHUNKS * CHUNK >= 500
    assert set(ob.Strategy.members) > VARIED


@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, CHUNKS))])
@pytest.mark.parametrize("name", NAMES)
def test_every_invariant_holds_on_random_clusters(name: str, chunk: int) -> None:
    strategy = ob.Strategy.members[name]()
    assert check_strategy(strategy, seeds=range(chunk * CHUNK, (chunk + 1) * CHUNK)) == CHUNK


@pytest.mark.parametrize("collect", [ob.Hub().collect])
def test_a_composition_of_parts_is_checked_as_well(collect: Any) -> None:
    assert check_strategy(ob.Hub(compute=ob.Seconds(0.2, samples_max=64), collect=collect), seeds=range(20)) == 20


def test_cases_are_a_pure_function_of_their_seed() -> None:
    first, again = draw_case(ob.AsyncTimed(), 5).experiment, draw_case(ob.AsyncTimed(), 5).experiment
    assert (first.strategy, first.cluster, first.workers) == (again.strategy, again.cluster, again.workers)
    assert draw_case(ob.AsyncTimed(), 6).experiment.cluster != first.cluster


def test_random_settings_follow_from_the_types_of_fields_unless_a_strategy_draws_its_own() -> None:
    @dataclass(frozen=True)
    class Typed(ob.FixedMinibatch):
        restarts: bool = False
        sources: ob.parts.Sources | None = None

    drawn = [draw_case(Typed(batch=1), seed, faults=False).experiment.strategy for seed in range(40)]
    assert all(isinstance(strategy, Typed) for strategy in drawn)
    assert {strategy.restarts for strategy in drawn if isinstance(strategy, Typed)} == {False, True}
    sources = {strategy.sources for strategy in drawn if isinstance(strategy, Typed)}
    assert sources == {None, ob.parts.AllMembers(), ob.parts.Best(), ob.parts.Better()}
    assert {strategy.nonfinite_max for strategy in drawn if isinstance(strategy, Typed)} == {5}, "left as it is"
    parts = ob.Hub(waits=False, collect=ob.parts.Messages(2))
    assert all(draw_case(parts, seed).experiment.strategy.waits is False for seed in range(8))  # type: ignore[attr-defined]


def test_a_replayed_case_can_be_traced(capsys: pytest.CaptureFixture[str]) -> None:
    replay("apam", 3, trace=True)
    assert "GradientReady(" in capsys.readouterr().out


# Sabotaged nodes


@dataclass(frozen=True)
class Sabotaged(ob.Strategy):
    """A sound strategy whose nodes are modified when they are constructed."""

    sound: ob.Strategy = ob.AsyncFixed(batch=16)
    tamper: Callable[[Any], None] = lambda node: None

    def processes(self, workers: int) -> int:
        return self.sound.processes(workers)

    def computes(self, rank: int) -> bool:
        return self.sound.computes(rank)

    def peers(self, rank: int, processes: int) -> Iterable[int]:
        return self.sound.peers(rank, processes)

    @property
    def staleness_bound(self) -> int | None:
        return self.sound.staleness_bound

    def with_default_optimizer(self, optimizer: ob.nodes.Optimizer) -> Sabotaged:
        return dataclasses.replace(self, sound=self.sound.with_default_optimizer(optimizer))

    def node(self, context: ob.nodes.NodeContext) -> ob.nodes.Node:
        node = self.sound.node(context)
        self.tamper(node)
        return node


def on_worker(change: Callable[[HubWorker, Event], Event]) -> Callable[[Any], None]:
    def tamper(node: Any) -> None:
        if isinstance(node, HubWorker):
            sound = node.handle
            node.handle = lambda event: sound(change(node, event))  # type: ignore[method-assign]

    return tamper


def on_hub(change: Callable[[HubServer, Event], Event]) -> Callable[[Any], None]:
    def tamper(node: Any) -> None:
        if isinstance(node, HubServer):
            sound = node.handle
            node.handle = lambda event: sound(change(node, event))  # type: ignore[method-assign]

    return tamper


def starts_its_data_from_the_beginning(worker: HubWorker, event: Event) -> Event:
    if isinstance(event, MessageArrived) and isinstance(event.message, Welcome):
        message = dataclasses.replace(event.message, draw=0, done=())
        return dataclasses.replace(event, message=message, keep=lambda: message)
    return event


def skips_data_when_welcomed(worker: HubWorker, event: Event) -> Event:
    if isinstance(event, MessageArrived) and isinstance(event.message, Welcome):
        message = dataclasses.replace(event.message, draw=event.message.draw + 5)
        return dataclasses.replace(event, message=message, keep=lambda: message)
    return event


def keeps_a_lease(worker: HubWorker, event: Event) -> Event:
    if isinstance(event, MessageArrived) and isinstance(event.message, Parameters | Welcome | Stop):
        return dataclasses.replace(event, keep=lambda: event.message)
    return event


def applies_nonfinite_gradients(hub: HubServer, event: Event) -> Event:
    if isinstance(event, MessageArrived) and isinstance(event.message, Gradient) and not event.message.finite:
        like = hub._parameters
        message = dataclasses.replace(event.message, finite=True, gradient=torch.zeros_like(like))
        return dataclasses.replace(event, message=message, keep=lambda: message)
    return event


def changes_sent_tensors(hub: HubServer, event: Event) -> Event:
    hub._result()[0].mul_(1.0)
    return event


def invents_versions(hub: HubServer, event: Event) -> Event:
    hub._version += isinstance(event, MessageArrived)
    return event


def loses_the_ledger(hub: HubServer, event: Event) -> Event:
    if isinstance(event, MessageArrived) and isinstance(event.message, Gradient):
        hub._ledgers[event.source] = SampleLedger([(0, event.message.draws[0])] if event.message.draws[0] else [])
    return event


def claims_more_than_it_computed(worker: HubWorker, event: Event) -> Event:
    worker._draw += 7 if isinstance(event, MessageArrived) and isinstance(event.message, Stop) else 0
    return event


def keeps_its_own_position_when_welcomed(worker: HubWorker, event: Event) -> Event:
    if isinstance(event, MessageArrived) and isinstance(event.message, Welcome) and worker._draw > event.message.draw:
        return dataclasses.replace(event, message=event.message, keep=lambda: further(event.message, worker._draw))
    return event


def further(welcome: Any, draw: int) -> Welcome:
    return dataclasses.replace(welcome, draw=draw, done=())


def treats_stale_gradients_as_fresh(hub: HubServer, event: Event) -> Event:
    if isinstance(event, MessageArrived) and isinstance(event.message, Gradient):
        message = dataclasses.replace(event.message, version=hub._version)
        return dataclasses.replace(event, message=message, keep=lambda: message)
    return event


def does_not_wait_for_stopped(hub: HubServer, event: Event) -> Event:
    if hub._unconfirmed is not None:
        hub._unconfirmed.clear()
    return event


def counts_twice(hub: HubServer, event: Event) -> Event:
    hub._samples += isinstance(event, MessageArrived)
    return event


SABOTAGE = {
    "hub treats stale gradients as fresh": on_hub(treats_stale_gradients_as_fresh),
    "hub does not wait for Stopped": on_hub(does_not_wait_for_stopped),
    "hub counts samples twice": on_hub(counts_twice),
    "worker keeps its own position when welcomed": on_worker(keeps_its_own_position_when_welcomed),
    "worker starts its data from the beginning": on_worker(starts_its_data_from_the_beginning),
    "worker skips data when welcomed": on_worker(skips_data_when_welcomed),
    "worker keeps a lease": on_worker(keeps_a_lease),
    "worker claims more than it computed": on_worker(claims_more_than_it_computed),
    "hub applies gradients that are not finite": on_hub(applies_nonfinite_gradients),
    "hub changes sent tensors": on_hub(changes_sent_tensors),
    "hub invents versions": on_hub(invents_versions),
    "hub loses the ledger of a worker": on_hub(loses_the_ledger),
}


@pytest.mark.parametrize("fault", SABOTAGE)
def test_a_sabotaged_node_is_detected(fault: str) -> None:
    with pytest.raises(Violation):
        check_strategy(Sabotaged(tamper=SABOTAGE[fault]), seeds=range(60))


@pytest.mark.parametrize("field", ["ledgers", "optimizer", "collected", "samples", "live", "reported"])
def test_a_hub_that_loses_part_of_its_state_is_detected(field: str) -> None:
    def tamper(node: Any) -> None:
        if isinstance(node, HubServer):
            kept = node.state()[field]
            restore = node.restore
            node.restore = lambda state: restore({**state, field: kept})  # type: ignore[method-assign]

    sound = ob.FixedMinibatch(batch=16, optimizer=ob.Adam(lr=0.01))
    with pytest.raises(Violation, match="was restored from"):
        check_strategy(Sabotaged(sound=sound, tamper=tamper), seeds=range(60))


@pytest.mark.parametrize(
    "field",
    [
        "latest",
        "draw",
        "computing",
        "in_flight",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("stop", "discard")),
    ],
)
def test_a_worker_that_loses_part_of_its_state_is_detected(field: str) -> None:
    def tamper(node: Any) -> None:
        if isinstance(node, HubWorker):
            kept = node.state()[field]
            restore = node.restore
            node.restore = lambda state: restore({**state, field: kept})  # type: ignore[method-assign]

    with pytest.raises(Violation, match="was restored from"):
        check_strategy(Sabotaged(sound=ob.AsyncFixed(batch=16, in_flight_max=1), tamper=tamper), seeds=range(60))


def test_a_run_that_never_ends_is_detected() -> None:
    def tamper(node: Any) -> None:
        if isinstance(node, HubWorker):
            sound = node.handle
            node.handle = lambda event: [a for a in sound(event) if not isinstance(a, Finish)]  # type: ignore[method-assign]

    with pytest.raises(Violation, match="had not finished"):
        check_strategy(Sabotaged(tamper=tamper), seeds=range(5))


def test_an_update_with_a_wrong_count_is_detected() -> None:
    def tamper(node: Any) -> None:
        if isinstance(node, HubServer):
            sound = node.handle

            def handle(event: Event) -> list[Action]:
                return [wrong(action) for action in sound(event)]

            node.handle = handle  # type: ignore[method-assign]

    def wrong(action: Action) -> Action:
        if isinstance(action, Report) and isinstance(action.record, Update):
            counted = {name: getattr(action.record, name) for name in action.record.__struct_fields__}
            return Report(Update(**{**counted, "samples": action.record.samples + 1}))
        return action

    with pytest.raises(Violation, match="samples"):
        check_strategy(Sabotaged(tamper=tamper), seeds=range(5))


def test_two_computations_at_once_are_detected() -> None:
    def tamper(node: Any) -> None:
        if isinstance(node, HubWorker):
            sound = node.handle

            def handle(event: Event) -> list[Action]:
                actions = list(sound(event))
                return actions + [a for a in actions if not isinstance(a, Send | Report)]

            node.handle = handle  # type: ignore[method-assign]

    with pytest.raises(Violation, match="second Compute"):
        check_strategy(Sabotaged(tamper=tamper), seeds=range(5))


def test_the_line_that_repeats_a_failure_is_a_command_where_possible() -> None:
    line = strategy_conformance._repeat_command
    assert line(ob.AsyncTimed(), 7, True, True) == "offbeat replay async-timed --seed 7"
    assert line(ob.AsyncTimed(), 7, True, False) == "offbeat replay async-timed --seed 7 --no-faults"
    assert line(ob.AsyncTimed(hub_seconds=9.0), 7, True, True).startswith("offbeat.testing.check_case(")
    assert line(ob.AsyncTimed(), 7, False, True).startswith("offbeat.testing.check_case(")
    assert line(Sabotaged(), 7, True, True).endswith("test_strategies.py:Sabotaged --seed 7")


def test_the_line_that_repeats_a_failure_is_printed() -> None:
    @dataclass(frozen=True)
    class Named(Sabotaged, name="broken-on-purpose"):
        tamper: Callable[[Any], None] = on_hub(changes_sent_tensors)

    try:
        with pytest.raises(Violation, match=r"repeat it with: .*draw_case\(.*Named\(.*, 0, faults=True"):
            check_strategy(Named(), seeds=range(1))
        with pytest.raises(Violation, match="broken-on-purpose, seed 0"):
            replay("broken-on-purpose", 0)
    finally:
        del ob.Strategy.members["broken-on-purpose"]
