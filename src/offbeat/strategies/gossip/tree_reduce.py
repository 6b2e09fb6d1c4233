"""A global average, as one peer sees it: its place in the tree, and the sum so far.

Sums go up the tree and the mean comes down. The root is the lowest rank, the other stewards form a binary tree under
it, and everybody else hangs on one of the stewards. A second attempt, after a loss, goes to the root directly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.core.flat import is_averaged
from offbeat.core.messages import Buffers
from offbeat.core.strategy import State
from offbeat.strategies.gossip.gossip_messages import Counts, PartialSum, ReduceStart
from offbeat.strategies.gossip.membership_view import COORDINATORS


def parents(members: tuple[int, ...], direct: bool) -> dict[int, int]:
    """Who sends to whom; the root, which is the first of `members`, sends to nobody."""
    root, *others = members
    if direct:
        return dict.fromkeys(others, root)
    coordinators = [rank for rank in members if rank < COORDINATORS] or [root]
    found = {rank: coordinators[(place - 1) // 2] for place, rank in enumerate(coordinators) if place}
    rest = [rank for rank in others if rank not in found]
    return found | {rank: coordinators[place % len(coordinators)] for place, rank in enumerate(rest)}


def children(rank: int, members: tuple[int, ...], direct: bool) -> list[int]:
    """Who hears from whom."""
    return [child for child, parent in parents(members, direct).items() if parent == rank]


class TreeReduce:
    def __init__(self, rank: int, root: int, gather: ReduceStart) -> None:
        self.root = root
        self.gather = gather
        self.parent = parents(gather.members, gather.direct).get(rank)
        self.awaited = set(children(rank, gather.members, gather.direct))
        self.contributed = False
        """Whether this peer's own part is in it."""
        self.version = 0
        self.result = False
        self._peers = 0
        self._total: Tensor | None = None
        self._buffers: list[Tensor] = []

    @property
    def complete(self) -> bool:
        return self.contributed and not self.awaited

    @property
    def says_something(self) -> bool:
        """Whether anybody's values are in it."""
        return self._total is not None

    def is_of(self, part: PartialSum) -> bool:
        return (part.root, part.round) == (self.root, self.gather.round)

    def concerns(self, rank: int) -> bool:
        """Whether a rank is next to this peer in the tree."""
        return rank == self.parent or rank in self.awaited

    def contribute(self, values: tuple[Tensor, Buffers] | None, version: int, result: bool = False) -> None:
        """Add this peer's own values; None where it has none that count."""
        self.contributed = True
        if values is not None:
            self._add(*values, peers=1, version=version, result=result)

    def add(self, source: int, part: PartialSum) -> None:
        """Add what comes from below."""
        self.awaited.discard(source)
        if part.peers:
            self._add(part.parameters, part.buffers, part.peers, part.version, part.result)

    def _add(self, parameters: Tensor, buffers: Buffers, peers: int, version: int, result: bool) -> None:
        if self.result:
            return  # agreed upon already
        if result or self._total is None:
            self._total, self._buffers = parameters.clone(), [buffer.clone() for buffer in buffers]
            self._peers, self.result = peers, result
            self.version = version if result else max(self.version, version)
            return
        self._total.add_(parameters)
        self._peers += peers
        self.version = max(self.version, version)
        for mine, other in zip(self._buffers, buffers, strict=True):
            if is_averaged(mine):
                mine.add_(other)
            else:
                torch.maximum(mine, other, out=mine)

    def part(self, like: Tensor, counts: Counts) -> PartialSum:
        """What goes up; the vector is empty where nobody has anything to say."""
        total = like.new_empty(0) if self._total is None else self._total
        return PartialSum(
            parameters=total,
            buffers=tuple(self._buffers),
            root=self.root,
            round=self.gather.round,
            peers=self._peers,
            version=self.version,
            counts=counts,
            result=self.result,
        )

    def mean(self) -> tuple[Tensor, Buffers] | None:
        """The average, or what was agreed upon before; None where nobody had anything to say."""
        if self._total is None or self.result:
            return None if self._total is None else (self._total, tuple(self._buffers))
        buffers = tuple(buffer / self._peers if is_averaged(buffer) else buffer for buffer in self._buffers)
        return self._total / self._peers, buffers

    # State

    def state(self) -> State:
        gather = self.gather
        return {
            "root": self.root,
            "gather": [gather.round, gather.final, list(gather.members), gather.direct],
            "awaited": sorted(self.awaited),
            "contributed": self.contributed,
            "version": self.version,
            "result": self.result,
            "peers": self._peers,
            "total": None if self._total is None else self._total.clone(),
            "buffers": [buffer.clone() for buffer in self._buffers],
        }

    @classmethod
    def restored(cls, rank: int, state: State) -> TreeReduce:
        number, final, members, direct = state["gather"]
        tree_reduce = cls(rank, state["root"], ReduceStart(number, final, tuple(members), direct))
        tree_reduce.awaited = set(state["awaited"])
        tree_reduce.contributed = state["contributed"]
        tree_reduce.version = state["version"]
        tree_reduce.result = state["result"]
        tree_reduce._peers = state["peers"]
        tree_reduce._total = state["total"]
        tree_reduce._buffers = list(state["buffers"])
        return tree_reduce
