"""Perfect matchings: everybody has one partner, and is that partner's partner.

`round_robin` is the circle method for complete graphs. `covering` searches any graph for matchings that together
use every edge, with Edmonds' blossoms; so it finds them wherever there are any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

Matching = dict[int, int]
"""Every rank and its partner, both ways."""

Neighbours = Mapping[int, Sequence[int]]


def round_robin(members: Sequence[int]) -> tuple[Matching, ...]:
    """One matching per round of a tournament in which everybody meets everybody once. Needs an even number."""
    fixed, *others = members
    rounds = []
    for turn in range(len(others)):
        table = [fixed, *others[turn:], *others[:turn]]
        half = len(table) // 2
        rounds.append(_both_ways(zip(table[:half], reversed(table[half:]), strict=True)))
    return tuple(rounds)


def covering(neighbours: Neighbours) -> tuple[tuple[Matching, ...], tuple[int, int] | None]:
    """Perfect matchings that together use every edge, and an edge that is in none of them, if there is one."""
    unused = {(one, other) for one in neighbours for other in neighbours[one] if one < other}
    found: list[Matching] = []
    while unused:
        edge = min(unused)
        matching = _perfect_with(edge, neighbours, unused)
        if matching is None:
            return tuple(found), edge
        found.append(matching)
        unused -= {(one, other) for one, other in matching.items() if one < other}
    return tuple(found), None


def _perfect_with(edge: tuple[int, int], neighbours: Neighbours, preferred: set[tuple[int, int]]) -> Matching | None:
    """A perfect matching that has this edge, and as many of the preferred ones as come easily."""
    rest = {rank: [peer for peer in neighbours[rank] if peer not in edge] for rank in neighbours if rank not in edge}
    fresh = {rank: [peer for peer in rest[rank] if _ordered(rank, peer) in preferred] for rank in rest}
    matching: Matching = {}
    for choices in (fresh, rest):
        for rank in rest:
            if rank not in matching:
                _augment(rank, choices, matching)
    if len(matching) < len(rest):
        return None
    return _both_ways([edge, *((one, other) for one, other in matching.items() if one < other)])


def _augment(root: int, neighbours: Neighbours, matching: Matching) -> bool:
    """Match one more rank, along a path from `root` whose edges are out of and in the matching by turns.

    Edmonds: a tree of such paths grows from the root; an edge between two of its outer ranks closes an odd cycle, a
    blossom, which counts as one rank from then on.
    """
    base = {rank: rank for rank in neighbours}
    parent: dict[int, int] = {}
    outer = {root}
    waiting = deque([root])
    while waiting:
        rank = waiting.popleft()
        for other in neighbours[rank]:
            if base[rank] == base[other] or matching.get(rank) == other:
                continue
            if other in outer:
                joint = _common(rank, other, base, parent, matching)
                inside = _blossom(rank, other, joint, base, parent, matching)
                for member in base:
                    if base[member] in inside:
                        base[member] = joint
                        if member not in outer:
                            outer.add(member)
                            waiting.append(member)
            elif other not in parent:
                parent[other] = rank
                if other not in matching:
                    _flip(other, parent, matching)
                    return True
                outer.add(matching[other])
                waiting.append(matching[other])
    return False


def _common(
    one: int, other: int, base: Mapping[int, int], parent: Mapping[int, int], matching: Mapping[int, int]
) -> int:
    """Where the ways of two outer ranks to the root meet."""
    passed = set()
    while True:
        one = base[one]
        passed.add(one)
        if one not in matching:
            break
        one = parent[matching[one]]
    while base[other] not in passed:
        other = parent[matching[base[other]]]
    return base[other]


def _blossom(
    one: int, other: int, joint: int, base: Mapping[int, int], parent: dict[int, int], matching: Mapping[int, int]
) -> set[int]:
    """The bases of the odd cycle that an edge closes at `joint`. Parents are set so that either way round is a path."""
    inside = set()
    for rank, across in ((one, other), (other, one)):
        while base[rank] != joint:
            partner = matching[rank]
            inside |= {base[rank], base[partner]}
            parent[rank] = across
            rank, across = parent[partner], partner
    return inside


def _flip(end: int, parent: Mapping[int, int], matching: Matching) -> None:
    """Exchange what is in and what is out of the matching along the path from the root to `end`."""
    step: int | None = end
    while step is not None:
        before = parent[step]
        following = matching.get(before)
        matching[step], matching[before] = before, step
        step = following


def _ordered(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)


def _both_ways(pairs: Iterable[tuple[int, int]]) -> Matching:
    return dict(sorted(way for one, other in pairs for way in ((one, other), (other, one))))
