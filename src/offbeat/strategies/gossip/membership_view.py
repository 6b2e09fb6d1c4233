"""Live ranks, the graph that remains, and sample counts, as one peer sees them.

Every peer is linked to its neighbours in the graph, with which it averages, and to the lowest ranks, the
*coordinators*. The lowest live rank is the *root*: it starts global averages and the end of the run, and tracks
membership. When the root is lost, the next coordinator takes over.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from offbeat.strategies.gossip.gossip_messages import Counts
from offbeat.strategies.node_state import Stateful
from offbeat.topology.graphs import Graph
from offbeat.topology.topology import Constants, Topology

COORDINATORS = 16
"""Lowest ranks to which all others are linked; the others cannot end together only if all of these are lost."""


def linked_ranks(graph: Graph, rank: int, size: int) -> list[int]:
    """The ranks to which `rank` is linked."""
    others = range(size) if rank < COORDINATORS else range(min(COORDINATORS, size))
    return sorted({*graph.neighbours(rank, size), *others} - {rank})


@functools.lru_cache(maxsize=32)
def _subgraph(graph: Graph, size: int, members: frozenset[int]) -> Topology:
    """A graph restricted to some ranks; cached, since all peers of a simulation ask for the same one."""
    return Topology(graph, size, members)


class MembershipView(Stateful):
    """Membership and sample counts of one rank."""

    caches = ("_topology", "_constants")

    live: dict[int, int]
    """Rank → incarnation, of ranks whose link is up."""
    absent: frozenset[int] = frozenset()
    """Lost ranks among those without a link to this one, by the root's member list."""
    counts: list[int]
    """Samples of each rank, as far as this one knows."""

    def __init__(self, rank: int, size: int, graph: Graph, rate: float) -> None:
        self.rank = rank
        self.size = size
        self.live = {}
        self.counts = [0] * size
        self._graph = graph
        self._rate = rate
        self._linked = frozenset(linked_ranks(graph, rank, size))
        self._topology: Topology | None = None
        self._constants: Constants | None = None

    @property
    def root(self) -> int:
        """The lowest live coordinator, or this rank if it is lower or none is left."""
        return min([self.rank, *(rank for rank in self.live if rank < COORDINATORS)])

    @property
    def is_root(self) -> bool:
        return self.root == self.rank

    @property
    def members(self) -> tuple[int, ...]:
        """This rank and those whose link is up, sorted."""
        return tuple(sorted({self.rank, *self.live}))

    @property
    def linked_members(self) -> set[int]:
        """The ranks of a global average besides the root: none if this rank is not linked to all others."""
        return set(self.live) if self.rank < COORDINATORS else set()

    def add(self, rank: int, incarnation: int) -> None:
        self.live[rank] = incarnation
        self._topology = None

    def remove(self, rank: int) -> None:
        self.live.pop(rank, None)
        self._topology = None

    def clear(self) -> None:
        """Remove all ranks: no link of a restarted process is up yet."""
        self.live.clear()
        self._topology = None

    def set_member_list(self, ranks: Iterable[int]) -> None:
        """Take the live ranks from the root's member list, for ranks that have no link to this one."""
        self.absent = frozenset(range(self.size)) - frozenset(ranks) - self._linked - {self.rank}
        self._topology = None

    # The graph

    @property
    def topology(self) -> Topology:
        """The graph of live ranks that are connected to this one."""
        if self._topology is None:
            live = frozenset(rank for rank in range(self.size) if self._is_live(rank))
            reachable = _subgraph(self._graph, self.size, live).reached_from(self.rank)
            self._topology = _subgraph(self._graph, self.size, reachable)
            self._constants = None
        return self._topology

    def _is_live(self, rank: int) -> bool:
        if rank in self._linked:
            return rank in self.live
        return rank == self.rank or rank not in self.absent

    @property
    def unreachable(self) -> list[int]:
        """Live ranks to which no path of exchanges leads from this one."""
        connected = set(self.topology.members)
        return [rank for rank in range(self.size) if self._is_live(rank) and rank not in connected]

    @property
    def constants(self) -> Constants:
        """Constants of A²CiD² on the remaining graph."""
        topology = self.topology
        if self._constants is None:
            self._constants = topology.constants(self._rate)
        return self._constants

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Live neighbours; a rank with a double edge occurs twice."""
        return self.topology.neighbours(self.rank)

    def may_average(self, a: int, b: int) -> bool:
        """Whether two ranks are live and neighbours in the graph."""
        return self._is_live(a) and self._is_live(b) and b in self._graph.neighbours(a, self.size)

    # Sample counts

    @property
    def samples(self) -> int:
        """Samples of all ranks."""
        return sum(self.counts)

    @property
    def sample_counts(self) -> Counts:
        """A copy of `counts` for a message."""
        return tuple(self.counts)

    def merge_counts(self, counts: Iterable[int]) -> None:
        """Take the larger count of each rank."""
        self.counts = [max(pair) for pair in zip(self.counts, counts, strict=True)]
