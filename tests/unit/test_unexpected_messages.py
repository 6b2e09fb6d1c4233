"""A message of a kind that a node does not know is its sender's error; a known kind that comes late is ignored."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import offbeat as ob
from offbeat.core.events import MessageArrived, PeerJoined, Started
from offbeat.core.messages import Message, Stop, Stopped
from offbeat.core.strategy import Node
from offbeat.errors import ContractViolation, UnexpectedMessage
from offbeat.records.files import MemoryWriter
from offbeat.simulation.simulator import Simulation
from offbeat.strategies.gossip.gossip_messages import CopyReply, Declined, PartialSum
from offbeat.strategies.hub.hub_worker import Parameters
from offbeat.strategies.local_training import LocalParameters
from offbeat.strategies.population.population_member import Replace
from offbeat.testing.strategy_conformance import is_equal, plain_copy

NAMES = sorted(name for name, cls in ob.Strategy.members.items() if cls.__module__.startswith("offbeat."))
WORKERS = 3


@dataclass(frozen=True)
class Foreign(Message):
    """A message of no strategy."""


def simulation(strategy: ob.Strategy) -> Simulation:
    workload = ob.workloads.Quadratic(dimension=4)
    experiment = ob.Experiment(
        strategy=strategy.with_default_optimizer(ob.SGD(lr=0.1)).with_default_timing(0.01),
        workload=workload.build(),
        cluster=ob.Cluster(),
        workers=WORKERS,
        until=ob.Samples(1000),
        seed=0,
        evaluate=None,
    )
    return Simulation(experiment, MemoryWriter())


def arrive(node: Node, source: int, message: Message) -> list[object]:
    return list(node.handle(MessageArrived(1.0, source, message, lambda: message)))


def started(node: Node, peers: range) -> Node:
    list(node.handle(Started(0.0)))
    for peer in peers:
        list(node.handle(PeerJoined(0.5, peer, 0)))
    return node


@pytest.mark.parametrize("name", NAMES)
def test_every_node_names_the_sender_of_a_kind_that_it_does_not_know_and_does_not_change(name: str) -> None:
    processes = simulation(ob.Strategy.members[name]()).processes
    for rank, process in enumerate(processes):
        source = (rank + 1) % len(processes) if len(processes) > 1 else 7
        before = plain_copy(process.node.state(), "state")
        with pytest.raises(UnexpectedMessage) as caught:
            arrive(process.node, source, Foreign())
        assert (caught.value.source, caught.value.kind, caught.value.receiver) == (source, "Foreign", rank)
        assert is_equal(before, plain_copy(process.node.state(), "state"))


def test_the_sentence_says_who_sent_what_and_what_to_do() -> None:
    error = UnexpectedMessage(3, "Offer", 0)
    assert isinstance(error, ContractViolation)
    assert str(error) == ("rank 3 sent Offer to rank 0, which does not expect it; give every rank the same strategy")


def test_messages_of_another_family_are_refused_also_where_they_extend_a_known_kind() -> None:
    vector = torch.zeros(4)
    of_population = LocalParameters(vector, (), 0, 0, 1, (), (), 0, 1.0, 0, ())
    with pytest.raises(UnexpectedMessage, match="rank 2 sent LocalParameters to rank 0"):
        arrive(simulation(ob.LocalSGD()).processes[0].node, 2, of_population)
    to_a_member = Replace(vector, (), (), "", 1, 1, 1)
    with pytest.raises(UnexpectedMessage, match="rank 2 sent Replace to rank 0"):
        arrive(simulation(ob.Population()).processes[0].node, 2, to_a_member)
    for strategy, rank in ((ob.AsyncFixed(), 0), (ob.LocalSGD(), 0), (ob.Population(), 0), (ob.Gossip(), 1)):
        node = simulation(strategy).processes[rank].node
        with pytest.raises(UnexpectedMessage, match="sent Parameters"):
            arrive(node, 2, Parameters(vector, (), 0, ob.Samples(8)))
    for strategy in (ob.AsyncFixed(), ob.LocalSGD(), ob.Population()):
        with pytest.raises(UnexpectedMessage, match="rank 0 sent Stopped to rank 1"):
            arrive(simulation(strategy).processes[1].node, 0, Stopped(0, 0))
        with pytest.raises(UnexpectedMessage, match="rank 2 sent Stop to rank 0"):
            arrive(simulation(strategy).processes[0].node, 2, Stop(vector, (), 0))


def test_messages_of_a_known_kind_that_come_late_are_ignored() -> None:
    vector = torch.zeros(4)
    worker = started(simulation(ob.AsyncFixed()).processes[1].node, range(1))
    arrive(worker, 0, Stop(vector, (), 3))
    assert arrive(worker, 0, Parameters(vector, (), 2, ob.Samples(8))) == []
    peer = started(simulation(ob.Gossip()).processes[1].node, range(0, 3, 2))
    late: list[Message] = [
        Declined(9, (0, 0, 0)),
        CopyReply(vector, (), (0, 0, 0), 1.0),
        CopyReply(vector, (), (0, 0, 0), 1.0),
        PartialSum(vector, (), 0, 3, 1, 1, (0, 0, 0), False),
        Stop(vector, (), 3),
        Stopped(0, 0),
    ]
    for message in late:
        arrive(peer, 0, message)
