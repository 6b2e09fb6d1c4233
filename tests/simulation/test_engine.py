"""The contract between the simulator and nodes: what it guarantees and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from scenes import play
from torch import Tensor

import offbeat as ob
from offbeat.core.actions import Action, Cancel, ClearTimer, Compute, Evaluate, Finish, Report, Send, SetTimer
from offbeat.core.events import (
    Evaluated,
    Event,
    GradientReady,
    MessageArrived,
    PeerJoined,
    Sent,
    Started,
    StepReady,
    TimerFired,
)
from offbeat.core.messages import Message
from offbeat.errors import ContractViolation
from offbeat.records.files import MemoryWriter
from offbeat.records.schema import Contribution, Update
from offbeat.simulation.simulator import Simulation

Script = Callable[["Scripted", Event], Iterable[Action]]


@dataclass(frozen=True)
class Note(Message):
    values: Tensor
    text: str = ""


@dataclass(frozen=True)
class Duet(ob.Strategy):
    """Two ranks that both compute and run the script of a test."""

    script: Script = lambda node, event: ()
    log: list[tuple[int, Event]] = field(default_factory=list)

    def processes(self, workers: int) -> int:
        return 2

    def computes(self, rank: int) -> bool:
        return True

    def peers(self, rank: int, processes: int) -> Iterable[int]:
        return (1 - rank,)

    def node(self, context: ob.nodes.NodeContext) -> ob.nodes.Node:
        return Scripted(self, context)


class Scripted(ob.nodes.Node):
    def __init__(self, config: Duet, context: ob.nodes.NodeContext) -> None:
        self.config, self.context, self.rank = config, context, context.rank

    def handle(self, event: Event) -> Iterable[Action]:
        self.config.log.append((self.rank, event))
        return self.config.script(self, event)

    def compute(self, budget: Any, microbatch: int = 4) -> Compute:
        return Compute(self.context.parameters, self.context.buffers, 0, 0, budget, microbatch)

    def finish(self) -> Finish:
        return Finish(self.context.parameters, self.context.buffers, 0)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def perform(script: Script, cluster: ob.Cluster | None = None, **settings: Any) -> list[tuple[int, Event]]:
    """Run the script on both ranks; the run ends when each has finished."""
    strategy = Duet(script)
    cluster = cluster or ob.Cluster(seconds_per_sample=0.01)
    play(strategy, cluster=cluster, workers=2, checked=False, **settings)
    return strategy.log


def seen(log: list[tuple[int, Event]], kind: type[Any], rank: int = 0) -> list[Any]:
    return [event for of, event in log if of == rank and isinstance(event, kind)]


def test_started_comes_first_and_peers_join_before_their_messages_arrive() -> None:
    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if isinstance(event, PeerJoined):
            yield Send(1 - node.rank, Note(torch.ones(3)))
        if isinstance(event, MessageArrived):
            yield node.finish()

    log = perform(script)
    for rank in (0, 1):
        assert [type(event) for of, event in log if of == rank][:2] == [Started, PeerJoined]
        assert len(seen(log, MessageArrived, rank)) == 1


def test_a_time_limit_counts_from_the_start_of_the_round_delay_included() -> None:
    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            yield node.compute(ob.Seconds(1.0))
        if isinstance(event, GradientReady):
            yield node.finish()

    sleepy = ob.Cluster(seconds_per_sample=0.01, straggle=ob.stragglers.Mixture(((0.5, 0.0, 1.0),)))
    (ready,) = seen(perform(script, sleepy), GradientReady)
    assert (ready.samples, ready.seconds, ready.induced_seconds) == (52, pytest.approx(1.02), pytest.approx(0.5))


def test_cancel_ends_at_the_next_microbatch_and_still_reports() -> None:
    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            yield node.compute(ob.Samples(400), microbatch=10)
            yield SetTimer("enough", 0.25)
        if isinstance(event, TimerFired):
            yield Cancel()
        if isinstance(event, GradientReady):
            yield node.finish()

    (ready,) = seen(perform(script), GradientReady)
    assert (ready.samples, ready.at, ready.draws) == (30, pytest.approx(0.3), (0, 30))


def test_cancel_during_an_injected_delay_reports_no_samples() -> None:
    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            yield node.compute(ob.Samples(4))
            yield SetTimer("enough", 0.25)
        if isinstance(event, TimerFired):
            yield Cancel()
        if isinstance(event, GradientReady):
            yield node.finish()

    sleepy = ob.Cluster(seconds_per_sample=0.01, straggle=ob.stragglers.Mixture(((5.0, 0.0, 1.0),)))
    (ready,) = seen(perform(script, sleepy), GradientReady)
    assert (ready.samples, ready.at) == (0, pytest.approx(0.25))
    assert torch.count_nonzero(ready.gradient) == 0


def test_the_snapshot_is_taken_when_the_computation_begins() -> None:
    values: dict[int, Tensor] = {}

    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            mine = node.context.parameters.clone()
            action = Compute(mine, (), 0, 0, ob.Samples(8), 8)
            values[node.rank] = mine
            yield action
            yield SetTimer("change", 0.01)
        if isinstance(event, TimerFired):
            values[node.rank].add_(100.0 * node.rank)  # rank 1 changes its parameters during the round
        if isinstance(event, GradientReady):
            yield node.finish()

    # One shard of the same data and no noise: the gradients are equal although one node has changed its parameters.
    workload = ob.workloads.Quadratic(dimension=8, noise=0.0, examples=64).build()
    strategy = Duet(script)
    play(strategy, workload, cluster=ob.Cluster(seconds_per_sample=0.01), workers=2, checked=False)
    zero, one = (seen(strategy.log, GradientReady, rank)[0].gradient for rank in (0, 1))
    torch.testing.assert_close(zero, one)


def test_timers_fire_once_can_be_replaced_and_cleared() -> None:
    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            yield SetTimer("replaced", 1.0)
            yield SetTimer("replaced", 2.0)
            yield SetTimer("cleared", 1.5)
            yield ClearTimer("cleared")
            yield SetTimer("end", 3.0)
        if isinstance(event, TimerFired) and event.name == "end":
            yield node.finish()

    fired = [(event.name, event.at) for event in seen(perform(script), TimerFired)]
    assert fired == [("replaced", 2.0), ("end", 3.0)]


def test_a_queued_message_is_superseded_and_one_in_transmission_is_not() -> None:
    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if isinstance(event, PeerJoined) and node.rank == 0:
            for number in range(4):
                yield Send(1, Note(torch.zeros(244), str(number)), supersedes="newest")
            yield Send(1, Note(torch.zeros(244), "other"))
        if isinstance(event, Sent) and event.key is None:
            yield node.finish()
        if isinstance(event, MessageArrived) and event.message.text == "other":
            yield node.finish()

    thin = ob.Cluster(link=ob.Link(latency_seconds=0.5, bytes_per_second=2000.0))
    log = perform(script, thin)
    arrived = [(event.message.text, event.at) for event in seen(log, MessageArrived, rank=1)]
    # The 2,000 bytes of head and tensor take one second to transmit, then half a second of latency.
    assert arrived == [("0", 1.5), ("3", 2.5), ("other", 3.5)]
    assert [(event.key, event.at) for event in seen(log, Sent)] == [("newest", 1.0), ("newest", 2.0), (None, 3.0)]


def test_evaluation_is_answered_and_takes_no_time() -> None:
    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            yield Evaluate(node.context.parameters, (), 7)
        if isinstance(event, Evaluated):
            yield node.finish()

    (answer,) = seen(perform(script), Evaluated)
    assert (answer.version, answer.at, answer.accuracy) == (7, 0.0, None)
    assert answer.loss > 0


def test_workers_with_their_own_optimizer_report_steps() -> None:
    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            yield node.compute(ob.Samples(8))
        if isinstance(event, StepReady):
            yield node.finish()

    (ready,) = seen(perform(script, user_optimizer=ob.SGD(lr=0.5)), StepReady)
    gradients = perform(lambda node, event: script_for_gradient(node, event))
    (reference,) = seen(gradients, GradientReady)
    torch.testing.assert_close(ready.delta, -0.5 / 8 * reference.gradient)


def script_for_gradient(node: Scripted, event: Event) -> Iterable[Action]:
    if isinstance(event, Started):
        yield node.compute(ob.Samples(8))
    if isinstance(event, GradientReady):
        yield node.finish()


def test_nothing_arrives_after_finish_and_the_peer_gets_peer_lost() -> None:
    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if isinstance(event, PeerJoined) and node.rank == 0:
            yield Send(1, Note(torch.zeros(1), "last words"))
            yield node.finish()
        if type(event).__name__ == "PeerLost":
            yield node.finish()

    log = perform(script)
    assert [type(event).__name__ for of, event in log if of == 1] == [
        "Started",
        "PeerJoined",
        "MessageArrived",
        "PeerLost",
    ]


def test_a_gradient_is_valid_only_while_its_event_is_handled() -> None:
    held: list[Tensor] = []

    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if isinstance(event, GradientReady):
            held.append(event.gradient)
        yield from script_for_gradient(node, event)

    workload = ob.workloads.Quadratic(dimension=8).build()
    experiment = ob.Experiment(workload, Duet(script), workers=2, until=ob.Samples(8), evaluate=None)
    Simulation(experiment, MemoryWriter(), strict=True).run()
    assert all(torch.isnan(gradient).all() for gradient in held)


FORBIDDEN = {
    "asked for a second Compute while one was outstanding": lambda node: [node.compute(ob.Samples(8))] * 2,
    "sent to 5, which its strategy does not name as a peer": lambda node: [Send(5, Note(torch.zeros(1)))],
    "sent to 0, which its strategy does not name as a peer": lambda node: [Send(0, Note(torch.zeros(1)))],
    "set the timer 'x' to -1.0 s, but a timer needs 0 s or more": lambda node: [SetTimer("x", -1.0)],
    "set the timer 'x' to nan s, but a timer needs 0 s or more": lambda node: [SetTimer("x", float("nan"))],
    "asked for 'finish', which is not an action": lambda node: ["finish"],
}


@pytest.mark.parametrize("sentence", FORBIDDEN)
def test_what_the_contract_forbids_is_refused(sentence: str) -> None:
    def script(node: Scripted, event: Event) -> Iterable[Action]:
        return FORBIDDEN[sentence](node) if isinstance(event, Started) else ()

    with pytest.raises(ContractViolation, match=f"^rank 0 {sentence}$"):
        perform(script)


def test_changing_a_tensor_after_sending_it_is_detected() -> None:
    values = torch.zeros(3)

    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if isinstance(event, PeerJoined) and node.rank == 0:
            yield Send(1, Note(values))
            yield SetTimer("change", 0.5)
        if isinstance(event, TimerFired):
            values.add_(1.0)

    with pytest.raises(ContractViolation, match="changed a tensor of Note after sending it"):
        perform(script, ob.Cluster(link=ob.Link(latency_seconds=1.0)))


def test_compute_is_refused_on_a_rank_that_does_not_compute() -> None:
    class OnlyTheSecond(Duet):
        def computes(self, rank: int) -> bool:
            return rank == 1

    with pytest.raises(ContractViolation, match="rank 0 asked for Compute, but by its strategy it does not"):
        play(OnlyTheSecond(script_for_gradient), workers=1, checked=False)


def test_actions_of_a_busy_rank_are_carried_out_before_its_next_event() -> None:
    received: list[str] = []

    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if node.rank == 0 and isinstance(event, PeerJoined):
            part = Contribution(0, 0, 1, 0)
            yield Report(Update(event.at, 0, 1, 1, 1, 1, 0.1, (part,)))  # busy for a second from here on
            yield Send(1, Note(torch.zeros(1), "decided before"), supersedes="key")
            yield SetTimer("later", 0.0)
        if isinstance(event, TimerFired):
            yield Send(1, Note(torch.zeros(1), "decided after"))
            yield node.finish()
        if isinstance(event, MessageArrived):
            received.append(f"{event.message.text} at {event.at:g}")
            if node.rank == 1 and "after" in event.message.text:
                yield node.finish()

    perform(script, ob.Cluster(seconds_per_update=1.0))
    assert received == ["decided before at 1", "decided after at 1"]


def test_a_stop_is_never_replaced_by_older_parameters() -> None:
    cluster = ob.Cluster(seconds_per_sample=0.01, seconds_per_update=0.1, link=ob.Link(bytes_per_second=300.0))
    strategy = ob.AsyncTimed(worker_seconds=0.3, hub_seconds=0.3)
    for tenth in range(20):
        scene = play(strategy, cluster=cluster, until=ob.Seconds(5.0 + tenth / 10))
        assert scene.outcome.failure is None


def test_a_time_limit_keeps_running_during_a_pause() -> None:
    def script(node: Scripted, event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            yield node.compute(ob.Seconds(2.0), microbatch=10)
        if isinstance(event, GradientReady):
            yield node.finish()

    paused = ob.Cluster(seconds_per_sample=0.01, faults=(ob.faults.Pause(0, 1.05, 5.0),))
    log = perform(script, paused)
    (held_up,), (other,) = seen(log, GradientReady, rank=0), seen(log, GradientReady, rank=1)
    assert (held_up.samples, held_up.at) == (110, pytest.approx(6.1)), "it ends at the first boundary after the pause"
    assert (other.samples, other.at) == (200, pytest.approx(2.0))


def test_a_hub_that_holds_the_parameters_cannot_be_restarted() -> None:
    with pytest.raises(ob.ConfigurationError, match="rank 0 holds the parameters"):
        play(ob.FixedMinibatch(), cluster=ob.Cluster(faults=(ob.faults.Crash(0, 1.0, 2.0),)))


def test_hub_workers_refuse_steps() -> None:
    with pytest.raises(ob.ConfigurationError, match="hand it gradients"):
        play(ob.FixedMinibatch(), user_optimizer=ob.SGD(lr=0.1), checked=False)
