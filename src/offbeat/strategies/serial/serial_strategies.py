"""Serial training by name: the plain loop that everything else is measured against, and the same with stale gradients.

name               gradient at                                 update
serial             the newest parameters                       after every gradient
artificial-delay   one of the last D iterates, by chance       of the newest, after every gradient, by AMSGrad

`--workers` is for others: these take one process, the first worker of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

from offbeat.core.configuration import option
from offbeat.core.optimizers import AMSGrad, Optimizer
from offbeat.core.strategy import Node, NodeContext, Strategy
from offbeat.core.validation import check_types, require, require_positive
from offbeat.strategies.serial.serial_node import SerialNode


@dataclass(frozen=True)
class Serial(Strategy, name="serial"):
    """One process, one batch after the other, however many workers others have. Nothing is sent or compressed."""

    summary: ClassVar[str] = "one process and one batch after the other: what a single machine does by itself"
    paper: ClassVar[str] = "Robbins and Monro, 1951 (stochastic approximation)"

    batch: int = option(64, "samples per update")
    microbatch: int = option(16, "samples per forward and backward call")
    optimizer: Optimizer | None = option(None, "how it updates; none: the one that suits the workload")
    nonfinite_max: int = option(5, "gradients in a row that may be NaN or infinite before the run fails")

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "batch", "microbatch", "nonfinite_max")

    def processes(self, workers: int) -> int:
        return 1

    def computes(self, rank: int) -> bool:
        return rank == 0

    def peers(self, rank: int, processes: int) -> Iterable[int]:
        return ()

    def is_required(self, rank: int) -> bool:
        return True

    @property
    def is_decentralized(self) -> bool:
        return True

    @property
    def is_elastic(self) -> bool:
        return False

    @property
    def staleness_bound(self) -> int | None:
        return self.iterates - 1

    @property
    def iterates(self) -> int:
        """How many of the newest parameters are kept, one of which is differentiated at."""
        return 1

    def node(self, context: NodeContext) -> Node:
        require(
            len(context.members) == 1,
            f"{self.name} trains in one process, but {len(context.members)} were started; start one: python script.py",
        )
        return SerialNode(self, context)


@dataclass(frozen=True)
class ArtificialDelay(Serial, name="artificial-delay"):
    """Serial training whose gradients are stale on purpose, to study what staleness costs by itself.

    The last D iterates are kept. Each step draws one of them, all with the same chance, from a random stream of its
    own, takes the gradient there, and applies it to the newest. So delays are uniform on 0 .. D − 1, and fewer while
    there are fewer iterates; D = 1 is `serial`, bit for bit. Buffers, such as the statistics of batch norm, belong to
    the newest model and are not delayed. Memory and checkpoints hold D times the parameters.
    """

    summary: ClassVar[str] = "serial AMSGrad, its gradients taken up to D − 1 updates ago by chance: a study of delay"
    paper: ClassVar[str] = "Xu et al., 2020, arXiv:2002.09095 (APAM's study of delay)"

    delay: int = option(1, "D: a gradient is 0 to D − 1 updates old, each as likely")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "delay")

    @property
    def iterates(self) -> int:
        return self.delay

    @property
    def allows_stale_compute(self) -> bool:
        return True

    def with_default_optimizer(self, optimizer: Optimizer) -> Self:
        return super().with_default_optimizer(AMSGrad.like(optimizer))
