"""A worker: computes gradients where the hub tells it to, and reports their sum.

It begins when the hub welcomes it. After a round it sends the gradient and then either waits for the answer or
goes on with the newest parameters it has. When the link to the hub breaks it forgets what it was doing: whatever
the hub has not received is computed again after the next Welcome, from the position that the hub hands out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch

from offbeat.actions import (
    Action,
    Budget,
    Cancel,
    ClearTimer,
    Compute,
    Finish,
    Report,
    Samples,
    Seconds,
    Send,
    SetTimer,
)
from offbeat.configuration import from_plain, to_plain
from offbeat.draws import Draws
from offbeat.errors import ConfigurationError
from offbeat.events import (
    Event,
    GradientReady,
    Leave,
    MessageArrived,
    PeerJoined,
    PeerLost,
    Sent,
    Started,
    StepReady,
    TimerFired,
)
from offbeat.messages import Stop, Stopped
from offbeat.records.schema import Notice
from offbeat.strategies.hub.messages import Gradient, Parameters, Welcome
from offbeat.strategies.strategy import Node, Setup, State

HUB = 0


class Worker(Node):
    def __init__(
        self, setup: Setup, *, microbatch: int, waits: bool, in_flight_max: int, patience_seconds: float
    ) -> None:
        self._setup = setup
        self._microbatch = microbatch
        self._waits = waits
        self._in_flight_max = in_flight_max
        self._patience_seconds = patience_seconds

        self._newest: Parameters | None = None
        self._stop: Stop | None = None
        self._leaving = False
        self._draw = 0
        self._done = Draws()
        self._computing = False
        self._told_to_compute = False
        self._discard = False
        self._in_flight = 0
        self._samples = 0
        self._warned_of_cap = False

    def handle(self, event: Event) -> Iterable[Action]:
        match event:
            case GradientReady():
                return self._gradient_ready(event)
            case MessageArrived(message=Parameters()):
                return self._parameters(cast(Parameters, event.keep()))
            case MessageArrived(message=Welcome()):
                return self._welcome(cast(Welcome, event.keep()))
            case MessageArrived(message=Stop()):
                return self._stopping(cast(Stop, event.keep()))
            case Sent():
                self._in_flight = max(0, self._in_flight - 1)
                return self._compute()
            case PeerLost(peer=peer) if peer == HUB:
                return self._hub_lost()
            case PeerJoined(peer=peer) if peer == HUB:
                return [ClearTimer("hub")]
            case Leave():
                return self._leave()
            case StepReady():
                raise ConfigurationError(
                    "a hub strategy steps its own optimizer, on the hub; hand it gradients, not steps of yours"
                )
            case Started():
                return [SetTimer("hub", self._patience_seconds)]
            case TimerFired(name="hub"):
                return [
                    self._finish(f"worker {self._setup.rank} waited {self._patience_seconds:g} s for the hub in vain")
                ]
            case _:
                return ()

    def _welcome(self, welcome: Welcome) -> Iterator[Action]:
        self._newest = Parameters(welcome.parameters, welcome.buffers, welcome.version, welcome.budget)
        self._told_to_compute = True
        self._draw, self._done = welcome.draw, Draws(welcome.done)
        if self._computing and not self._discard:
            self._discard = True
            yield Cancel()
        yield from self._compute()

    def _parameters(self, message: Parameters) -> Iterable[Action]:
        if self._newest is None or message.version < self._newest.version:
            return ()  # overtaken on the way, or meant for the link that broke
        self._newest = message
        self._told_to_compute = True
        return self._compute()

    def _compute(self) -> Iterator[Action]:
        """Start a round, if one is due: none is under way, there is something to compute at, and the link keeps up."""
        if self._computing or self._newest is None or self._stop is not None or self._leaving:
            return
        if not self._told_to_compute if self._waits else self._in_flight >= self._in_flight_max:
            return
        self._computing, self._told_to_compute = True, False
        self._draw, room = self._done.room_from(self._draw)
        newest = self._newest
        budget = _within(newest.budget, room)
        yield Compute(newest.parameters, newest.buffers, newest.version, self._draw, budget, self._microbatch)

    def _gradient_ready(self, event: GradientReady) -> Iterator[Action]:
        self._computing = False
        self._samples += event.samples
        if self._stop is not None or self._leaving:
            if not self._discard:
                self._draw = event.draws[1]  # computed in vain, and accounted for
            yield from self._stopped()
        elif self._discard:
            self._discard = False
            yield from self._compute()
        else:
            self._draw = event.draws[1]
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
        budget = self._newest.budget if self._newest else None
        if self._warned_of_cap or not isinstance(budget, Seconds) or budget.samples_max is None:
            return
        if event.samples >= budget.samples_max and event.seconds < budget.seconds:
            self._warned_of_cap = True
            text = (
                f"worker {self._setup.rank} had computed samples_max = {budget.samples_max} samples "
                f"after {event.seconds:.3g} of {budget.seconds:.3g} s and stopped; raise samples_max to use the rest"
            )
            yield Report(Notice(at=event.at, rank=self._setup.rank, text=text))

    def _hub_lost(self) -> Iterator[Action]:
        self._newest, self._in_flight, self._told_to_compute = None, 0, False
        if self._computing and not self._discard:
            self._discard = True
            yield Cancel()
        yield SetTimer("hub", self._patience_seconds)

    def _stopping(self, stop: Stop) -> Iterator[Action]:
        if self._stop is not None or self._leaving:
            return
        self._stop = stop
        if self._computing:
            yield Cancel()
        else:
            yield from self._stopped()

    def _leave(self) -> Iterator[Action]:
        """Say goodbye unasked; what is being computed is left undone."""
        if self._leaving or self._stop is not None:
            return
        self._leaving = True
        if self._computing:
            yield Cancel()
        else:
            yield from self._stopped()

    def _stopped(self) -> Iterator[Action]:
        yield Send(HUB, Stopped(draws_stop=self._draw, samples=self._samples))
        yield self._finish(None)

    def _finish(self, failure: str | None) -> Finish:
        final = self._stop or self._newest
        if final is None:
            return Finish(self._setup.parameters, self._setup.buffers, 0, failure)
        return Finish(final.parameters, final.buffers, final.version, failure)

    def state(self) -> State:
        return {
            "newest": None if self._newest is None else _pack(self._newest),
            "stop": None if self._stop is None else _pack(self._stop),
            "leaving": self._leaving,
            "draw": self._draw,
            "done": self._done.ranges,
            "computing": self._computing,
            "told_to_compute": self._told_to_compute,
            "discard": self._discard,
            "in_flight": self._in_flight,
            "samples": self._samples,
            "warned_of_cap": self._warned_of_cap,
        }

    def restore(self, state: State) -> None:
        newest, stop = state["newest"], state["stop"]
        if newest is not None:
            budget = from_plain(Budget, newest["budget"], "budget")
            self._newest = Parameters(newest["parameters"], tuple(newest["buffers"]), newest["version"], budget)
        if stop is not None:
            self._stop = Stop(stop["parameters"], tuple(stop["buffers"]), stop["version"])
        self._leaving = state["leaving"]
        self._draw = state["draw"]
        self._done = Draws(tuple(r) for r in state["done"])
        self._computing = state["computing"]
        self._told_to_compute = state["told_to_compute"]
        self._discard = state["discard"]
        self._in_flight = state["in_flight"]
        self._samples = state["samples"]
        self._warned_of_cap = state["warned_of_cap"]


def _within(budget: Budget, room: int | None) -> Budget:
    """The budget, but never into data that the hub has already."""
    if room is None:
        return budget
    if isinstance(budget, Samples):
        alone = room - budget.count == 1  # a single sample left for later is one that batch norm cannot take
        return Samples(room if alone else min(budget.count, room))
    assert isinstance(budget, Seconds)
    return Seconds(budget.seconds, samples_max=min(budget.samples_max or room, room))


def _pack(message: Parameters | Stop) -> State:
    packed: State = {
        "parameters": message.parameters.detach().clone(memory_format=torch.contiguous_format),
        "buffers": [buffer.clone() for buffer in message.buffers],
        "version": message.version,
    }
    if isinstance(message, Parameters):
        packed["budget"] = to_plain(message.budget)
    return packed
