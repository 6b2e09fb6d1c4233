"""A global average as one rank sees it: its place in the tree, and the sum so far.

Partial sums go up the tree and the mean comes down. The root is the lowest rank, the other coordinators form a binary
tree below it, and each remaining rank is a child of a coordinator. After a loss the round is repeated with all ranks as
children of the root.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.core.buffer_merge import is_averaged
from offbeat.core.messages import Buffers
from offbeat.strategies.gossip.gossip_messages import Counts, PartialSum, ReduceStart
from offbeat.strategies.gossip.membership_view import COORDINATORS
from offbeat.strategies.node_state import Stateful


def parents(members: tuple[int, ...], direct: bool) -> dict[int, int]:
    """The parent of each rank but the root, which is the first of `members`."""
    root, *others = members
    if direct:
        return dict.fromkeys(others, root)
    coordinators = [rank for rank in members if rank < COORDINATORS] or [root]
    binary_tree = {rank: coordinators[(place - 1) // 2] for place, rank in enumerate(coordinators) if place}
    leaves = [rank for rank in others if rank not in binary_tree]
    return binary_tree | {rank: coordinators[place % len(coordinators)] for place, rank in enumerate(leaves)}


def children(rank: int, members: tuple[int, ...], direct: bool) -> list[int]:
    """The ranks whose parent is `rank`."""
    return [child for child, parent in parents(members, direct).items() if parent == rank]


@dataclass(eq=False)
class TreeReduce(Stateful):
    """One round of a global average on one rank; `create` makes it from the message that starts the round."""

    root: int
    start: ReduceStart
    parent: int | None
    awaited: set[int]
    """Children whose partial sum has not arrived."""
    contributed: bool = False
    """Whether this rank has added its own values."""
    version: int = 0
    is_earlier_result: bool = False
    """Whether `total` is the final average of an earlier round, which replaces any sum."""
    peers: int = 0
    """Peers in the sum."""
    total: Tensor | None = None
    buffers: list[Tensor] = field(default_factory=list)

    @classmethod
    def create(cls, rank: int, root: int, start: ReduceStart) -> TreeReduce:
        parent = parents(start.members, start.direct).get(rank)
        return cls(root, start, parent, set(children(rank, start.members, start.direct)))

    @property
    def complete(self) -> bool:
        return self.contributed and not self.awaited

    def includes(self, partial_sum: PartialSum) -> bool:
        """Whether a partial sum belongs to this round."""
        return (partial_sum.root, partial_sum.round) == (self.root, self.start.round)

    def needs(self, rank: int) -> bool:
        """Whether the round cannot complete here without a rank: the parent, or a child that is awaited."""
        return rank == self.parent or rank in self.awaited

    def contribute(self, values: tuple[Tensor, Buffers] | None, version: int, is_result: bool = False) -> None:
        """Add this rank's own values; None if it has none to add."""
        self.contributed = True
        if values is not None:
            self._add(*values, peers=1, version=version, is_result=is_result)

    def add(self, child: int, part: PartialSum) -> None:
        """Add the partial sum of a child."""
        self.awaited.discard(child)
        if part.peers:
            self._add(part.parameters, part.buffers, part.peers, part.version, part.result)

    def _add(self, parameters: Tensor, buffers: Buffers, peers: int, version: int, is_result: bool) -> None:
        if self.is_earlier_result:
            return
        if is_result or self.total is None:
            self.total, self.buffers = parameters.clone(), [buffer.clone() for buffer in buffers]
            self.peers, self.is_earlier_result = peers, is_result
            self.version = version if is_result else max(self.version, version)
            return
        self.total.add_(parameters)
        self.peers += peers
        self.version = max(self.version, version)
        for mine, other in zip(self.buffers, buffers, strict=True):
            if is_averaged(mine):
                mine.add_(other)
            else:
                torch.maximum(mine, other, out=mine)

    def partial_sum(self, like: Tensor, counts: Counts) -> PartialSum:
        """The message to the parent; its vector is empty, of the type of `like`, if no rank below has added values."""
        return PartialSum(
            parameters=like.new_empty(0) if self.total is None else self.total,
            buffers=tuple(self.buffers),
            root=self.root,
            round=self.start.round,
            peers=self.peers,
            version=self.version,
            counts=counts,
            result=self.is_earlier_result,
        )

    def mean(self) -> tuple[Tensor, Buffers] | None:
        """The average, or the result of an earlier round; None if no rank has added values."""
        if self.total is None:
            return None
        if self.is_earlier_result:
            return self.total, tuple(self.buffers)
        buffers = tuple(buffer / self.peers if is_averaged(buffer) else buffer for buffer in self.buffers)
        return self.total / self.peers, buffers
