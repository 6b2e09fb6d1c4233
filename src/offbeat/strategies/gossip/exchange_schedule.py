"""When the next exchange is due, counted in gradients of the peer's own, so that the rate holds at any speed.

The gradient that is under way is taken to last as long as the usual one, and exchanges are spread over that time. One
that comes early finds the rest overdue, one that comes late finds that all have been made: either way there are `rate`
of them per gradient, in the long run exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from offbeat.strategies.gossip.gossip_parts import ExchangeClock, Poisson


class ExchangeSchedule:
    def __init__(self, clock: ExchangeClock, per_gradient: float, random: np.random.Generator) -> None:
        self._random = random
        self._poisson = isinstance(clock, Poisson)
        self._gap = 1.0 / per_gradient
        self.gradients = 0
        self.began_at = 0.0
        """When the gradient began that is under way."""
        self.next = 1.0 + (self._drawn() if self._poisson else self._gap * float(random.random()))
        """The position of the next exchange; before the first gradient nobody knows how long one takes."""

    def gradient(self, at: float) -> None:
        """A gradient is done, and another begins."""
        self.gradients += 1
        self.began_at = at

    def seconds(self, at: float, gradient_seconds: float) -> float | None:
        """How long it is to the next exchange; None where it belongs to a later gradient."""
        ahead = self.next - self.gradients
        return max(0.0, self.began_at + ahead * gradient_seconds - at) if ahead < 1.0 else None

    def tick(self) -> None:
        """That exchange has become due."""
        self.next += self._drawn() if self._poisson else self._gap

    def _drawn(self) -> float:
        return float(self._random.exponential(self._gap))


# The matchmaker of `FirstAvailable`: pairs those who are ready, first come, first served. Whoever waits computes.


class Pairing(NamedTuple):
    """Two that are to average; the one that has waited longer begins."""

    number: int
    begins: int
    other: int


class Matchmaker:
    def __init__(self) -> None:
        self.waiting: list[int] = []
        """Ranks that are ready, in the order in which they said so."""
        self.pairs = 0

    def ready(self, rank: int, may_meet: Callable[[int, int], bool]) -> Pairing | None:
        """A rank is ready: the pair that this makes, or None."""
        if rank in self.waiting:
            return None
        for other in self.waiting:
            if may_meet(other, rank):
                self.waiting.remove(other)
                self.pairs += 1
                return Pairing(self.pairs, other, rank)
        self.waiting.append(rank)
        return None

    def forget(self, rank: int) -> None:
        """A rank is gone."""
        if rank in self.waiting:
            self.waiting.remove(rank)
