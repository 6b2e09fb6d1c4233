"""The messages of parameter-server strategies besides Stop and Stopped, and the node of a worker.

hub → worker   Welcome      after joining: the newest parameters, and the position in the worker's data
hub → worker   Parameters   newer parameters; a worker that waits computes at these
worker → hub   Gradient     a sum of gradients, and over how many samples

After a round the worker sends its gradient; then it either waits for new parameters, or continues with the newest that
it has. How it joins, loses the hub and ends is in `worker_node.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from offbeat.core.actions import Action, Budget, Compute, Report, Seconds, Send
from offbeat.core.buffer_merge import BufferMerge
from offbeat.core.events import GradientReady, MessageArrived, StepReady
from offbeat.core.flat import is_finite
from offbeat.core.messages import Buffers, LoaderMessage, Message
from offbeat.core.sample_ledger import Range
from offbeat.core.strategy import NodeContext
from offbeat.errors import ConfigurationError
from offbeat.records.schema import Notice
from offbeat.strategies.hub.hub_parts import HubSettings
from offbeat.strategies.message_kinds import kept, unexpected
from offbeat.strategies.server_node import HUB
from offbeat.strategies.worker_node import WorkerNode


@dataclass(frozen=True)
class Parameters(Message):
    """Parameters, and how much to compute at them."""

    values: ClassVar[tuple[str, ...]] = ("parameters",)

    parameters: Tensor
    buffers: Buffers
    version: int
    budget: Budget


@dataclass(frozen=True)
class Welcome(LoaderMessage):
    """As `Parameters`, and the data position: continue at `draw`, but skip `done`, which has already arrived."""

    parameters: Tensor
    buffers: Buffers
    version: int
    budget: Budget
    draw: int
    done: tuple[Range, ...]


@dataclass(frozen=True)
class Gradient(LoaderMessage):
    """`gradient` is the sum over `samples` samples, in the dtype of the model; it is empty where it was not finite.

    `weight` is the sum of the weights of the samples; None: each has the weight 1.
    """

    increments: ClassVar[tuple[str, ...]] = ("gradient",)

    gradient: Tensor
    buffers: Buffers
    """What the round has added to the buffers that it began with: `BufferMerge.contribution`."""
    samples: int
    loss: float
    version: int
    draws: Range
    seconds: float
    finite: bool
    weight: float | None = None

    @property
    def divisor(self) -> float:
        """What the gradient is divided by for the mean."""
        return self.samples if self.weight is None else self.weight


class HubWorker(WorkerNode):
    _latest: Parameters | None = None
    """The newest parameters from the hub; None without a link to it."""
    _has_new: bool = False
    """Whether no round has been started at `_latest`."""
    _cap_noticed: bool = False
    _buffers_before: Buffers = ()
    """Buffers at the start of the outstanding computation."""

    def __init__(self, config: HubSettings, context: NodeContext) -> None:
        super().__init__(context, config.patience_seconds)
        self._config = config
        self._buffer_merge = BufferMerge(context.layout.statistics)

    def _message_arrived(self, event: MessageArrived) -> Iterable[Action]:
        match event.message:
            case Welcome():
                return self._welcome(kept(event, Welcome))
            case Parameters():
                return self._parameters(kept(event, Parameters))
            case _:
                raise unexpected(event, self._context.rank)

    def _welcome(self, welcome: Welcome) -> Iterator[Action]:
        if self._latest is not None and welcome.version < self._latest.version:
            return  # overtaken by a later one
        self._latest = Parameters(welcome.parameters, welcome.buffers, welcome.version, welcome.budget)
        self._has_new = True
        yield from self._set_position(welcome.draw, welcome.done, welcome)
        yield from self._compute()

    def _parameters(self, message: Parameters) -> Iterable[Action]:
        if self._latest is None or message.version < self._latest.version:
            return ()  # overtaken by later ones, or sent over the link that broke
        self._latest = message
        self._has_new = True
        return self._compute()

    def _compute(self) -> Iterator[Action]:
        """Start a round unless one is under way, parameters are missing, or the link does not keep up."""
        if self._computing or self._latest is None or self._ending:
            return
        if not self._has_new if self._config.waits else self._in_flight >= self._config.in_flight_max:
            return
        self._computing, self._has_new = True, False
        latest = self._latest
        self._buffers_before = latest.buffers
        budget, microbatch = self._next_budget(latest.budget), self._config.microbatch
        at = latest.parameters, latest.buffers, latest.version
        yield Compute(*at, self._draw, budget, microbatch, self._loader)

    def _computed(self, event: GradientReady | StepReady) -> Iterator[Action]:
        if isinstance(event, StepReady):
            raise ConfigurationError(
                "a hub strategy steps its own optimizer, on the hub; hand it gradients, not steps of yours"
            )
        self._in_flight += 1
        yield Send(HUB, self._gradient(event))
        yield from self._cap_notice(event)
        yield from self._compute()

    def _gradient(self, event: GradientReady) -> Gradient:
        gradient = event.gradient.to(self._context.layout.dtype)
        is_rounded = gradient is not event.gradient
        finite = event.finite and (not is_rounded or is_finite(gradient))  # float16 ends at 65504
        return Gradient(
            gradient=gradient if finite else gradient.new_empty(0),
            buffers=self._buffer_merge.contribution(self._buffers_before, event.buffers) if finite else (),
            samples=event.samples,
            loss=event.loss if finite else 0.0,
            version=event.version,
            draws=event.draws,
            seconds=event.seconds,
            finite=finite,
            weight=event.weight,
            **self._take_loader(),
        )

    def _cap_notice(self, event: GradientReady) -> Iterator[Action]:
        """Report, once, that samples_max has ended a round before its time limit."""
        budget = self._latest.budget if self._latest else None
        if self._cap_noticed or not isinstance(budget, Seconds) or budget.samples_max is None:
            return
        if event.samples >= budget.samples_max and event.seconds < budget.seconds:
            self._cap_noticed = True
            text = (
                f"worker {self._context.rank} had computed samples_max = {budget.samples_max} samples "
                f"after {event.seconds:.3g} of {budget.seconds:.3g} s and stopped; raise samples_max to use the rest"
            )
            yield Report(Notice(at=event.at, rank=self._context.rank, text=text))

    def _reset_hub(self) -> None:
        self._latest, self._has_new = None, False

    def _newest(self) -> tuple[Tensor, Buffers, int]:
        if self._latest is None:
            return self._context.parameters, self._context.buffers, 0
        return self._latest.parameters, self._latest.buffers, self._latest.version
