"""The matchmaker of `FirstAvailable`: pairs those who are ready, first come, first served. Whoever waits computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Pair(NamedTuple):
    """Two that are to average; the one that has waited longer begins."""

    number: int
    begins: int
    other: int


class Matchmaker:
    def __init__(self) -> None:
        self.waiting: list[int] = []
        """Ranks that are ready, in the order in which they said so."""
        self.pairs = 0

    def ready(self, rank: int, may_meet: Callable[[int, int], bool]) -> Pair | None:
        """A rank is ready: the pair that this makes, or None."""
        if rank in self.waiting:
            return None
        for other in self.waiting:
            if may_meet(other, rank):
                self.waiting.remove(other)
                self.pairs += 1
                return Pair(self.pairs, other, rank)
        self.waiting.append(rank)
        return None

    def forget(self, rank: int) -> None:
        """A rank is gone."""
        if rank in self.waiting:
            self.waiting.remove(rank)
