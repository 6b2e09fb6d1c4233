"""What hub and workers say to each other, besides Stop and Stopped.

hub → worker   Welcome      you have joined: the newest parameters, and where in your data to go on
hub → worker   Parameters   newer parameters (to one that waits: compute at these)
worker → hub   Gradient     a sum of gradients and how many samples are in it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import Tensor

from offbeat.core.actions import Action, Budget, Compute, Report, Seconds, Send
from offbeat.core.configuration import from_plain, to_plain
from offbeat.core.events import GradientReady, MessageArrived, StepReady
from offbeat.core.messages import Buffers, Message
from offbeat.core.sample_ledger import Range
from offbeat.core.strategy import NodeContext, State
from offbeat.errors import ConfigurationError
from offbeat.records.schema import Notice
from offbeat.strategies.server_node import HUB
from offbeat.strategies.worker_node import WorkerNode, pack


@dataclass(frozen=True)
class Parameters(Message):
    """`budget` is how much to compute at them: the limit travels with the parameters."""

    values: ClassVar[tuple[str, ...]] = ("parameters",)

    parameters: Tensor
    buffers: Buffers
    version: int
    budget: Budget


@dataclass(frozen=True)
class Welcome(Message):
    """As `Parameters`, and the data position: go on at `draw`, but pass over `done`, which has arrived already."""

    parameters: Tensor
    buffers: Buffers
    version: int
    budget: Budget
    draw: int
    done: tuple[Range, ...]


@dataclass(frozen=True)
class Gradient(Message):
    """`gradient` is the sum over `samples` samples, and empty where it was not finite."""

    increments: ClassVar[tuple[str, ...]] = ("gradient",)

    gradient: Tensor
    buffers: Buffers
    samples: int
    loss: float
    version: int
    draws: Range
    seconds: float
    finite: bool


# A worker: computes gradients where the hub tells it to, and reports their sum.
#
# After a round it sends the gradient and then either waits for the answer or goes on with the newest parameters it has.
# How it joins the hub, loses it and ends stands in `follower.py`.


class HubWorker(WorkerNode):
    def __init__(
        self, context: NodeContext, *, microbatch: int, waits: bool, in_flight_max: int, patience_seconds: float
    ) -> None:
        super().__init__(context, patience_seconds)
        self._microbatch = microbatch
        self._waits = waits
        self._in_flight_max = in_flight_max
        self._told: Parameters | None = None
        """The newest parameters."""
        self._told_to_compute = False
        self._warned_of_cap = False

    def _received(self, event: MessageArrived) -> Iterable[Action]:
        message = event.keep()
        return self._welcome(message) if isinstance(message, Welcome) else self._parameters(cast(Parameters, message))

    def _welcome(self, welcome: Welcome) -> Iterator[Action]:
        if self._told is not None and welcome.version < self._told.version:
            return  # overtaken by a later one
        self._told = Parameters(welcome.parameters, welcome.buffers, welcome.version, welcome.budget)
        self._told_to_compute = True
        yield from self._go_on_at(welcome.draw, welcome.done)
        yield from self._compute()

    def _parameters(self, message: Parameters) -> Iterable[Action]:
        if self._told is None or message.version < self._told.version:
            return ()  # overtaken on the way, or meant for the link that broke
        self._told = message
        self._told_to_compute = True
        return self._compute()

    def _compute(self) -> Iterator[Action]:
        """Start a round, if one is due: none is under way, there is something to compute at, and the link keeps up."""
        if self._computing or self._told is None or self._ending:
            return
        if not self._told_to_compute if self._waits else self._in_flight >= self._in_flight_max:
            return
        self._computing, self._told_to_compute = True, False
        told = self._told
        budget = self._room_for(told.budget)
        yield Compute(told.parameters, told.buffers, told.version, self._draw, budget, self._microbatch)

    def _computed(self, event: GradientReady | StepReady) -> Iterator[Action]:
        if isinstance(event, StepReady):
            raise ConfigurationError(
                "a hub strategy steps its own optimizer, on the hub; hand it gradients, not steps of yours"
            )
        self._in_flight += 1
        yield Send(HUB, self._report(event))
        yield from self._cap_notice(event)
        yield from self._compute()

    def _report(self, event: GradientReady) -> Gradient:
        gradient = event.gradient if event.finite else event.gradient.new_empty(0)
        return Gradient(
            gradient=gradient,
            buffers=event.buffers if event.finite else (),
            samples=event.samples,
            loss=event.loss if event.finite else 0.0,
            version=event.version,
            draws=event.draws,
            seconds=event.seconds,
            finite=event.finite,
        )

    def _cap_notice(self, event: GradientReady) -> Iterator[Action]:
        budget = self._told.budget if self._told else None
        if self._warned_of_cap or not isinstance(budget, Seconds) or budget.samples_max is None:
            return
        if event.samples >= budget.samples_max and event.seconds < budget.seconds:
            self._warned_of_cap = True
            text = (
                f"worker {self._setup.rank} had computed samples_max = {budget.samples_max} samples "
                f"after {event.seconds:.3g} of {budget.seconds:.3g} s and stopped; raise samples_max to use the rest"
            )
            yield Report(Notice(at=event.at, rank=self._setup.rank, text=text))

    def _forget_hub(self) -> None:
        self._told, self._told_to_compute = None, False

    def _newest(self) -> tuple[Tensor, Buffers, int]:
        if self._told is None:
            return self._setup.parameters, self._setup.buffers, 0
        return self._told.parameters, self._told.buffers, self._told.version

    def state(self) -> State:
        told = None
        if self._told is not None:
            told = pack(self._told.parameters, self._told.buffers, self._told.version)
            told["budget"] = to_plain(self._told.budget)
        return {
            **super().state(),
            "newest": told,
            "told_to_compute": self._told_to_compute,
            "warned_of_cap": self._warned_of_cap,
        }

    def restore(self, state: State) -> None:
        super().restore(state)
        told = state["newest"]
        if told is not None:
            budget = from_plain(Budget, told["budget"], "budget")
            self._told = Parameters(told["parameters"], tuple(told["buffers"]), told["version"], budget)
        self._told_to_compute = state["told_to_compute"]
        self._warned_of_cap = state["warned_of_cap"]
