"""Perfect matchings: every rank has exactly one partner, so that all ranks can average in pairs at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Matching = dict[int, int]
"""Rank → its partner; every pair is in it in both directions, in rising order of ranks."""


def round_robin(members: Sequence[int]) -> tuple[Matching, ...]:
    """The matchings of a round-robin tournament, by the circle method: every pair of members is in exactly one.

    The number of members must be even.
    """
    fixed, *others = members
    rounds = []
    for turn in range(len(others)):
        table = [fixed, *others[turn:], *others[:turn]]
        half = len(table) // 2
        rounds.append(both_directions(zip(table[:half], reversed(table[half:]), strict=True)))
    return tuple(rounds)


def edge_cover(neighbours: Mapping[int, Sequence[int]]) -> tuple[tuple[Matching, ...], tuple[int, int] | None]:
    """Perfect matchings that together contain every edge, and the first edge that is in no perfect matching, or None.

    The matchings are incomplete when such an edge is returned.
    """
    uncovered = {(rank, peer) for rank in neighbours for peer in neighbours[rank] if rank < peer}
    matchings: list[Matching] = []
    while uncovered:
        edge = min(uncovered)
        matching = _perfect_matching(edge, neighbours, uncovered)
        if matching is None:
            return tuple(matchings), edge
        matchings.append(matching)
        uncovered -= matching.items()
    return tuple(matchings), None


def _perfect_matching(
    edge: tuple[int, int], neighbours: Mapping[int, Sequence[int]], uncovered: set[tuple[int, int]]
) -> Matching | None:
    """A perfect matching that contains `edge` and as many uncovered edges as possible; None where there is none."""
    import networkx  # here, since it takes long to import and few graphs need a search

    rest = networkx.Graph()
    rest.add_nodes_from(rank for rank in neighbours if rank not in edge)
    rest.add_edges_from(
        (rank, peer, {"weight": int((rank, peer) in uncovered)})
        for rank in rest
        for peer in neighbours[rank]
        if rank < peer and peer in rest
    )
    pairs = networkx.max_weight_matching(rest, maxcardinality=True)
    return both_directions([edge, *pairs]) if 2 * len(pairs) == len(rest) else None


def both_directions(pairs: Iterable[tuple[int, int]]) -> Matching:
    """Pairs of ranks as a matching."""
    return dict(sorted(way for one, other in pairs for way in ((one, other), (other, one))))
