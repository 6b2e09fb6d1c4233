"""Fields of the gossip strategies: the choice of partners, the times of exchanges, and momentum of averaging."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from offbeat.core.configuration import Family
from offbeat.core.optimizers import Optimizer
from offbeat.core.strategy import Strategy
from offbeat.core.validation import check_types, require, require_not_negative, require_positive
from offbeat.errors import ConfigurationError
from offbeat.topology.graphs import Complete, Cycle, Graph
from offbeat.topology.topology import Topology


class Partner(Family):
    """How a peer chooses the partner of an exchange."""


@dataclass(frozen=True)
class Random(Partner, name="random"):
    """A neighbour drawn at random."""


@dataclass(frozen=True)
class FirstAvailable(Partner, name="first-available"):
    """Peers that are ready are paired with a ready neighbour by the root, in the order of their requests."""


@dataclass(frozen=True)
class Matchings(Partner, name="matchings"):
    """A fixed cycle of perfect matchings, without randomness."""


class ExchangeClock(Family):
    """Intervals between the exchanges of a peer, in units of its own gradients."""


@dataclass(frozen=True)
class Poisson(ExchangeClock, name="poisson"):
    """Exponentially distributed intervals, as the theory assumes."""


@dataclass(frozen=True)
class Regular(ExchangeClock, name="regular"):
    """Equal intervals."""


class Momentum(Family):
    """Momentum of averaging."""

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
    """A²CiD²: each peer has a second copy of its parameters, and both mix continuously."""

    guard: bool = True
    """mix more slowly where exchanges take long; without it, that diverges"""


@dataclass(frozen=True)
class GossipBase(Strategy):
    """The fields of `Gossip` and what follows from them; `Gossip` adds links and nodes."""

    graph: Graph = Cycle()
    """which peers may average with each other: cycle, exponential, complete, star, or a file of edges"""
    rate: float = 1.0
    """exchanges that a peer takes part in per gradient"""
    partner: Partner = Random()
    """choice of the neighbour: random, first-available, or by turns (matchings)"""
    clock: ExchangeClock = Poisson()
    """times of exchanges: at random (poisson) or at equal intervals (regular)"""
    momentum: Momentum | None = None
    """momentum of averaging: acid (A²CiD²), or none"""
    optimizer: Optimizer | None = None
    """optimizer of every peer; none: the one that suits the workload"""
    batch: int = 64
    """samples per gradient"""
    microbatch: int = 16
    """samples per forward and backward call"""
    nonfinite_max: int = 5
    """gradients in a row that may be NaN or infinite before a peer fails"""
    patience_seconds: float = 60.0
    """seconds that peers wait for all others at the start"""
    hang_seconds: float = field(default=30.0, kw_only=True)
    """seconds after the end of training, and at least two rounds, that a peer waits for a computation that hangs"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "rate", "batch", "microbatch", "nonfinite_max", "patience_seconds")
        require_not_negative(self, "hang_seconds")
        require(
            self.momentum is None or not isinstance(self.graph, Complete),
            "acid has nothing to gain on a complete graph, where every peer is a neighbour of all others; choose "
            "--graph exponential or cycle, or leave the momentum out",
        )

    def processes(self, workers: int) -> int:
        self.graph.check(workers)
        if isinstance(self.partner, Matchings):
            self.matchings(workers)
        return workers

    def matchings(self, size: int) -> tuple[dict[int, int], ...]:
        """The cycle of perfect matchings of `size` peers, each as rank → partner."""
        return _matchings(self.graph, size)


@functools.lru_cache(maxsize=8)
def _matchings(graph: Graph, size: int) -> tuple[dict[int, int], ...]:
    return Topology(graph, size).matchings() if size > 1 else ()
