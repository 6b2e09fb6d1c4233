"""The local-steps algorithms: each is a choice of parts of `LocalSteps`, with flat fields of its own.

name               workers send, every k steps   the hub merges                       workers apply the result
local-sgd          differences                   the mean of all                      at once; all wait for it
diloco             differences                   the mean of all, by Nesterov SGD     at once; all wait for it
delayed-exchange   gradients, or differences     the mean of all                      d steps later, or on arrival if
                                                                                      that is later
decoupled-diloco   differences of one fragment   after a quorum and a grace window,   on arrival; none waits
                   at a time                     by Nesterov SGD
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from offbeat.core.optimizers import SGD, AdamW, LoopOptimizer, Optimizer
from offbeat.core.random_settings import PARAMETERS_MIN, maybe, random_optimizer
from offbeat.core.randomness import stream
from offbeat.core.strategy import Node, NodeContext
from offbeat.core.validation import check_types, require, require_not_negative, require_positive
from offbeat.strategies.initial_parameters import Initial, Same, Shuffled
from offbeat.strategies.local_steps.local_steps_parts import Everyone, Merge, Quorum
from offbeat.strategies.local_steps.local_steps_server import LocalStepsServer
from offbeat.strategies.local_steps_worker import LocalStepsWorker
from offbeat.strategies.local_training import Content, Differences, Gradients, LocalTraining, Values
from offbeat.strategies.server_node import HUB, ServerStrategy, shared_fields

REFERENCE_WORKER = 1
"""The rank whose replica the hub's parameters are: it begins with those of the model, whatever others begin with."""


