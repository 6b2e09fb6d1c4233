"""Simulations of peers whose parameters differ and whose gradients are zero, so that only averaging changes them."""

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
from offbeat.strategies.gossip.gossip_messages import Answer
from offbeat.strategies.gossip.peer import Peer
from offbeat.strategies.gossip.replica import ALPHA

BATCH = 8


class Point(nn.Module):
    """A parameter vector with gradient zero, so that only averaging changes it."""

    def __init__(self, dimension: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(dimension, dtype=dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.values.sum() * 0.0).expand(len(inputs))


def zero_gradient_workload(dimension: int, dtype: torch.dtype = torch.float32) -> ob.Workload:
    """A workload whose gradients are zero."""
    data = (torch.zeros(64, 1, dtype=dtype), torch.zeros(64, dtype=dtype))
    return ob.Workload(lambda: Point(dimension, dtype), lambda outputs, targets: outputs, data, label="zero-gradient")


class Disagreement:
    """Observer that sets each peer to random parameters at its first gradient, and then measures after every event.

    `measure(time since the last peer was set, in gradient times; this observer)` is called after every event.
    """

    def __init__(self, seed: int, gradient_seconds: float, measure: Callable[[float, Disagreement], None]) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._seconds = gradient_seconds
        self._measure = measure
        self._randomized: set[int] = set()
        self._since: float | None = None
        self.in_flight: dict[tuple[int, int], tuple[Tensor, float]] = {}
        """(initiator, sequence) → α̃ and the difference whose share the initiator has not applied yet"""
        self.simulation: Simulation

    def before(self, simulation: Simulation, rank: int, event: Event) -> None:
        self.simulation = simulation
        if isinstance(event, GradientReady) and rank not in self._randomized:
            node = simulation.processes[rank].node
            state = node.state()
            parameters = state["replica"]["parameters"]
            parameters.copy_(torch.randn(parameters.shape, generator=self._random, dtype=parameters.dtype))
            randomized = simulation.new_node(rank, simulation.processes[rank].life)
            randomized.restore(state)
            simulation.processes[rank].node = randomized
            self._randomized.add(rank)
            if len(self._randomized) == simulation.size:
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
            self._measure((simulation.now - self._since) / self._seconds, self)

    def replicas(self) -> Tensor:
        """Parameters of all peers, one row each."""
        states = [process.node.replica() for process in self.simulation.processes]
        return torch.stack([state for state in states if state is not None]).to(torch.float64)

    def distance(self) -> float:
        """Consensus distance: mean over peers of the squared distance to their mean."""
        replicas = self.replicas()
        return float((replicas - replicas.mean(0)).square().sum(1).mean())

    def conserved(self) -> Tensor:
        """Sum over peers of (x + x̃)/2, including shares in flight."""
        total = torch.zeros_like(self.replicas()[0])
        for process in self.simulation.processes:
            assert isinstance(process.node, Peer)
            acid_offset = process.node._replica.observed_offset()
            total += process.node.replica().to(torch.float64)
            if acid_offset is not None:
                total += 0.5 * acid_offset.to(torch.float64)
        for difference, alpha_tilde in self.in_flight.values():
            total -= (ALPHA + 0.5 * (alpha_tilde - ALPHA)) * difference
        return total


def average(
    strategy: ob.Gossip,
    peers: int,
    gradients: int,
    measure: Callable[[float, Disagreement], None],
    *,
    seed: int = 0,
    latency: float = 0.0,
    cluster: ob.Cluster | None = None,
    dimension: int = 40,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Let peers with different parameters average for `gradients` gradients each; `latency` is in gradient times."""
    cluster = cluster or ob.Cluster(seconds_per_sample=1.0 / BATCH)
    seconds = cluster.seconds_per_sample * BATCH
    cluster = dataclasses.replace(cluster, link=dataclasses.replace(cluster.link, latency_seconds=latency * seconds))
    strategy = dataclasses.replace(strategy, batch=BATCH, microbatch=BATCH, optimizer=ob.SGD(lr=0.0))
    experiment = ob.Experiment(
        strategy=strategy,
        workload=zero_gradient_workload(dimension, dtype),
        cluster=cluster,
        workers=peers,
        until=ob.Samples(peers * gradients * BATCH),
        seed=seed,
        evaluate=None,
    )
    with one_thread():
        Simulation(experiment, MemoryWriter(), observer=Disagreement(seed, seconds, measure)).run()
