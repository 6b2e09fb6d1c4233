"""Serial training: the plain loop that everything else is compared with, and the same with stale gradients.

    name               gradient at                             update, after every gradient
    serial             the newest parameters                   of the newest parameters
    artificial-delay   one of the last D iterates, at random   of the newest parameters, by AMSGrad

One process, the first worker of the cluster, does everything; nothing is sent.

    step    draw one of the kept iterates → compute its gradient → update the newest, and keep the result
    stop    after enough samples or seconds: evaluate the result → Finish

Invariants: the tensor of an iterate is never changed, so it is kept, differentiated at, evaluated and saved without a
copy. Data positions are used in order; a gradient that is not finite is dropped with its samples.
A node restored from a checkpoint repeats the step that was under way, at the same iterate.
Papers: Robbins and Monro, 1951; Xu et al., 2020, arXiv:2002.09095 (delay).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor

from offbeat.core.actions import Action, Cancel, ClearTimer, Compute, Finish, Samples
from offbeat.core.events import Evaluated, Event, GradientReady, Leave, MessageArrived, Started, StepReady, TimerFired
from offbeat.core.loader_states import LoaderState
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Buffers
from offbeat.core.optimizers import AMSGrad, Optimizer, Stepper
from offbeat.core.randomness import stream
from offbeat.core.strategy import Node, NodeContext, Strategy
from offbeat.core.validation import check_types, require, require_positive
from offbeat.errors import ConfigurationError
from offbeat.records.schema import Contribution, Reason
from offbeat.strategies.message_kinds import unexpected
from offbeat.strategies.training_node import TrainingNode, dropped


@dataclass(frozen=True)
class Serial(Strategy, name="serial"):
    """One process that trains one batch after the other, whatever the number of workers. Nothing is sent."""

    summary: ClassVar[str] = "one process that trains one batch after the other: the baseline of a single machine"
    paper: ClassVar[str] = "Robbins and Monro, 1951 (stochastic approximation)"
    figure_style: ClassVar[int | None] = 15

    batch: int = 64
    """samples per update"""
    microbatch: int = 16
    """samples per forward and backward call"""
    optimizer: Optimizer | None = None
    """how the parameters are updated; none: the one that suits the workload"""
    nonfinite_max: int = 5
    """gradients in a row that may be NaN or infinite before the run fails"""

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
    def keeps_loaders(self) -> bool:
        return True

    @property
    def staleness_bound(self) -> int | None:
        return self.iterates - 1

    @property
    def iterates(self) -> int:
        """How many of the newest iterates are kept; gradients are computed at one of them."""
        return 1

    def node(self, context: NodeContext) -> Node:
        require(
            len(context.members) == 1,
            f"{self.name} trains in one process, but {len(context.members)} were started; start one: python script.py",
        )
        return SerialNode(self, context)


@dataclass(frozen=True)
class ArtificialDelay(Serial, name="artificial-delay"):
    """Serial training whose gradients are stale on purpose, to study the cost of staleness by itself.

    The last D iterates are kept. Each step draws one of them uniformly at random, computes the gradient there, and
    applies it to the newest. So delays are uniform on 0 .. D − 1, or less while there are fewer iterates; D = 1 is
    `serial`, bit for bit. Buffers, such as the statistics of batch norm, belong to the newest iterate and are not
    delayed. Memory and checkpoints hold D times the parameters.
    """

    summary: ClassVar[str] = "serial AMSGrad with gradients 0 to D − 1 updates old, at random: a study of delay"
    paper: ClassVar[str] = "Xu et al., 2020, arXiv:2002.09095 (APAM's study of delay)"
    figure_style: ClassVar[int | None] = 16

    delay: int = 1
    """D: a gradient is 0 to D − 1 updates old, each as likely"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "delay")

    @classmethod
    def random_settings(cls, seed: int, workers: int) -> dict[str, Any]:
        return {"delay": int(stream(seed, "fuzz delay").choice([1, 2, 5, 20]))}

    @property
    def iterates(self) -> int:
        return self.delay

    @property
    def allows_stale_compute(self) -> bool:
        return True

    def with_default_optimizer(self, optimizer: Optimizer) -> Self:
        return super().with_default_optimizer(AMSGrad.like(optimizer))


