"""The named gossip strategies: peers train their own replicas, each at its own speed, and average in pairs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from offbeat.core.randomness import stream
from offbeat.core.strategy import Node, NodeContext
from offbeat.strategies.gossip.gossip_parts import (
    Acid,
    FirstAvailable,
    GossipBase,
    Matchings,
    Momentum,
    Partner,
    Poisson,
    Random,
    Regular,
)
from offbeat.strategies.gossip.membership_view import linked_ranks
from offbeat.strategies.gossip.peer import Peer
from offbeat.topology.graphs import Complete, Cycle, ExponentialGraph, Graph, Star


@dataclass(frozen=True)
class Gossip(GossipBase, name="gossip"):
    """Every rank computes gradients and steps its own optimizer; there is no hub."""

    summary: ClassVar[str] = "no hub: every peer steps its own replica and averages with one neighbour at a time"
    paper: ClassVar[str] = "Lian et al., ICML 2018 (AD-PSGD)"
    figure_style: ClassVar[int | None] = 7

    @classmethod
    def random_settings(cls, seed: int, workers: int) -> dict[str, Any]:
        random = stream(seed, "fuzz gossip")
        graphs: list[Graph] = [Cycle(), Complete(), Star()]
        if workers & (workers - 1) == 0:
            graphs.append(ExponentialGraph())
        graph = graphs[int(random.integers(len(graphs)))]
        matched = workers % 2 == 0 and not (isinstance(graph, Star) and workers > 2)
        partners: list[Partner] = [Random(), FirstAvailable(), Matchings() if matched else Random()]
        accelerated = random.random() < 0.6 and not isinstance(graph, Complete)
        return {
            "graph": graph,
            "rate": float(10 ** random.uniform(-1, 0.7)),
            "partner": partners[int(random.integers(3))],
            "clock": [Poisson(), Regular()][int(random.integers(2))],
            "momentum": Acid() if accelerated else None,
        }

    def computes(self, rank: int) -> bool:
        return True

    def peers(self, rank: int, processes: int) -> Iterable[int]:
        return linked_ranks(self.graph, rank, processes)

    @property
    def is_decentralized(self) -> bool:
        return True

    @property
    def is_elastic(self) -> bool:
        return False

    def for_own_steps(self) -> Self:
        self.check_no_optimizer(self.optimizer)
        return self

    def node(self, context: NodeContext) -> Node:
        return Peer(self, context)


@dataclass(frozen=True)
class GossipAcid(Gossip, name="gossip-acid"):
    """Gossip with A²CiD²: averaging with momentum."""

    summary: ClassVar[str] = "gossip with momentum of averaging: keeps peers with different data closer together"
    paper: ClassVar[str] = "Nabli, Belilovsky, Oyallon, NeurIPS 2023 (A²CiD²)"
    figure_style: ClassVar[int | None] = 10

    momentum: Momentum | None = Acid()
    """momentum of averaging: acid (A²CiD²), or none"""
