"""Learners and their hub, composed: what is sent × how often × in how many fragments × when it is merged and applied.

Every algorithm of the family is a choice along these axes; `named.py` has the choices with a name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.optimizers import SGD, Optimizer
from offbeat.strategies.centre import HUB, Centred
from offbeat.strategies.learner import Content, Differences, Gradients, Learner, Plan, Values, soonest
from offbeat.strategies.local_steps.node import Merger
from offbeat.strategies.local_steps.parts import Everyone, Merge
from offbeat.strategies.strategy import Node, Setup
from offbeat.validation import require, require_not_negative, require_positive


@dataclass(frozen=True)
class LocalSteps(Centred):
    """Rank 0 is the hub, all other ranks train replicas of their own."""

    summary: ClassVar[str] = "learners that exchange now and then through a hub, composed from parts"

    every: int = 10
    """Steps between two exchanges of a fragment."""
    delay: int | None = 0
    """Steps after an exchange at which its result is applied; None: when it arrives, and nobody waits."""
    content: Content = Differences()
    fragments: int = 1
    merge: Merge = Everyone()
    optimizer: Optimizer | None = None
    """Of the learners."""
    outer: Optimizer = SGD(lr=1.0)
    """Of the hub, on the mean difference; with gradients it is the learners' optimizer that steps there."""
    batch: int = 64
    microbatch: int = 16
    in_flight_max: int = 2
    nonfinite_max: int = 5
    patience_seconds: float = 60.0

    def __post_init__(self) -> None:
        require_positive(self, "every", "fragments", "batch", "microbatch", "in_flight_max", "nonfinite_max")
        require_positive(self, "patience_seconds")
        require_not_negative(self, "delay")
        require(
            self.fragments <= self.every,
            f"{self.fragments} fragments cannot all be sent in {self.every} steps, one a step at the most; "
            "raise every, or lower fragments",
        )
        require(
            not isinstance(self.content, Values),
            "learners send gradients or differences; models of their own are for a population: offbeat.Population()",
        )
        require(
            self.fragments == 1 or not isinstance(self.content, Gradients),
            "gradients are sent in one piece, since the optimizer steps all parameters at once; set fragments to 1",
        )

    @property
    def outer_optimizer(self) -> Optimizer:
        """What steps on the hub."""
        if isinstance(self.content, Gradients):
            assert self.optimizer is not None
            return self.optimizer
        return self.outer

    @property
    def staleness_bound(self) -> int | None:
        return 0 if self.delay == 0 and self.fragments == 1 and isinstance(self.merge, Everyone) else None

    def node(self, setup: Setup) -> Node:
        require(
            self.optimizer is not None,
            "the strategy has no optimizer; give it one, for example optimizer=offbeat.SGD(lr=0.1)",
        )
        assert self.optimizer is not None
        require(
            self.fragments <= setup.layout.numel,
            f"a model of {setup.layout.numel} parameters cannot be sent in {self.fragments} fragments; lower fragments",
        )
        if setup.rank == HUB:
            return Merger(self, setup)
        plan = Plan(
            optimizer=self.optimizer,
            batch=self.batch,
            microbatch=self.microbatch,
            every=max(self.fragments, soonest(self.every, self.batch, setup)),
            delay=self.delay,
            content=self.content,
            fragments=self.fragments,
            in_flight_max=self.in_flight_max,
            nonfinite_max=self.nonfinite_max,
            patience_seconds=self.patience_seconds,
        )
        return Learner(setup, plan)
