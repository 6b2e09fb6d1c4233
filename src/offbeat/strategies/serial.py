"""Serial training: the plain loop that everything else is measured against, and the same with stale gradients.

    name               gradient at                               update
    serial             the newest parameters                     after every gradient
    artificial-delay   one of the last D iterates, by chance     of the newest, after every gradient, by AMSGrad

One process, the first worker of the cluster, does everything; nothing is sent.

    step    draw one of the kept iterates → compute its gradient → update the newest, and keep the result
    stop    after enough samples or seconds: evaluate the result → Finish

Invariants: an iterate is a tensor that is never changed after it was made, so it is kept, differentiated at, evaluated
and saved without a copy. Data positions are used in order; a gradient that is not finite is dropped with its samples.
A node restored from a checkpoint repeats the step that was under way, at the same iterate.
Papers: Robbins and Monro, 1951; Xu et al., 2020, arXiv:2002.09095 (delay).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from offbeat.core import randomness
from offbeat.core.actions import Action, Cancel, ClearTimer, Compute, Finish, Report, Samples, Seconds, SetTimer
from offbeat.core.events import Evaluated, Event, GradientReady, Leave, Started, StepReady, TimerFired
from offbeat.core.memory_pool import Pool
from offbeat.core.optimizers import AMSGrad, Optimizer
from offbeat.core.randomness import stream
from offbeat.core.strategy import Node, NodeContext, State, Strategy
from offbeat.core.validation import check_types, require, require_positive
from offbeat.errors import ConfigurationError
from offbeat.records.schema import Contribution, Dropped, Reason, Update
from offbeat.strategies.evaluations import Evaluations


@dataclass(frozen=True)
class Serial(Strategy, name="serial"):
    """One process, one batch after the other, however many workers others have. Nothing is sent or compressed."""

    summary: ClassVar[str] = "one process and one batch after the other: what a single machine does by itself"
    paper: ClassVar[str] = "Robbins and Monro, 1951 (stochastic approximation)"
    figure_style: ClassVar[int | None] = 15

    batch: int = 64
    """samples per update"""
    microbatch: int = 16
    """samples per forward and backward call"""
    optimizer: Optimizer | None = None
    """how it updates; none: the one that suits the workload"""
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


Computed = GradientReady | StepReady


class SerialNode(Node):
    def __init__(self, config: Serial, context: NodeContext) -> None:
        self._config, self._setup, self._rank = config, context, context.rank
        self._parameters = context.parameters.clone()
        self._buffers = context.buffers
        optimizer = config.optimizer
        self._stepper = None if optimizer is None else optimizer.build(self._parameters, context.layout)
        self._copies = Pool()
        self._iterates: deque[Tensor] = deque([context.parameters], maxlen=config.iterates)
        """The newest is the last."""
        self._delay = 0
        """Of the step that is under way: how many updates before the newest its gradient is taken."""
        self._evaluations = Evaluations(context.rank, context.evaluate)
        self._version = 0
        self._samples = 0
        self._draw = 0
        self._began_at: float | None = None
        self._computing = False
        self._nonfinite_in_a_row = 0
        self._stopping = False
        self._failure: str | None = None
        self._finished = False

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
            case Started():
                return self._start(event.at) if self._began_at is None else self._resume(event.at)
            case _:
                return ()

    def _start(self, at: float) -> Iterator[Action]:
        self._began_at = at
        yield from self._set_timer(at)
        yield from self._evaluate(at)
        yield from self._step()

    def _resume(self, at: float) -> Iterator[Action]:
        """Go on from a checkpoint, in a process that has nothing under way."""
        self._evaluations.reset()
        self._computing = False
        if self._stopping:
            yield from self._evaluate(at)  # the result, if the process before died while it was measured
            yield from self._finish_if_done()
            return
        yield from self._set_timer(at)
        yield from self._compute()

    def _set_timer(self, at: float) -> Iterator[Action]:
        if isinstance(self._setup.until, Seconds):
            assert self._began_at is not None
            yield SetTimer("until", max(0.0, self._began_at + self._setup.until.seconds - at))

    # Train

    def _step(self) -> Iterator[Action]:
        self._delay = int(self._setup.random.integers(len(self._iterates)))
        yield from self._compute()

    def _compute(self) -> Iterator[Action]:
        self._computing = True
        budget, microbatch = Samples(self._config.batch), self._config.microbatch
        at = self._iterates[-1 - self._delay]
        yield Compute(at, self._buffers, self._version - self._delay, self._draw, budget, microbatch)

    def _computed(self, event: Computed) -> Iterator[Action]:
        self._computing = False
        if self._stopping:
            yield from self._drop(event, "stopped")
            yield from self._finish_if_done()
            return
        self._draw = event.draws[1]
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

    def _update(self, event: Computed) -> Iterator[Action]:
        rate = self._apply(event)
        self._iterates.append(self._copies.copy(self._parameters))
        self._buffers = tuple(buffer.clone() for buffer in event.buffers)
        self._version += 1
        self._samples += event.samples
        yield Report(
            Update(
                at=event.at,
                rank=self._rank,
                version=self._version,
                messages=1,
                samples=event.samples,
                samples_total=self._samples,
                learning_rate=rate,
                contributions=(Contribution(self._rank, *event.draws, self._delay),),
            )
        )
        if self._evaluations.due(event.at, self._version):
            yield from self._evaluate(event.at)

    def _apply(self, event: Computed) -> float:
        """Change the newest parameters; the learning rate, where there is one here."""
        if isinstance(event, StepReady):
            self._parameters.add_(event.delta)
            return 0.0
        if self._stepper is None:
            raise ConfigurationError(
                f"{self._config.name} has no optimizer; give it one, for example optimizer=offbeat.SGD(lr=0.1)"
            )
        return self._stepper.step(event.gradient.div_(event.samples), self._samples)

    def _drop(self, event: Computed, reason: Reason) -> Iterator[Action]:
        first, stop = event.draws
        if stop > first:
            staleness = self._version - event.version
            yield Report(
                Dropped(at=event.at, rank=self._rank, first=first, stop=stop, staleness=staleness, reason=reason)
            )

    def _has_enough(self) -> bool:
        until = self._setup.until
        samples_max = until.count if isinstance(until, Samples) else getattr(until, "samples_max", None)
        return samples_max is not None and self._samples >= samples_max

    def _evaluate(self, at: float) -> Iterator[Action]:
        if self._evaluations.has_new(self._version):
            values = self._iterates[-1], self._buffers
            yield from self._evaluations.begin(at, self._version, self._samples, values)

    def _evaluated(self, event: Evaluated) -> Iterator[Action]:
        yield from self._evaluations.report(event)
        yield from self._finish_if_done()

    # Stop

    def _stop(self, at: float) -> Iterator[Action]:
        if self._stopping:
            return
        self._stopping = True
        yield ClearTimer("until")
        if self._computing:
            yield Cancel()
        yield from self._evaluate(at)
        yield from self._finish_if_done()

    def _finish_if_done(self) -> Iterator[Action]:
        if self._stopping and not self._computing and not self._evaluations.under_way:
            self._finished = True
            yield Finish(self._iterates[-1], self._buffers, self._version, self._failure)

    def replica(self) -> Tensor:
        return self._iterates[-1]

    # State

    def state(self) -> State:
        return {
            "iterates": list(self._iterates),  # which nobody changes, so they need not be copied
            "buffers": list(self._buffers),
            "optimizer": None if self._stepper is None else self._stepper.state(),
            "random": randomness.state_of(self._setup.random),
            "evaluations": self._evaluations.state(),
            "plain": {name: getattr(self, f"_{name}") for name in _PLAIN},
        }

    def restore(self, state: State) -> None:
        self._iterates.clear()
        self._iterates.extend(state["iterates"])
        self._parameters.copy_(self._iterates[-1])
        self._buffers = tuple(state["buffers"])
        if self._stepper is not None:
            self._stepper.restore(state["optimizer"])
        randomness.restore(self._setup.random, state["random"])
        self._evaluations.restore(state["evaluations"])
        for name in _PLAIN:
            setattr(self, f"_{name}", state["plain"][name])


_PLAIN = (
    "delay",
    "version",
    "samples",
    "draw",
    "began_at",
    "computing",
    "nonfinite_in_a_row",
    "stopping",
    "failure",
    "finished",
)
"""Fields of the state that are plain values."""
