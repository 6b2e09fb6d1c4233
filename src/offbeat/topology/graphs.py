"""The named graphs, and graphs from edge lists.

A graph is a rule for any number of peers: `Cycle()` is a cycle of however many there are. A neighbour may be listed
more than once, and is then chosen that much more often.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.core.configuration import Family, read_text
from offbeat.core.notebook_html import ShownAsHtml
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, unknown
from offbeat.topology.matchings import Matching, both_directions, round_robin

SUFFIXES = (".txt", ".csv", ".edges")
"""A name with one of these suffixes is the path of an edge list, whether or not the file exists."""


@dataclass(frozen=True)
class Graph(Family, ShownAsHtml):
    """An undirected graph over ranks: which peers a rank may average with."""

    @classmethod
    def shorthand(cls, text: str) -> Any:
        """A member by its name, such as `cycle`, or an edge list by its path, such as `ring.txt`."""
        name = text.partition(":")[0]
        require(text != Edges.name, "an edge list is a file with one pair of ranks a line; name it, such as ring.txt")
        if name in cls.members:
            return super().shorthand(text)
        if text.lower().endswith(SUFFIXES) or os.path.isfile(text):
            return Edges.read(text)
        raise unknown("graph", text, cls.members, "a file of edges works too, such as ring.txt")

    def check(self, peers: int) -> None:
        """Raise ConfigurationError for a number of peers that this graph cannot have. One peer is always allowed."""
        require(peers >= 1, f"a graph has 1 peer or more, but {peers} were asked for")

    def neighbours(self, rank: int, peers: int) -> tuple[int, ...]:
        """The neighbours of a rank in rising order, repeated by their weight."""
        raise NotImplementedError

    def matchings(self, members: tuple[int, ...], peers: int) -> tuple[Matching, ...] | None:
        """A cycle of perfect matchings of `members` that follows from the shape; None: one must be searched."""
        return None


@dataclass(frozen=True)
class Complete(Graph, name="complete"):
    """Every rank is a neighbour of every other."""

    def neighbours(self, rank: int, peers: int) -> tuple[int, ...]:
        return tuple(peer for peer in range(peers) if peer != rank)

    def matchings(self, members: tuple[int, ...], peers: int) -> tuple[Matching, ...] | None:
        return round_robin(members)


@dataclass(frozen=True)
class ExponentialGraph(Graph, name="exponential"):
    """Neighbours at the offsets ±1, ±2, ±4, … ±n/2; the last is one peer that counts twice. Needs a power of two."""

    def check(self, peers: int) -> None:
        super().check(peers)
        below = 1 << (peers.bit_length() - 1)
        require(
            below == peers,
            f"an exponential graph has a power of two of peers, but {peers} were asked for; "
            f"take {below} or {2 * below} of them, or the graph 'cycle', which has any number",
        )

    def neighbours(self, rank: int, peers: int) -> tuple[int, ...]:
        return tuple(sorted((rank + step) % peers for offset in _powers(peers) for step in (offset, -offset)))

    def matchings(self, members: tuple[int, ...], peers: int) -> tuple[Matching, ...] | None:
        """For each offset, the ranks whose bit at it is clear with the rank above; then those whose bit is set.

        Each half is a sweep of log2(n) matchings after which every rank has the mean of all.
        """
        if len(members) < peers:
            return None
        return tuple(
            both_directions((rank, (rank + offset) % peers) for rank in range(peers) if bool(rank & offset) == bit)
            for bit in (False, True)
            for offset in _powers(peers)
        )


def _powers(peers: int) -> list[int]:
    """1, 2, 4, … up to half of the peers."""
    return [1 << exponent for exponent in range(peers.bit_length() - 1)]


@dataclass(frozen=True)
class Cycle(Graph, name="cycle"):
    """A ring: the neighbours of a rank are the rank before and the rank after it."""

    def neighbours(self, rank: int, peers: int) -> tuple[int, ...]:
        return tuple(sorted({(rank - 1) % peers, (rank + 1) % peers} - {rank}))


@dataclass(frozen=True)
class Star(Graph, name="star"):
    """Rank 0 is the only neighbour of every other rank."""

    def neighbours(self, rank: int, peers: int) -> tuple[int, ...]:
        return (0,) if rank else tuple(range(1, peers))


@dataclass(frozen=True)
class Edges(Graph, name="edges"):
    """Any graph, given as pairs of ranks. A pair that is given twice counts twice."""

    edges: tuple[tuple[int, int], ...]
    """pairs of neighbouring ranks"""

    def __post_init__(self) -> None:
        if isinstance(self.edges, list):
            object.__setattr__(self, "edges", tuple(tuple(pair) for pair in self.edges))
        require(len(self.edges) > 0, "an edge list needs one edge or more, such as (0, 1)")
        for pair in self.edges:
            _check_edge(*pair, f"the edge {pair!r}")

    @classmethod
    def read(cls, path: str | Path) -> Edges:
        """An edge list from a text file with one pair of ranks a line, such as `0 1`; `#` starts a comment."""
        edges = []
        text = read_text(path, "edge list", "; write one pair of ranks a line")
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.partition("#")[0].replace(",", " ").split()
            if words:
                edges.append(_parse_edge(words, f"line {number} of the edge list {path}"))
        require(len(edges) > 0, f"the edge list {path} has no edge; write one pair of ranks a line, such as 0 1")
        return cls(tuple(edges))

    @property
    def peers(self) -> int:
        """The only number of peers, other than one, that these edges allow."""
        return 1 + max(map(max, self.edges))

    def check(self, peers: int) -> None:
        super().check(peers)
        if peers == 1:
            return
        highest = self.peers - 1
        require(
            peers == self.peers,
            f"this edge list has the ranks 0 to {highest}, so {self.peers} peers, but {peers} were asked for; "
            f"take {self.peers} of them",
        )
        reached = reachable(0, lambda rank: self.neighbours(rank, peers))
        missing = next((rank for rank in range(peers) if rank not in reached), None)
        require(
            missing is None,
            f"in this edge list rank {missing} cannot be reached from rank 0; add edges until all ranks are connected",
        )

    def neighbours(self, rank: int, peers: int) -> tuple[int, ...]:
        return self._adjacency.get(rank, ()) if peers > 1 else ()

    @functools.cached_property
    def _adjacency(self) -> dict[int, tuple[int, ...]]:
        adjacency: dict[int, list[int]] = {}
        for one, other in self.edges:
            adjacency.setdefault(one, []).append(other)
            adjacency.setdefault(other, []).append(one)
        return {rank: tuple(sorted(peers)) for rank, peers in adjacency.items()}


def reachable(start: int, neighbours: Callable[[int], Iterable[int]]) -> set[int]:
    """The connected component of `start`."""
    seen, queue = {start}, deque([start])
    while queue:
        for rank in neighbours(queue.popleft()):
            if rank not in seen:
                seen.add(rank)
                queue.append(rank)
    return seen


def _parse_edge(words: list[str], where: str) -> tuple[int, int]:
    try:
        one, other = map(int, words)
    except ValueError:
        raise ConfigurationError(f"{where} is {' '.join(words)!r}; write two ranks, such as 0 1") from None
    _check_edge(one, other, where)
    return one, other


def _check_edge(one: int, other: int, where: str) -> None:
    require(min(one, other) >= 0, f"{where} names rank {min(one, other)}; ranks start at 0")
    require(one != other, f"{where} joins rank {one} to itself; name two different ranks")
