"""Who is there, as one peer sees it; what of the graph is left; and how many samples everybody has taken.

Every peer is linked to its neighbours in the graph, with whom it averages, and to the lowest ranks, the *stewards*. The
lowest that is alive is the *root* of whatever concerns all: the start, the end, who is there. A root that dies is
followed by the next, so nobody is indispensable.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from offbeat.strategies.gossip.gossip_messages import Counts
from offbeat.topology.graphs import Graph
from offbeat.topology.topology import Constants, Topology

COORDINATORS = 16
"""So many of the lowest ranks everybody is linked to: as many may die at once before the rest cannot end together."""


def linked_to(graph: Graph, rank: int, size: int) -> list[int]:
    """The ranks that a rank has a link to."""
    others = range(size) if rank < COORDINATORS else range(min(COORDINATORS, size))
    return sorted({*graph.neighbours(rank, size), *others} - {rank})


@functools.lru_cache(maxsize=32)
def _left(graph: Graph, size: int, there: frozenset[int]) -> Topology:
    """What is left of a graph; many peers of one process, as in a simulation, ask for the same."""
    return Topology(graph, size, there)


class MembershipView:
    def __init__(self, rank: int, size: int, graph: Graph, rate: float) -> None:
        self.rank = rank
        self.size = size
        self.live: dict[int, int] = {}
        """rank → incarnation, of those that there is a link to"""
        self.absent: frozenset[int] = frozenset()
        """Those that there is no link to, and that are said to be gone."""
        self.counts = [0] * size
        self._graph = graph
        self._rate = rate
        self._linked = frozenset(linked_to(graph, rank, size))
        self._topology: Topology | None = None
        self._constants: Constants | None = None

    @property
    def root(self) -> int:
        return min([self.rank, *(rank for rank in self.live if rank < COORDINATORS)])

    @property
    def leads(self) -> bool:
        return self.root == self.rank

    def all(self) -> tuple[int, ...]:
        """Those that there is a link to, and this one, in order."""
        return tuple(sorted({self.rank, *self.live}))

    def joined(self, rank: int, incarnation: int) -> None:
        self.live[rank] = incarnation
        self._topology = None

    def lost(self, rank: int) -> None:
        self.live.pop(rank, None)
        self._topology = None

    def forget_all(self) -> None:
        """A process that goes on from a checkpoint is linked to nobody yet."""
        self.live.clear()
        self._topology = None

    def told(self, ranks: Iterable[int]) -> None:
        """The root says who is there."""
        self.absent = frozenset(range(self.size)) - frozenset(ranks) - self._linked - {self.rank}
        self._topology = None

    # The graph

    @property
    def topology(self) -> Topology:
        """What is left of the graph, as far as this peer is connected to it."""
        if self._topology is None:
            there = frozenset(rank for rank in range(self.size) if self._is_there(rank))
            whole = _left(self._graph, self.size, there)
            self._topology = _left(self._graph, self.size, whole.reached_from(self.rank))
            self._constants = None
        return self._topology

    def _is_there(self, rank: int) -> bool:
        if rank in self._linked:
            return rank in self.live
        return rank == self.rank or rank not in self.absent

    @property
    def cut_off(self) -> list[int]:
        """Those who are there, but with whom no path of averagings connects this peer any more."""
        connected = set(self.topology.members)
        return [rank for rank in range(self.size) if self._is_there(rank) and rank not in connected]

    @property
    def constants(self) -> Constants:
        topology = self.topology
        if self._constants is None:
            self._constants = topology.constants(self._rate)
        return self._constants

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Those with whom this peer can average now; one that counts twice is there twice."""
        return self.topology.neighbours(self.rank)

    def may_meet(self, a: int, b: int) -> bool:
        return self._is_there(a) and self._is_there(b) and b in self._graph.neighbours(a, self.size)

    # Counting

    @property
    def samples(self) -> int:
        return sum(self.counts)

    @property
    def told_counts(self) -> Counts:
        return tuple(self.counts)

    def count(self, counts: Iterable[int]) -> None:
        """Hear what somebody else knows."""
        self.counts = [max(pair) for pair in zip(self.counts, counts, strict=True)]
