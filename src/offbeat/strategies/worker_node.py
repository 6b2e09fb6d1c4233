"""A rank that computes for a hub: it begins when the hub welcomes it, and ends when the hub says so.

When the link to the hub breaks it forgets what it was doing: whatever the hub has not received is computed again after
the next welcome, from the position that the hub hands out. A hub that is not there is waited for, but not for ever.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor

from offbeat.core.actions import Action, Budget, Cancel, ClearTimer, Finish, Samples, Seconds, Send, SetTimer
from offbeat.core.events import (
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
from offbeat.core.messages import Buffers, Stop, Stopped
from offbeat.core.sample_ledger import Range, SampleLedger
from offbeat.core.strategy import Node, NodeContext, State
from offbeat.strategies.server_node import HUB


class WorkerNode(Node):
    """What the workers of all families with a hub share."""

    def __init__(self, context: NodeContext, patience_seconds: float) -> None:
        self._setup = context
        self._patience_seconds = patience_seconds
        self._stop: Stop | None = None
        self._leaving = False
        self._draw = 0
        self._done = SampleLedger()
        self._computing = False
        self._discard = False
        self._in_flight = 0
        self._samples = 0

    # What a family fills in

    @abstractmethod
    def _received(self, event: MessageArrived) -> Iterable[Action]:
        """A message of the hub, other than Stop."""

    @abstractmethod
    def _compute(self) -> Iterator[Action]:
        """Start a round, if one is due."""

    @abstractmethod
    def _computed(self, event: GradientReady | StepReady) -> Iterable[Action]:
        """A round has ended that counts."""

    @abstractmethod
    def _forget_hub(self) -> None:
        """The link to the hub is gone, and with it whatever it has told."""

    @abstractmethod
    def _newest(self) -> tuple[Tensor, Buffers, int]:
        """What to end with where the hub has not said: parameters, buffers, and their version."""

    # Events

    def handle(self, event: Event) -> Iterable[Action]:
        match event:
            case GradientReady() | StepReady():
                return self._round_ended(event)
            case MessageArrived(message=Stop()):
                return self._stopping(cast(Stop, event.keep()))
            case MessageArrived():
                return self._received(event)
            case Sent():
                self._in_flight = max(0, self._in_flight - 1)
                return self._compute()
            case PeerLost(peer=peer) if peer == HUB:
                return self._hub_lost()
            case PeerJoined(peer=peer) if peer == HUB:
                return [ClearTimer("hub")]
            case Leave():
                return self._leave()
            case Started():
                return [SetTimer("hub", self._patience_seconds)]
            case TimerFired(name="hub"):
                waited = f"worker {self._setup.rank} waited {self._patience_seconds:g} s for the hub in vain"
                return [self._finish(waited)]
            case _:
                return ()

    @property
    def _ending(self) -> bool:
        return self._stop is not None or self._leaving

    def _go_on_at(self, draw: int, done: tuple[Range, ...]) -> Iterator[Action]:
        """Take the position that the hub hands out; a round that is under way counts for nothing."""
        self._draw, self._done = draw, SampleLedger(done)
        yield from self._abandon()

    def _room_for(self, budget: Budget) -> Budget:
        """The budget of the next round, which begins at the next draw that the hub does not have."""
        self._draw, room = self._done.room_from(self._draw)
        return _within(budget, room)

    def _abandon(self) -> Iterator[Action]:
        if self._computing and not self._discard:
            self._discard = True
            yield Cancel()

    def _round_ended(self, event: GradientReady | StepReady) -> Iterator[Action]:
        self._computing = False
        self._samples += event.samples
        if self._ending:
            if not self._discard:
                self._draw = event.draws[1]  # computed in vain, and accounted for
            yield from self._stopped()
        elif self._discard:
            self._discard = False
            yield from self._compute()
        else:
            self._draw = event.draws[1]
            yield from self._computed(event)

    def _hub_lost(self) -> Iterator[Action]:
        self._in_flight = 0
        self._forget_hub()
        yield from self._abandon()
        yield SetTimer("hub", self._patience_seconds)

    # Stop

    def _stopping(self, stop: Stop) -> Iterator[Action]:
        if not self._ending:
            self._stop = stop
            yield from self._end()

    def _leave(self) -> Iterator[Action]:
        """Say goodbye unasked; what is being computed is left undone."""
        if not self._ending:
            self._leaving = True
            yield from self._end()

    def _end(self) -> Iterator[Action]:
        if self._computing:
            yield Cancel()
        else:
            yield from self._stopped()

    def _stopped(self) -> Iterator[Action]:
        yield Send(HUB, Stopped(draws_stop=self._draw, samples=self._samples))
        yield self._finish(None)

    def _finish(self, failure: str | None) -> Finish:
        if self._stop is not None:
            return Finish(self._stop.parameters, self._stop.buffers, self._stop.version, failure)
        return Finish(*self._newest(), failure)

    # State

    def state(self) -> State:
        return {
            "stop": None if self._stop is None else pack(self._stop.parameters, self._stop.buffers, self._stop.version),
            "leaving": self._leaving,
            "draw": self._draw,
            "done": self._done.ranges,
            "computing": self._computing,
            "discard": self._discard,
            "in_flight": self._in_flight,
            "samples": self._samples,
        }

    def restore(self, state: State) -> None:
        stop = state["stop"]
        if stop is not None:
            self._stop = Stop(stop["parameters"], tuple(stop["buffers"]), stop["version"])
        self._leaving = state["leaving"]
        self._draw = state["draw"]
        self._done = SampleLedger(tuple(r) for r in state["done"])
        self._computing = state["computing"]
        self._discard = state["discard"]
        self._in_flight = state["in_flight"]
        self._samples = state["samples"]


def pack(parameters: Tensor, buffers: Buffers, version: int) -> State:
    """Values as a state, in tensors of their own."""
    return {
        "parameters": parameters.detach().clone(memory_format=torch.contiguous_format),
        "buffers": [buffer.clone() for buffer in buffers],
        "version": version,
    }


def _within(budget: Budget, room: int | None) -> Budget:
    """The budget, but never into data that the hub has already."""
    if room is None:
        return budget
    if isinstance(budget, Samples):
        alone = room - budget.count == 1  # a single sample left for later is one that batch norm cannot take
        return Samples(room if alone else min(budget.count, room))
    assert isinstance(budget, Seconds)
    return Seconds(budget.seconds, samples_max=min(budget.samples_max or room, room))
