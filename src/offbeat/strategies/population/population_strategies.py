"""Population training: a model per worker, averaged with those that have better scores; the best is the result."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from offbeat.core.optimizers import Optimizer
from offbeat.core.random_settings import maybe
from offbeat.core.randomness import stream
from offbeat.core.strategy import Node, NodeContext
from offbeat.core.validation import check_types, require, require_not_negative, require_positive
from offbeat.strategies.initial_parameters import Initial, Shuffled
from offbeat.strategies.local_training import Content, Differences, Gradients, LocalTraining, Values
from offbeat.strategies.population.population_member import PopulationMember
from offbeat.strategies.population.population_parts import AllMembers, Best, Better, Sources
from offbeat.strategies.population.population_server import PopulationServer
from offbeat.strategies.server_node import HUB, ServerStrategy


@dataclass(frozen=True)
class Population(ServerStrategy, name="population"):
    """Rank 0 is the hub, all other ranks train parameters of their own; the best of them is the result."""

    summary: ClassVar[str] = "a model on every worker, averaged with those that have better scores; the best is kept"
    paper: ClassVar[str] = "a proof of concept for PC clusters; preemption as in population-based training"
    figure_style: ClassVar[int | None] = 13

    every: int = 20
    """steps between two reports of a worker"""
    sources: Sources = Better()
    """which workers a worker is averaged with: all, best, or better (strictly better scores)"""
    send: Content = Values()
    """what workers get from their sources: values (a mean of parameters), or gradients (a step of their optimizer)"""
    preempt_above: float | None = 1.25
    """score, in multiples of the best, above which a worker is replaced by a copy of the best; none: never"""
    initial: Initial = Shuffled()
    """initial parameters of workers: shuffled (each its own), or same"""
    optimizer: Optimizer | None = None
    """how every worker updates; none: the one that suits the workload"""
    rates: tuple[float, ...] = ()
    """factors on the learning rate of worker 0, 1, ...; the rest have 1"""
    batch: int = 64
    """samples per step"""
    microbatch: int = 16
    """samples per forward and backward call"""
    in_flight_max: int = 2
    """messages a worker may have on the way before it skips an exchange"""
    nonfinite_max: int = 5
    """reports in a row without finite parameters, from every worker, before the run fails"""
    patience_seconds: float = 60.0
    """seconds that hub and workers wait for each other before the run fails"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "every", "batch", "microbatch", "in_flight_max", "nonfinite_max")
        require_positive(self, "patience_seconds")
        require_not_negative(self, "hang_factor", "hang_seconds")
        require(
            not isinstance(self.send, Differences),
            "workers of a population send values or gradients; for differences use offbeat.DelayedExchange()",
        )
        require(
            self.preempt_above is None or self.preempt_above >= 1,
            f"Population.preempt_above is in multiples of the best score, so 1 or more, but is {self.preempt_above!r}",
        )
        require(
            all(rate > 0 for rate in self.rates),
            f"Population.rates must all be greater than 0, but are {list(self.rates)}",
        )

    @classmethod
    def random_settings(cls, seed: int, workers: int) -> dict[str, Any]:
        random = stream(seed, "fuzz population")
        settings: dict[str, Any] = {
            "every": int(random.integers(1, 6)),
            "sources": [AllMembers(), Best(), Better()][int(random.integers(3))],
            "preempt_above": maybe(random, float(random.choice([1.0, 1.25]))),
        }
        rates = [float(10 ** random.uniform(-1, 3)) for _ in range(int(random.integers(0, workers + 1)))]
        rates[:1] = [0.02 for _ in rates[:1]]  # the first member never crashes for good: it must not diverge
        return settings | {"rates": tuple(rates), "send": [Values(), Gradients()][int(random.integers(2))]}

    @property
    def scores_models(self) -> bool:
        return True

    def processes(self, workers: int) -> int:
        require(
            len(self.rates) <= workers,
            f"the population has {len(self.rates)} rates for {workers} workers; give one for each at the most",
        )
        return super().processes(workers)

    def node(self, context: NodeContext) -> Node:
        training = LocalTraining.of(self, context, delay=None, content=Values())
        sends_gradients = isinstance(self.send, Gradients)
        if context.rank == HUB:
            return PopulationServer(context, training, self.sources, self.preempt_above, self.rates, sends_gradients)
        initial = self.initial.parameters(context.parameters, context.layout, context.random)
        own = dataclasses.replace(context, parameters=initial)
        return PopulationMember(own, training, self.rates, sends_gradients)
