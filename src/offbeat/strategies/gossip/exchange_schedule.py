"""Times of exchanges, and the matchmaker that pairs peers for `FirstAvailable`.

Exchanges are scheduled in units of the peer's own gradients, so that there are `rate` per gradient at any speed. The
current gradient is assumed to take as long as the running mean, and its exchanges are spread over that time. When it
ends early, its remaining exchanges are due at once; when it ends late, all of them have been started before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from offbeat.strategies.gossip.gossip_parts import ExchangeClock, Poisson
from offbeat.strategies.node_state import Stateful


class ExchangeSchedule(Stateful):
    """When the next exchange of one peer is due."""

    gradients: int = 0
    """Gradients computed so far."""
    began_at: float = 0.0
    """When the current gradient began, in seconds of the run."""
    next_position: float
    """Position of the next exchange, in gradients; above 1 at first, since no duration has been measured yet."""

    def __init__(self, clock: ExchangeClock, per_gradient: float, random: np.random.Generator) -> None:
        self._random = random
        self._poisson = isinstance(clock, Poisson)
        self._gap = 1.0 / per_gradient
        self.next_position = 1.0 + (self._draw_gap() if self._poisson else self._gap * float(random.random()))

    def gradient_done(self, at: float) -> None:
        """A gradient has ended and the next one begins."""
        self.gradients += 1
        self.began_at = at

    def seconds_to_next(self, at: float, gradient_seconds: float) -> float | None:
        """Seconds until the next exchange is due; None if it falls into a later gradient."""
        ahead = self.next_position - self.gradients
        return max(0.0, self.began_at + ahead * gradient_seconds - at) if ahead < 1.0 else None

    def advance(self) -> None:
        """Schedule the exchange after the one that is due."""
        self.next_position += self._draw_gap() if self._poisson else self._gap

    def _draw_gap(self) -> float:
        return float(self._random.exponential(self._gap))


class Pairing(NamedTuple):
    """Two ranks that are to average; `initiator`, which has waited longer, sends the offer."""

    number: int
    initiator: int
    responder: int


@dataclass(eq=False)
class Matchmaker(Stateful):
    """Pairs ready ranks in the order of their `Ready` messages; runs on the root. Ranks compute while they wait."""

    waiting: list[int] = field(default_factory=list)
    """Ready ranks that have no partner yet, in order of arrival."""
    pairings: int = 0

    def add(self, rank: int, may_average: Callable[[int, int], bool]) -> Pairing | None:
        """Add a ready rank; the pairing with the first waiting rank that is its neighbour, or None."""
        if rank in self.waiting:
            return None
        for other in self.waiting:
            if may_average(other, rank):
                self.waiting.remove(other)
                self.pairings += 1
                return Pairing(self.pairings, other, rank)
        self.waiting.append(rank)
        return None

    def remove(self, rank: int) -> None:
        """Forget a lost rank."""
        if rank in self.waiting:
            self.waiting.remove(rank)
