"""A graph of a given size, restricted to its members, and the constants that follow from its shape.

The formulas are those of A²CiD² (Nabli, Belilovsky and Oyallon, 2023) with a Laplacian that is symmetric on every
graph. A peer takes part in `rate` averagings per gradient; W_ij is the share of j among the neighbours of i:

    λ_ij = rate/2 · (W_ij + W_ji)      L = Σ over edges of λ_ij (e_i − e_j)(e_i − e_j)ᵀ
    χ1 = 1/λ2(L)                       χ2 = ½ max over edges of (e_i − e_j)ᵀ L⁺ (e_i − e_j)
    η = 1/(2√(χ1 χ2))                  α = ½,  α̃ = ½ √(χ1/χ2)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.core.notebook_html import ShownAsHtml
from offbeat.core.validation import check_instance, require
from offbeat.errors import ConfigurationError
from offbeat.topology.graphs import Graph, reachable
from offbeat.topology.matchings import Matching, edge_cover

RANDOM_PARTNERS = "choose partners at random: partner=Random(), or --partner random"


@dataclass(frozen=True)
class Constants:
    """The constants of a graph that acceleration uses. The unit of time is one gradient."""

    chi1: float
    """Time constant of the slowest mode of consensus, 1/λ2(L)."""
    chi2: float
    """Half of the largest effective resistance of an edge; never more than χ1."""
    eta: float
    """Rate at which the two copies of a peer mix."""
    alpha: float
    """Share of a difference that is added to the parameters in an averaging."""
    alpha_tilde: float
    """Share of a difference that is added to the second copy."""
    gap: float
    """The spectral gap λ2(L)."""


class Topology(ShownAsHtml):
    """A graph of `peers` ranks, restricted to its members. Immutable.

    graph: the rule that gives the neighbours of a rank
    peers: the size of the graph
    members: the ranks that take part; None: all
    """

    def __init__(self, graph: Graph, peers: int, members: Iterable[int] | None = None) -> None:
        check_instance(graph, (Graph,), "the graph", "Cycle()")
        graph.check(peers)
        self.graph = graph
        self.peers = peers
        self.members: tuple[int, ...] = tuple(range(peers)) if members is None else tuple(sorted(set(members)))
        require(len(self.members) > 0, "a topology needs one member or more")
        outside = [rank for rank in self.members if not 0 <= rank < peers]
        require(not outside, f"members are ranks from 0 to {peers - 1}, but {outside} were given")
        present = set(self.members)
        self._neighbours = {
            rank: tuple(peer for peer in graph.neighbours(rank, peers) if peer in present) for rank in self.members
        }

    def __repr__(self) -> str:
        members = "" if len(self.members) == self.peers else f", members={self.members}"
        return f"Topology({self.graph!r}, {self.peers}{members})"

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """The neighbours of a member that are members too, in rising order, repeated by their weight."""
        require(rank in self._neighbours, f"rank {rank} is not a member of this topology")
        return self._neighbours[rank]

    @functools.cached_property
    def edges(self) -> list[tuple[int, int, float]]:
        """Every edge once, lower rank first, with its rate of use λ_ij at rate 1."""
        rows, columns = np.nonzero(np.triu(self._used))
        values = self._used[rows, columns]
        return [
            (self.members[row], self.members[column], float(value))
            for row, column, value in zip(rows, columns, values, strict=True)
        ]

    @functools.cached_property
    def connected(self) -> bool:
        """Whether there is a path between any two members."""
        return len(self.reached_from(self.members[0])) == len(self.members)

    def reached_from(self, rank: int) -> frozenset[int]:
        """The connected component of a member."""
        return frozenset(reachable(rank, self.neighbours))

    def laplacian(self, rate: float) -> NDArray[np.float64]:
        """The Laplacian L over the members in rising order."""
        _require_rate(rate)
        return rate * (np.diag(self._used.sum(axis=1)) - self._used)

    def constants(self, rate: float) -> Constants:
        """The constants at `rate` averagings per peer and gradient; a single member has η = 0.

        Raises ConfigurationError where the members are not connected.
        """
        _require_rate(rate)
        chi1, chi2 = self._chis
        if len(self.members) == 1:
            return Constants(chi1=0.0, chi2=0.0, eta=0.0, alpha=0.5, alpha_tilde=0.5, gap=0.0)
        return Constants(
            chi1=chi1 / rate,
            chi2=chi2 / rate,
            eta=rate / (2.0 * math.sqrt(chi1 * chi2)),
            alpha=0.5,
            alpha_tilde=0.5 * math.sqrt(chi1 / chi2),
            gap=rate / chi1,
        )

    def matchings(self) -> tuple[Matching, ...]:
        """A cycle of perfect matchings that together use every edge; empty for a single member.

        Raises ConfigurationError where an edge is in no perfect matching.
        """
        count = len(self.members)
        if count == 1:
            return ()
        require(
            count % 2 == 0,
            f"{count} peers cannot all have a partner at once, since one is left over; take an even number of them, "
            f"such as {count - 1} or {count + 1}, or {RANDOM_PARTNERS}",
        )
        known = self.graph.matchings(self.members, self.peers)
        if known is not None:
            return known
        matchings, uncovered = edge_cover({rank: sorted(set(peers)) for rank, peers in self._neighbours.items()})
        if uncovered is not None or not matchings:
            raise ConfigurationError(self._no_matching(uncovered))
        return matchings

    @functools.cached_property
    def _used(self) -> NDArray[np.float64]:
        """The matrix of λ_ij at rate 1, over the members."""
        index = {rank: position for position, rank in enumerate(self.members)}
        shares = np.zeros((len(self.members), len(self.members)))
        for row, peers in enumerate(self._neighbours.values()):
            if peers:
                counts = np.bincount([index[peer] for peer in peers], minlength=len(index))
                shares[row] = counts / len(peers)
        return (shares + shares.T) / 2.0

    @functools.cached_property
    def _chis(self) -> tuple[float, float]:
        """χ1 and χ2 at rate 1; both are inversely proportional to the rate."""
        if len(self.members) == 1:
            return 0.0, 0.0
        if not self.connected:
            unreached = set(self.members) - self.reached_from(self.members[0])
            raise ConfigurationError(
                f"this graph is not connected: rank {min(unreached)} cannot be reached from rank {self.members[0]}, so "
                "peers cannot reach consensus; take a graph that stays connected, such as 'complete' or 'exponential'"
            )
        values, vectors = np.linalg.eigh(self.laplacian(1.0))
        # The graph is connected, so only the first eigenvalue is 0.
        scaled = vectors[:, 1:] / np.sqrt(values[1:])
        inverse = scaled @ scaled.T
        rows, columns = np.nonzero(np.triu(self._used))
        resistances = inverse[rows, rows] + inverse[columns, columns] - 2.0 * inverse[rows, columns]
        return 1.0 / float(values[1]), 0.5 * float(resistances.max())

    def _no_matching(self, edge: tuple[int, int] | None) -> str:
        what = f"this graph of {len(self.members)} peers"
        why = "has no edges" if edge is None else f"has no perfect matching with the edge {edge[0]}–{edge[1]}"
        return (
            f"{what} {why}, so there is no cycle of matchings to take partners from; take 'cycle', 'complete' "
            f"or 'exponential' with an even number of peers, or {RANDOM_PARTNERS}"
        )


def _require_rate(rate: float) -> None:
    require(0 < rate < math.inf, f"the rate of averaging must be greater than 0, but is {rate!r}")
