"""The node of a rank that computes for a hub: it begins when the hub welcomes it, and ends when the hub sends Stop.

When the link to the hub breaks, the worker cancels its round. Samples that the hub has not received are computed again
after the next welcome, from the position that the hub sends. The worker waits patience_seconds for the hub, then fails.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

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
from offbeat.core.loader_states import LoaderState
from offbeat.core.messages import Buffers, LoaderMessage, Stop, Stopped, loader_fields
from offbeat.core.sample_ledger import Range, SampleLedger
from offbeat.core.strategy import Node, NodeContext
from offbeat.strategies.hang_detection import Probe, ProbeAnswer
from offbeat.strategies.message_kinds import kept
from offbeat.strategies.node_state import Stateful
from offbeat.strategies.server_node import HUB


class WorkerNode(Stateful, Node):
    """What the workers of all families with a hub share."""

    _stop: Stop | None = None
    _leaving: bool = False
    """Whether it ends on its own, before the hub has sent Stop."""
    _staying: bool = False
    """Whether it computes no more, but waits for Stop and the result."""
    _draw: int = 0
    _done: SampleLedger
    """Draws that the hub had received when it sent its welcome."""
    _loader: LoaderState | None = None
    """A state of the data loader that the hub has sent, at or before the position that it has sent."""
    _loader_unsent: LoaderState | None = None
    """The newest state of the data loader, if no message contains it."""
    _computing: bool = False
    _discard: bool = False
    """Whether the result of the round under way is discarded."""
    _probed: bool = False
    """Whether the hub asks when the computation under way has ended."""
    _in_flight: int = 0
    """Messages that have not left yet."""
    _samples: int = 0

    def __init__(self, context: NodeContext, patience_seconds: float) -> None:
        self._context = context
        self._patience_seconds = patience_seconds
        self._done = SampleLedger()

    # Methods of a family

    @abstractmethod
    def _message_arrived(self, event: MessageArrived) -> Iterable[Action]:
        """Handle a message of the hub, other than Stop; raises UnexpectedMessage for unknown kinds."""

    @abstractmethod
    def _compute(self) -> Iterator[Action]:
        """Start a round, if one is due."""

    @abstractmethod
    def _computed(self, event: GradientReady | StepReady) -> Iterable[Action]:
        """Handle the result of a round that was not discarded."""

    @abstractmethod
    def _reset_hub(self) -> None:
        """Discard what the hub has sent: the link to it is lost."""

    def _send_rest(self) -> Iterable[Action]:
        """Send what was learned and no message contains: no further round follows, but the hub does not end yet."""
        return ()

    @abstractmethod
    def _newest(self) -> tuple[Tensor, Buffers, int]:
        """Parameters, buffers and version to finish with if the hub has not sent Stop."""

    # Events

    def handle(self, event: Event) -> Iterable[Action]:
        match event:
            case GradientReady() | StepReady():
                return self._round_ended(event)
            case MessageArrived(message=Stop()):
                return self._stopping(kept(event, Stop))
            case MessageArrived(message=Probe()):
                return self._probe()
            case MessageArrived():
                return self._message_arrived(event)
            case Sent():
                self._in_flight = max(0, self._in_flight - 1)
                return self._compute()
            case PeerLost(peer=peer) if peer == HUB:
                return self._hub_lost()
            case PeerJoined(peer=peer) if peer == HUB:
                return [ClearTimer("hub")]
            case Leave(stay=stay):
                return self._leave(stay)
            case Started():
                return [SetTimer("hub", self._patience_seconds)]
            case TimerFired(name="hub"):
                waited = f"worker {self._context.rank} had no link to the hub for {self._patience_seconds:g} s"
                return [self._finish(f"{waited} (patience_seconds); check that rank 0 runs, or raise patience_seconds")]
            case _:
                return ()

    @property
    def _ending(self) -> bool:
        return self._stop is not None or self._leaving

    def _set_position(self, draw: int, done: tuple[Range, ...], message: LoaderMessage) -> Iterator[Action]:
        """Continue at the position that the hub has sent; the result of a round under way is discarded."""
        self._draw, self._done = draw, SampleLedger(done)
        self._loader, self._loader_unsent = message.loader_state, None
        yield from self._abandon()
        if self._staying and not self._computing:
            yield self._stays()  # said before, to a hub that has lost the link since

    def _next_budget(self, budget: Budget) -> Budget:
        """Move to the next draw that the hub does not have, and limit the budget to the gap that begins there."""
        self._draw, room = self._done.room_from(self._draw)
        return _within(budget, room)

    def _take_loader(self) -> dict[str, Any]:
        """The fields of the next message to the hub with the newest state of the data loader."""
        state, self._loader_unsent = self._loader_unsent, None
        return loader_fields(state)

    def _abandon(self) -> Iterator[Action]:
        if self._computing and not self._discard:
            self._discard = True
            yield Cancel()

    def _round_ended(self, event: GradientReady | StepReady) -> Iterator[Action]:
        self._computing = False
        self._samples += event.samples
        if self._ending:
            if not self._discard:
                self._draw = event.draws[1]  # these are in no update, and Stopped accounts for them
            yield from self._stopped()
        elif self._discard:
            self._discard = False
            if self._probed:
                yield from self._probe()
            yield from self._compute()
        else:
            self._draw = event.draws[1]
            if isinstance(event, GradientReady) and event.loader is not None:
                self._loader_unsent = event.loader
            yield from self._computed(event)

    def _probe(self) -> Iterator[Action]:
        """Answer the hub, which has treated this worker as lost, as soon as no computation is outstanding."""
        self._probed = self._computing
        if not self._computing:
            yield Send(HUB, ProbeAnswer())

    def _hub_lost(self) -> Iterator[Action]:
        self._in_flight = 0
        self._probed = False
        self._reset_hub()
        yield from self._abandon()
        yield SetTimer("hub", self._patience_seconds)

    # Stop

    def _stopping(self, stop: Stop) -> Iterator[Action]:
        if self._stop is None and (self._staying or not self._leaving):
            self._stop = stop
            yield from self._end()

    def _leave(self, stay: bool) -> Iterator[Action]:
        """End before the hub has sent Stop; a round under way is canceled."""
        if not self._ending:
            self._leaving, self._staying = True, stay
            yield from self._end()

    def _end(self) -> Iterator[Action]:
        if self._computing:
            yield Cancel()
        else:
            yield from self._stopped()

    def _stopped(self) -> Iterator[Action]:
        if self._staying and self._stop is None:
            yield from self._send_rest()
            yield self._stays()
        else:
            yield Send(HUB, Stopped(draws_stop=self._draw, samples=self._samples))
            yield self._finish(None)

    def _stays(self) -> Send:
        return Send(HUB, Stopped(draws_stop=self._draw, samples=self._samples, stays=True))

    def _finish(self, failure: str | None) -> Finish:
        if self._stop is not None:
            return Finish(self._stop.parameters, self._stop.buffers, self._stop.version, failure)
        return Finish(*self._newest(), failure)


def _within(budget: Budget, room: int | None) -> Budget:
    """The budget, limited to `room` samples; None: no limit."""
    if room is None:
        return budget
    if isinstance(budget, Samples):
        leaves_one = room - budget.count == 1  # batch normalization fails on a batch of a single sample
        return Samples(room if leaves_one else min(budget.count, room))
    assert isinstance(budget, Seconds)
    return Seconds(budget.seconds, samples_max=min(budget.samples_max or room, room))
