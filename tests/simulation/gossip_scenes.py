"""Peers that disagree from the start, and what their averaging conserves and how fast it brings them together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

import offbeat as ob
from offbeat.core.actions import Action, Send
from offbeat.core.events import Event, GradientReady, MessageArrived
from offbeat.lab.simulated_runs import one_thread
from offbeat.records.files import MemoryWriter
from offbeat.simulation.simulator import Simulation
from offbeat.simulation.state import Scenario
from offbeat.strategies.gossip.gossip_messages import Answer
from offbeat.strategies.gossip.peer import Peer
from offbeat.strategies.gossip.replica import SHARE

BATCH = 8


class Point(nn.Module):
    """Parameters and nothing else: its gradient is zero, so that only averaging moves them."""

    def __init__(self, dimension: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(dimension, dtype=dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.place.sum() * 0.0).expand(len(inputs))


def still(dimension: int, dtype: torch.dtype = torch.float32) -> ob.Workload:
    """A workload that teaches nothing."""
    data = (torch.zeros(64, 1, dtype=dtype), torch.zeros(64, dtype=dtype))
    return ob.Workload(lambda: Point(dimension, dtype), lambda outputs, targets: outputs, data, label="still")


class Disagreement:
    """Puts every peer somewhere else once all are training, and looks on.

    `look(time in gradient times since then, simulation)` is called after every event from then on.
    """

    def __init__(self, seed: int, gradient_seconds: float, look: Callable[[float, Disagreement], None]) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._seconds = gradient_seconds
        self._look = look
        self._moved: set[int] = set()
        self._since: float | None = None
        self.in_flight: dict[tuple[int, int], tuple[Tensor, float]] = {}
        """(initiator, sequence) → the difference that it has not taken its share of yet, and α̃"""
        self.simulation: Simulation

    def before(self, simulation: Simulation, rank: int, event: Event) -> None:
        self.simulation = simulation
        if isinstance(event, GradientReady) and rank not in self._moved:
            node = simulation.processes[rank].node
            state = node.state()
            state["parameters"] = torch.randn(
                state["parameters"].shape, generator=self._random, dtype=state["parameters"].dtype
            )
            other = simulation.new_node(rank, simulation.processes[rank].life)
            other.restore(state)
            simulation.processes[rank].node = other
            self._moved.add(rank)
            if len(self._moved) == simulation.size:
                self._since = simulation.now
        if isinstance(event, MessageArrived) and isinstance(event.message, Answer):
            self.in_flight.pop((rank, event.message.sequence), None)

    def after(self, simulation: Simulation, rank: int, event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, Answer):
                message = action.message
                key = (action.to, message.sequence)
                self.in_flight[key] = message.difference.to(torch.float64), message.alpha_tilde
        if self._since is not None:
            self._look((simulation.now - self._since) / self._seconds, self)

    def replicas(self) -> Tensor:
        """All parameters, a row for each peer."""
        states = [process.node.replica() for process in self.simulation.processes]
        return torch.stack([state for state in states if state is not None]).to(torch.float64)

    def distance(self) -> float:
        """The mean over peers of the squared distance to their mean."""
        replicas = self.replicas()
        return float((replicas - replicas.mean(0)).square().sum(1).mean())

    def conserved(self) -> Tensor:
        """The sum over peers of (x + x̃)/2, with the shares that are still under way."""
        total = torch.zeros_like(self.replicas()[0])
        for process in self.simulation.processes:
            assert isinstance(process.node, Peer)
            acid_offset = process.node._replica.acid_offset
            total += process.node.replica().to(torch.float64)
            if acid_offset is not None:
                total += 0.5 * acid_offset.to(torch.float64)
        for difference, alpha_tilde in self.in_flight.values():
            total -= (SHARE + 0.5 * (alpha_tilde - SHARE)) * difference
        return total


def average(
    strategy: ob.Gossip,
    peers: int,
    gradients: int,
    look: Callable[[float, Disagreement], None],
    *,
    seed: int = 0,
    latency: float = 0.0,
    cluster: ob.Cluster | None = None,
    dimension: int = 40,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Let peers that disagree average for about so many gradients each; `latency` is in gradient times."""
    cluster = cluster or ob.Cluster(seconds_per_sample=1.0 / BATCH)
    seconds = cluster.seconds_per_sample * BATCH
    cluster = dataclasses.replace(cluster, link=dataclasses.replace(cluster.link, latency_seconds=latency * seconds))
    strategy = dataclasses.replace(strategy, batch=BATCH, microbatch=BATCH, optimizer=ob.SGD(lr=0.0))
    scenario = Scenario(
        strategy=strategy,
        workload=still(dimension, dtype),
        cluster=cluster,
        workers=peers,
        until=ob.Samples(peers * gradients * BATCH),
        seed=seed,
    )
    with one_thread():
        Simulation(scenario, MemoryWriter(), observer=Disagreement(seed, seconds, look)).run()