@dataclass(frozen=True)
class LocalSteps(ServerStrategy):
    """Local training composed from parts. Rank 0 is the hub, all other ranks train replicas of their own."""

    summary: ClassVar[str] = "workers that train replicas and exchange through a hub, composed from parts"

    every: int = 10
    """steps between two exchanges of a fragment"""
    delay: int | None = 0
    """steps after an exchange at which its result is applied; none: on arrival, and workers do not wait"""
    content: Content = Differences()
    """what workers send: differences of parameters, or gradients"""
    fragments: int = 1
    """fragments of the parameters, which are exchanged in turn"""
    merge: Merge = Everyone()
    """when the hub merges what workers have sent"""
    optimizer: Optimizer | None = None
    """how workers update; none: the one that suits the workload"""
    outer: Optimizer = SGD(lr=1.0)
    """how the hub updates, with the mean difference as its gradient; unused where workers send gradients"""
    initial: Initial = Same()
    """initial parameters of workers: same, or shuffled (each its own); differences of these stay for the whole run"""
    batch: int = 64
    """samples per step"""
    microbatch: int = 16
    """samples per forward and backward call"""
    in_flight_max: int = 2
    """messages a worker may have on the way before it waits for its link"""
    nonfinite_max: int = 5
    """gradients in a row from one worker that may be NaN or infinite before the run fails"""
    patience_seconds: float = 60.0
    """seconds that hub and workers wait for each other before the run fails"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "every", "fragments", "batch", "microbatch", "in_flight_max", "nonfinite_max")
        require_positive(self, "patience_seconds")
        require_not_negative(self, "delay", "hang_factor", "hang_seconds")
        require(
            self.fragments <= self.every,
            f"{self.fragments} fragments cannot all be sent in {self.every} steps, one a step at the most; "
            "raise every, or lower fragments",
        )
        require(
            not isinstance(self.content, Values),
            "workers of LocalSteps send gradients or differences; for a model per worker use offbeat.Population()",
        )
        require(
            self.fragments == 1 or not isinstance(self.content, Gradients),
            "gradients are sent in one piece, since the optimizer steps all parameters at once; set fragments to 1",
        )

    @classmethod
    def random_settings(cls, seed: int, workers: int) -> dict[str, Any]:
        return {}  # its parts are what a test chooses

    @property
    def staleness_bound(self) -> int | None:
        return 0 if self.delay == 0 and self.fragments == 1 and isinstance(self.merge, Everyone) else None

    def for_own_steps(self) -> Self:
        self.check_no_optimizer(self.optimizer)
        _check_takes_steps(self, self.content, "content")
        return dataclasses.replace(self, optimizer=LoopOptimizer())

    def node(self, context: NodeContext) -> Node:
        require(
            self.fragments <= context.layout.numel,
            f"a model of {context.layout.numel} parameters cannot be sent in {self.fragments} fragments; "
            "lower fragments",
        )
        training = LocalTraining.of(self, context)
        if context.rank != HUB:
            return LocalStepsWorker(context, training, self._offset(context))
        outer = training.optimizer if isinstance(self.content, Gradients) else self.outer
        return LocalStepsServer(context, training, self.merge, outer)

    def _offset(self, context: NodeContext) -> Tensor | None:
        """Initial parameters of this worker less those of the model; None: it begins with those.

        The same in every process of a rank, so that a worker that has crashed continues with its replica.
        """
        if isinstance(self.initial, Same) or context.rank == REFERENCE_WORKER:
            return None
        random = stream(0, "initial parameters", context.rank)
        return self.initial.parameters(context.parameters, context.layout, random).sub_(context.parameters)


OUTER = SGD(lr=0.7, momentum=0.5, nesterov=True)
"""The outer optimizer of DiLoCo. Published is momentum 0.9, for hundreds of rounds; below 50 rounds 0.5 is better."""

ADAMW_LR_MAX = 1e-2
"""A learning rate above this is meant for another optimizer."""


@dataclass(frozen=True)
class LocalStepsStrategy(ServerStrategy):
    """A local-steps algorithm by name."""

    optimizer_field: ClassVar[str] = "optimizer"
    """The field with the optimizer of the workers."""

    batch: int = 64
    """samples per local step"""
    microbatch: int = 16
    """samples per forward and backward call"""
    nonfinite_max: int = 5
    """gradients in a row from one worker that may be NaN or infinite before the run fails"""
    patience_seconds: float = 60.0
    """seconds that hub and workers wait for each other before the run fails"""

    @abstractmethod
    def composition(self) -> LocalSteps:
        """The composition of parts."""

    def __post_init__(self) -> None:
        check_types(self)
        positive = ("every", "fragments", "quorum", "batch", "microbatch", "nonfinite_max", "patience_seconds")
        require_positive(self, *(name for name in positive if hasattr(self, name)))
        self.composition()  # raises what its parts raise

    @classmethod
    def random_settings(cls, seed: int, workers: int) -> dict[str, Any]:
        """For all strategies of the family; a case uses the fields that its strategy has."""
        random = stream(seed, "fuzz local steps")
        every = int(random.integers(1, 6))
        return {
            "every": every,
            "delay": int(random.integers(0, 8)),
            "send": [Gradients(), Differences()][int(random.integers(2))],
            "fragments": min(int(random.integers(1, every + 1)), PARAMETERS_MIN),
            "quorum": maybe(random, int(random.integers(1, workers + 1))),
            "grace": float(random.choice([0.0, 0.5, 1.0])),
            "inner": random_optimizer(random),
            "outer": [SGD(lr=1.0), SGD(lr=0.7, momentum=0.5, nesterov=True)][int(random.integers(2))],
            "initial": [Same(), Shuffled()][int(random.integers(2))],
        }

    def for_own_steps(self) -> Self:
        self.check_no_optimizer(getattr(self, self.optimizer_field))
        _check_takes_steps(self, getattr(self, "send", Differences()), "send")
        changes: dict[str, Any] = {self.optimizer_field: LoopOptimizer()}
        return dataclasses.replace(self, **changes)

    def composed(self, **parts: Any) -> LocalSteps:
        """A composition of these parts, and of the fields that `LocalSteps` has under the same name."""
        return LocalSteps(**{**shared_fields(self, LocalSteps), **parts})

    @property
    def staleness_bound(self) -> int | None:
        return self.composition().staleness_bound

    def node(self, context: NodeContext) -> Node:
        return self.composition().node(context)


@dataclass(frozen=True)
class LocalSGD(LocalStepsStrategy, name="local-sgd"):
    """All workers train for k steps, then continue with the mean of their parameters."""

    summary: ClassVar[str] = "synchronous, but only every k steps: workers train alone, then average their parameters"
    paper: ClassVar[str] = "Stich, ICLR 2019 (local SGD)"
    figure_style: ClassVar[int | None] = 8

    every: int = 10
    """steps between two averages"""
    optimizer: Optimizer | None = None
    """how every worker updates; none: the one that suits the workload"""

    def composition(self) -> LocalSteps:
        return self.composed()


@dataclass(frozen=True)
class DiLoCo(LocalStepsStrategy, name="diloco"):
    """Local steps by AdamW; the hub steps by Nesterov momentum with the mean difference as its gradient."""

    summary: ClassVar[str] = "synchronous every k steps: AdamW on workers, Nesterov momentum on their mean difference"
    paper: ClassVar[str] = "Douillard et al., 2023, arXiv:2311.08105 (DiLoCo)"
    figure_style: ClassVar[int | None] = 11
    optimizer_field: ClassVar[str] = "inner"

    every: int = 50
    """steps between two exchanges"""
    inner: Optimizer | None = None
    """how every worker updates; none: AdamW at the rate that suits the workload"""
    outer: Optimizer = OUTER
    """how the hub updates, with the mean difference as its gradient"""

    def composition(self) -> LocalSteps:
        return self.composed(optimizer=self.inner)

    def with_default_optimizer(self, optimizer: Optimizer) -> Self:
        return self if self.inner is not None else dataclasses.replace(self, inner=adamw(optimizer))


@dataclass(frozen=True)
class DelayedExchange(LocalStepsStrategy, name="delayed-exchange"):
    """Workers continue to train while an exchange is in flight; its result is applied d steps later."""

    summary: ClassVar[str] = "workers send every k steps and apply the result d steps later, and do not wait meanwhile"
    paper: ClassVar[str] = "a proof of concept for PC clusters; as DaSGD, Zhou et al., 2020, arXiv:2006.00441"
    figure_style: ClassVar[int | None] = 12

    every: int = 4
    """steps between two exchanges"""
    delay: int = 2
    """steps after which the result is applied; 0: all workers wait for it"""
    send: Content = Gradients()
    """what is sent: gradients, or differences (of parameters)"""
    initial: Initial = Same()
    """initial parameters of workers: same, or shuffled (each its own); differences of these stay for the whole run"""
    optimizer: Optimizer | None = None
    """how workers and hub update; none: the one that suits the workload"""

    def composition(self) -> LocalSteps:
        return self.composed(content=self.send)


@dataclass(frozen=True)
class DecoupledDiLoCo(LocalStepsStrategy, name="decoupled-diloco"):
    """DiLoCo without waiting: fragments in turn, merged when a quorum has sent them and the grace window has ended."""

    summary: ClassVar[str] = "DiLoCo where no worker waits: fragments in turn, a quorum and a grace window at the hub"
    paper: ClassVar[str] = "Decoupled DiLoCo, 2026, arXiv:2604.21428"
    figure_style: ClassVar[int | None] = 14
    optimizer_field: ClassVar[str] = "inner"

    every: int = 48
    """steps in which every fragment is sent once"""
    fragments: int = 4
    """fragments that the parameters are sent in, one after the other"""
    quorum: int | None = None
    """workers that make a quorum; none: half of those that are connected"""
    grace: float = 0.5
    """grace window after the quorum, as a share of the fastest worker's cycle"""
    inner: Optimizer | None = None
    """how every worker updates; none: AdamW at the rate that suits the workload"""
    outer: Optimizer = OUTER
    """how the hub updates, with the mean difference as its gradient"""
    in_flight_max: int = 2
    """messages a worker may have on the way before it skips an exchange"""

    def processes(self, workers: int) -> int:
        require(
            self.quorum is None or self.quorum <= workers,
            f"decoupled-diloco cannot wait for a quorum of {self.quorum} among {workers} workers; give a smaller one "
            "or more workers",
        )
        return super().processes(workers)

    def composition(self) -> LocalSteps:
        return self.composed(delay=None, merge=Quorum(self.quorum, self.grace), optimizer=self.inner)

    def with_default_optimizer(self, optimizer: Optimizer) -> Self:
        return self if self.inner is not None else dataclasses.replace(self, inner=adamw(optimizer))


def _check_takes_steps(strategy: ServerStrategy, content: Content, field: str) -> None:
    """Raise `ConfigurationError` for workers that send gradients, which steps of the loop's own optimizer are not."""
    name = type(strategy).__name__
    require(
        not isinstance(content, Gradients),
        f"{name} sends gradients, but workers that step an optimizer of the loop have differences of parameters; type "
        f"offbeat.{name}({field}=offbeat.parts.Differences())",
    )


def adamw(optimizer: Optimizer) -> AdamW:
    """AdamW with the rate and clipping of the workload's optimizer, but no more than `ADAMW_LR_MAX`."""
    given = {"lr": optimizer.lr, "clip_norm": optimizer.clip_norm}
    if isinstance(optimizer.lr, int | float):
        given["lr"] = min(optimizer.lr, ADAMW_LR_MAX)
    return AdamW(weight_decay=0.0, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
