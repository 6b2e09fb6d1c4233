"""One hub and its workers, composed: what a worker computes × when the hub updates × whether the worker waits
× optimizer. Every algorithm of the family is a choice along these axes; `named.py` has the choices with a name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.actions import Budget, Samples
from offbeat.optimizers import Optimizer
from offbeat.strategies.centre import HUB, Centred
from offbeat.strategies.hub.node import HubNode
from offbeat.strategies.hub.parts import All, Collect, Share, TargetBatch
from offbeat.strategies.hub.restarting import RestartingHub
from offbeat.strategies.hub.worker import Worker
from offbeat.strategies.strategy import Node, Setup
from offbeat.validation import require, require_not_negative, require_positive


@dataclass(frozen=True)
class Hub(Centred):
    """Rank 0 is the hub, all other ranks compute."""

    summary: ClassVar[str] = "one hub and its workers, composed from parts"

    compute: Budget | Share | TargetBatch = Samples(256)
    collect: Collect = All()
    waits: bool = True
    """Whether a worker waits for an answer before it computes again."""
    optimizer: Optimizer | None = None
    microbatch: int = 16
    staleness_max: int | None = None
    damping: float = 0.0
    in_flight_max: int = 2
    nonfinite_max: int = 5
    patience_seconds: float = 60.0
    checkpoint_interval_seconds: float | None = None
    """Where given, a lost worker sends everybody back to the last checkpoint; None: the others go on without it."""

    def __post_init__(self) -> None:
        require_positive(self, "microbatch", "in_flight_max", "nonfinite_max", "patience_seconds")
        require_positive(self, "checkpoint_interval_seconds")
        require_not_negative(self, "staleness_max", "damping")

    @property
    def staleness_bound(self) -> int | None:
        return 0 if self.waits and self.collect.synchronous else self.staleness_max

    def node(self, setup: Setup) -> Node:
        if setup.rank != HUB:
            return Worker(
                setup,
                microbatch=self.microbatch,
                waits=self.waits,
                in_flight_max=self.in_flight_max,
                patience_seconds=self.patience_seconds,
            )
        require(
            self.optimizer is not None,
            "the strategy has no optimizer; give it one, for example optimizer=offbeat.SGD(lr=0.1)",
        )
        return HubNode(self, setup) if self.checkpoint_interval_seconds is None else RestartingHub(self, setup)
