"""The graphs that have a name, and edge lists.

A graph is a rule, not a number of peers: `Cycle()` is a cycle of however many there are. A neighbour may count
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

from offbeat.core.configuration import Family
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, unknown
from offbeat.topology.matchings import Matching, round_robin

SUFFIXES = (".txt", ".csv", ".edges")
"""A name that ends so is a file of edges, whether it exists or not."""


@dataclass(frozen=True)
class Graph(Family):
    """Who is next to whom."""

    @classmethod
    def shorthand(cls, text: str) -> Any:
        """A member by its name, such as `cycle`; or the file of an edge list, such as `ring.txt`."""
        name = text.partition(":")[0]
        require(text != Edges.name, "an edge list is a file with one pair of ranks a line; name it, such as ring.txt")
        if name in cls.members:
            return super().shorthand(text)
        if text.lower().endswith(SUFFIXES) or os.path.isfile(text):
            return Edges.read(text)
        raise unknown("graph", text, cls.members, "a file of edges works too, such as ring.txt")

    def check(self, peers: int) -> None:
        """Refuse a number of peers that this graph cannot have. One peer is always allowed, and has no neighbour."""
        require(peers >= 1, f"a graph has 1 peer or more, but {peers} were asked for")

    def neighbours(self, rank: int, peers: int) -> tuple[int, ...]:
        """The neighbours of a rank in rising order, each as often as it counts."""
        raise NotImplementedError

    def matchings(self, members: tuple[int, ...], peers: int) -> tuple[Matching, ...] | None:
        """A good cycle of perfect matchings of these members, where the shape gives one; None: it must be searched."""
        return None


@dataclass(frozen=True)
class Complete(Graph, name="complete"):
    """Everybody is next to everybody."""

    def neighbours(self, rank: int, peers: int) -> tuple[int, ...]:
        return tuple(peer for peer in range(peers) if peer != rank)

    def matchings(self, members: tuple[int, ...], peers: int) -> tuple[Matching, ...] | None:
        return round_robin(members)


@dataclass(frozen=True)
class ExponentialGraph(Graph, name="exponential"):
    """Offsets of ±1, ±2, ±4, … up to ±n/2, which is one peer that counts twice. Needs a power of two."""

    def check(self, peers: int) -> None:
        super().check(peers)
        below = 1 << (peers.bit_length() - 1)
        require(
            below == peers,
            f"an exponential graph has a power of two of peers, but {peers} were asked for; "
            f"take {below} or {2 * below} of them, or the graph 'cycle', which has any number",
        )

    def neighbours(self, rank: int, peers: int) -> tuple[int, ...]:
        offsets = [1 << k for k in range(peers.bit_length() - 1)]
        return tuple(sorted((rank + step) % peers for offset in offsets for step in (offset, -offset)))

    def matchings(self, members: tuple[int, ...], peers: int) -> tuple[Matching, ...] | None:
        """For every offset the ranks with that bit clear and the rank above, then the ranks with that bit set.

        Each half is a sweep of log2(n) matchings after which everybody has the mean of all.
        """
        if len(members) < peers:
            return None
        offsets = [1 << k for k in range(peers.bit_length() - 1)]
        return tuple(_above(peers, offset, start) for start in (0, 1) for offset in offsets)


def _above(peers: int, offset: int, start: int) -> Matching:
    """Pairs of a rank and the one `offset` above, for ranks whose bit at `offset` is `start`."""
    lower = [rank for rank in range(peers) if bool(rank & offset) == bool(start)]
    pairs = [(rank, (rank + offset) % peers) for rank in lower]
    return dict(sorted(pairs + [(upper, rank) for rank, upper in pairs]))


@dataclass(frozen=True)
class Cycle(Graph, name="cycle"):
    """A ring: everybody has the rank before and the rank after."""

    def neighbours(self, rank: int, peers: int) -> tuple[int, ...]:
        return tuple(sorted({(rank - 1) % peers, (rank + 1) % peers} - {rank}))


@dataclass(frozen=True)
class Star(Graph, name="star"):
    """Rank 0 in the middle, and everybody else next to it alone."""

    def neighbours(self, rank: int, peers: int) -> tuple[int, ...]:
        return (0,) if rank else tuple(range(1, peers))


@dataclass(frozen=True)
class Edges(Graph, name="edges"):
    """Any graph, as its pairs of ranks. A pair that is given twice counts twice."""

    edges: tuple[tuple[int, int], ...]
    """pairs of ranks that are next to each other"""

    def __post_init__(self) -> None:
        if isinstance(self.edges, list):
            object.__setattr__(self, "edges", tuple(tuple(pair) for pair in self.edges))
        require(len(self.edges) > 0, "an edge list needs one edge or more, such as (0, 1)")
        for pair in self.edges:
            wrong = _flaw(*pair)
            require(not wrong, f"the edge {pair!r} {wrong}")

    @classmethod
    def read(cls, path: str | Path) -> Edges:
        """An edge list from a text file with one pair of ranks a line, such as `0 1`; `#` starts a comment."""
        edges = []
        for number, line in enumerate(_lines(path), start=1):
            words = line.partition("#")[0].replace(",", " ").split()
            if words:
                edges.append(_edge(words, f"line {number} of the edge list {path}"))
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
        reached = component(0, lambda rank: self.neighbours(rank, peers))
        missing = next((rank for rank in range(peers) if rank not in reached), None)
        require(
            missing is None,
            f"in this edge list rank {missing} cannot be reached from rank 0; add edges until all ranks are connected",
        )

    def neighbours(self, rank: int, peers: int) -> tuple[int, ...]:
        return self._adjacency[rank] if peers > 1 and rank in self._adjacency else ()

    @functools.cached_property
    def _adjacency(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for one, other in self.edges:
            found.setdefault(one, []).append(other)
            found.setdefault(other, []).append(one)
        return {rank: tuple(sorted(others)) for rank, others in found.items()}


def component(start: int, neighbours: Callable[[int], Iterable[int]]) -> set[int]:
    """Everybody who can be reached from `start`, itself included."""
    seen, waiting = {start}, deque([start])
    while waiting:
        for rank in neighbours(waiting.popleft()):
            if rank not in seen:
                seen.add(rank)
                waiting.append(rank)
    return seen


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise ConfigurationError(f"the edge list {path} cannot be read: {reason}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"the edge list {path} is not UTF-8 text; write one pair of ranks a line") from None


def _edge(words: list[str], where: str) -> tuple[int, int]:
    try:
        one, other = map(int, words)
    except ValueError:
        raise ConfigurationError(f"{where} is {' '.join(words)!r}; write two ranks, such as 0 1") from None
    wrong = _flaw(one, other)
    require(not wrong, f"{where} {wrong}")
    return one, other


def _flaw(one: int, other: int) -> str:
    """What is wrong with an edge, or nothing."""
    if min(one, other) < 0:
        return f"names rank {min(one, other)}; ranks start at 0"
    return f"joins rank {one} to itself; name two different ranks" if one == other else ""