class SerialNode(TrainingNode):
    caches = ("_copies",)
    immutable = ("_iterates",)

    _parameters: Tensor
    _iterates: deque[Tensor]
    """The newest is the last."""
    _buffers: Buffers
    _optimizer: Stepper | None = None
    _random: np.random.Generator
    _delay: int = 0
    """Updates between the newest iterate and the one that the step under way is computed at."""
    _draw: int = 0
    _loader: LoaderState | None = None
    """The newest state of the data loader, at or before `_draw`."""
    _computing: bool = False
    _nonfinite_in_a_row: int = 0
    _stopping: bool = False

    def __init__(self, config: Serial, context: NodeContext) -> None:
        super().__init__(context)
        self._config = config
        self._parameters = context.parameters.clone()
        self._buffers = context.buffers
        if config.optimizer is not None:
            self._optimizer = config.optimizer.build(self._parameters, context.layout)
        self._copies = Pool()
        self._iterates = deque([context.parameters], maxlen=config.iterates)
        self._random = context.random

    # Events

    def handle(self, event: Event) -> Iterable[Action]:
        if self._finished:
            return ()
        match event:
            case GradientReady() | StepReady():
                return self._computed(event)
            case TimerFired(name="until") | Leave():
                return self._stop(event.at)
            case Evaluated():
                return self._evaluated(event)
            case MessageArrived():
                raise unexpected(event, self._context.rank)
            case Started():
                return self._resume(event.at) if self._started else self._start(event.at)
            case _:
                return ()

    def _start(self, at: float) -> Iterator[Action]:
        self._started, self._began_at = True, at
        yield from self._set_until_timer(at)
        yield from self._evaluate(at)
        yield from self._step()

    def _resume(self, at: float) -> Iterator[Action]:
        """Continue from a checkpoint, in a process that has nothing under way."""
        self._evaluations.reset()
        self._computing = False
        if self._stopping:
            yield from self._evaluate(at)  # the result, if the process ended during its evaluation
            yield from self._finish_if_done(at)
            return
        yield from self._set_until_timer(at)
        yield from self._compute()

    # Train

    def _step(self) -> Iterator[Action]:
        self._delay = int(self._random.integers(len(self._iterates)))
        yield from self._compute()

    def _compute(self) -> Iterator[Action]:
        self._computing = True
        iterate, version = self._iterates[-1 - self._delay], self._version - self._delay
        budget = Samples(self._config.batch)
        yield Compute(iterate, self._buffers, version, self._draw, budget, self._config.microbatch, self._loader)

    def _computed(self, event: GradientReady | StepReady) -> Iterator[Action]:
        self._computing = False
        if self._stopping:
            yield from self._drop(event, "stopped")
            yield from self._finish_if_done(event.at)
            return
        self._draw = event.draws[1]
        if isinstance(event, GradientReady) and event.loader is not None:
            self._loader = event.loader
        if event.finite and event.samples:
            self._nonfinite_in_a_row = 0
            yield from self._update(event)
        elif not event.finite:
            self._nonfinite_in_a_row += 1
            yield from self._drop(event, "nonfinite")
        if self._nonfinite_in_a_row >= self._config.nonfinite_max:
            self._failure = (
                f"{self._config.nonfinite_max} gradients in a row were not finite; lower the learning rate, clip the "
                "gradient (clip_norm), or look at the data"
            )
        if self._failure is not None or self._has_enough():
            yield from self._stop(event.at)
        else:
            yield from self._step()

    def _update(self, event: GradientReady | StepReady) -> Iterator[Action]:
        rate = self._apply(event)
        self._iterates.append(self._copies.copy(self._parameters))
        self._buffers = tuple(buffer.clone() for buffer in event.buffers)
        contribution = Contribution(self._context.rank, *event.draws, self._delay)
        yield from self._updated(event.at, 1, rate, [contribution])

    def _apply(self, event: GradientReady | StepReady) -> float:
        """Change the newest parameters, and return the learning rate; 0 if the user steps an optimizer."""
        if isinstance(event, StepReady):
            self._parameters.add_(event.delta)
            return 0.0
        if self._optimizer is None:
            raise ConfigurationError(
                f"{self._config.name} has no optimizer; give it one, for example optimizer=offbeat.SGD(lr=0.1)"
            )
        return self._optimizer.step(event.gradient.div_(event.divisor), self._samples)

    def _drop(self, event: GradientReady | StepReady, reason: Reason) -> Iterator[Action]:
        if event.draws[1] > event.draws[0]:
            yield dropped(event.at, self._context.rank, event.draws, self._version - event.version, reason)

    # Stop

    def _stop(self, at: float) -> Iterator[Action]:
        if self._stopping:
            return
        self._stopping = True
        yield ClearTimer("until")
        if self._computing:
            yield Cancel()
        yield from self._evaluate(at)
        yield from self._finish_if_done(at)

    def _finish_if_done(self, at: float) -> Iterator[Action]:
        if self._stopping and not self._computing and not self._evaluations.under_way:
            self._finished = True
            yield Finish(*self._result(), self._version, self._failure)

    def _result(self) -> tuple[Tensor, Buffers]:
        return self._iterates[-1], self._buffers

    def replica(self) -> Tensor:
        return self._iterates[-1]
