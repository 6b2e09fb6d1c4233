"""The choices of gossip: with whom a peer averages, when, and whether averaging has momentum."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from offbeat.core.configuration import Family
from offbeat.core.optimizers import Optimizer
from offbeat.core.strategy import Strategy
from offbeat.core.validation import check_types, require, require_positive
from offbeat.errors import ConfigurationError
from offbeat.topology.graphs import Complete, Cycle, Graph
from offbeat.topology.topology import Topology


class Partner(Family):
    """With whom a peer averages."""


@dataclass(frozen=True)
class Random(Partner, name="random"):
    """With a neighbour drawn at random."""


@dataclass(frozen=True)
class FirstAvailable(Partner, name="first-available"):
    """Whoever is ready says so, and those who are ready are matched in the order in which they said it."""


@dataclass(frozen=True)
class Matchings(Partner, name="matchings"):
    """By a fixed cycle of perfect matchings, so that nothing is left to chance."""


class ExchangeClock(Family):
    """When a peer averages, in units of its own gradients."""


@dataclass(frozen=True)
class Poisson(ExchangeClock, name="poisson"):
    """At random, and independently of when it averaged last; what the theory assumes."""


@dataclass(frozen=True)
class Regular(ExchangeClock, name="regular"):
    """At equal intervals."""


class Momentum(Family):
    """What averaging remembers."""

    @classmethod
    def shorthand(cls, text: str) -> Any:
        if text not in cls.members and text[:1] in "0123456789.":
            raise ConfigurationError(
                f"momentum is that of averaging here (acid or none), but {text!r} was given; the optimizer's is "
                f"--optimizer.momentum {text}"
            )
        return super().shorthand(text)


@dataclass(frozen=True)
class Acid(Momentum, name="acid"):
    """A²CiD²: a second copy of the parameters that the first is drawn to, all the time, a little."""

    guard: bool = True
    """mix more slowly where exchanges take long; without, that diverges"""


@dataclass(frozen=True)
class GossipBase(Strategy):
    """The fields of `Gossip` and what follows from them; `Gossip` adds the links and `node()`."""

    graph: Graph = Cycle()
    """who may average with whom: cycle, exponential, complete, star, or a file of edges"""
    rate: float = 1.0
    """averagings that a peer takes part in per gradient"""
    partner: Partner = Random()
    """who of them: random, first-available, or by turns (matchings)"""
    clock: ExchangeClock = Poisson()
    """when: at random (poisson) or at equal intervals (regular)"""
    momentum: Momentum | None = None
    """momentum of averaging: acid (A²CiD²), or none"""
    optimizer: Optimizer | None = None
    """how every peer updates; none: the one that suits the workload"""
    batch: int = 64
    """samples per gradient"""
    microbatch: int = 16
    """samples per forward and backward call"""
    nonfinite_max: int = 5
    """gradients in a row that may be NaN or infinite before a peer gives up"""
    patience_seconds: float = 60.0
    """seconds that peers wait for each other at the start"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "rate", "batch", "microbatch", "nonfinite_max", "patience_seconds")
        require(
            self.momentum is None or not isinstance(self.graph, Complete),
            "acid has nothing to gain on a complete graph, where everybody is everybody's neighbour; choose "
            "--graph exponential or cycle, or leave the momentum out",
        )

    def processes(self, workers: int) -> int:
        self.graph.check(workers)
        if isinstance(self.partner, Matchings):
            self.matchings(workers)
        return workers

    def matchings(self, size: int) -> tuple[dict[int, int], ...]:
        """The cycle of perfect matchings at that size."""
        return _matchings(self.graph, size)


@functools.lru_cache(maxsize=8)
def _matchings(graph: Graph, size: int) -> tuple[dict[int, int], ...]:
    return Topology(graph, size).matchings() if size > 1 else ()
