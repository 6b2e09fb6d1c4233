"""Gossip by name: peers that train replicas of their own, each at its own pace, and average in pairs underneath."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.configuration import option
from offbeat.core.optimizers import Optimizer
from offbeat.core.strategy import Node, NodeContext, Strategy
from offbeat.core.validation import check_types, require, require_positive
from offbeat.strategies.gossip.gossip_parts import Acid, Clock, Matchings, Momentum, Partner, Poisson, Random
from offbeat.strategies.gossip.gossip_view import linked_to
from offbeat.strategies.gossip.peer import Peer
from offbeat.topology import Complete, Cycle, Graph, Topology


@dataclass(frozen=True)
class Gossip(Strategy, name="gossip"):
    """Every rank computes, and steps an optimizer of its own; there is no hub."""

    summary: ClassVar[str] = "no hub: every peer steps its own replica and averages with one neighbour at a time"
    paper: ClassVar[str] = "Lian et al., ICML 2018 (AD-PSGD)"

    graph: Graph = option(Cycle(), "who may average with whom: cycle, exponential, complete, star, or a file of edges")
    rate: float = option(1.0, "averagings that a peer takes part in per gradient")
    partner: Partner = option(Random(), "who of them: random, first-available, or by turns (matchings)")
    clock: Clock = option(Poisson(), "when: at random (poisson) or at equal intervals (regular)")
    momentum: Momentum | None = option(None, "momentum of averaging: acid (A²CiD²), or none")
    optimizer: Optimizer | None = option(None, "how every peer updates; none: the one that suits the workload")
    batch: int = option(64, "samples per gradient")
    microbatch: int = option(16, "samples per forward and backward call")
    nonfinite_max: int = option(5, "gradients in a row that may be NaN or infinite before a peer gives up")
    patience_seconds: float = option(60.0, "seconds that peers wait for each other at the start")

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "rate", "batch", "microbatch", "nonfinite_max", "patience_seconds")
        require(
            self.momentum is None or not isinstance(self.graph, Complete),
            "acid has nothing to gain on a complete graph, where everybody is everybody's neighbour; choose "
            "--graph exponential or cycle, or leave the momentum out",
        )

    def processes(self, workers: int) -> int:
        self.graph.check(workers)
        if isinstance(self.partner, Matchings):
            self.matchings(workers)
        return workers

    def computes(self, rank: int) -> bool:
        return True

    def peers(self, rank: int, processes: int) -> Iterable[int]:
        return linked_to(self.graph, rank, processes)

    @property
    def is_decentralized(self) -> bool:
        return True

    @property
    def is_elastic(self) -> bool:
        return False

    def node(self, context: NodeContext) -> Node:
        return Peer(self, context)

    def matchings(self, size: int) -> tuple[dict[int, int], ...]:
        """The cycle of perfect matchings at that size."""
        return _matchings(self.graph, size)


@functools.lru_cache(maxsize=8)
def _matchings(graph: Graph, size: int) -> tuple[dict[int, int], ...]:
    return Topology(graph, size).matchings() if size > 1 else ()


@dataclass(frozen=True)
class GossipAcid(Gossip, name="gossip-acid"):
    """Gossip with A²CiD²: averaging that goes on in the direction it went."""

    summary: ClassVar[str] = "gossip whose averaging has momentum: keeps peers together that see different data"
    paper: ClassVar[str] = "Nabli, Belilovsky, Oyallon, NeurIPS 2023 (A²CiD²)"

    momentum: Momentum | None = option(Acid(), "momentum of averaging: acid (A²CiD²), or none")
