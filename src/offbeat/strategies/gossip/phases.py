"""The phases of a peer, and what makes it act or change its phase; the table of both is in `transitions.py`.

A handler of the table receives an event of the engine or a signal, and returns actions and further signals. The peer
looks a signal up in the table at once, before it resumes the handler; so parts need no reference to the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from offbeat.core.actions import Action
from offbeat.core.events import (
    Evaluated,
    Event,
    GradientReady,
    Leave,
    MessageArrived,
    PeerJoined,
    PeerLost,
    Started,
    StepReady,
    TimerFired,
)
from offbeat.core.messages import Message, Stop, Stopped
from offbeat.strategies.gossip import gossip_messages as messages


class Phase(Enum):
    """The phases of a peer, in order."""

    GATHERING = "gathering"
    """Until all expected ranks have joined or `patience_seconds` have passed; then a first global average."""
    TRAINING = "training"
    """Gradient → optimizer step → next gradient; exchanges run concurrently."""
    ENDING = "ending"
    """The goal is reached: the replica is frozen, and the final global average is computed."""
    COMPLETE = "complete"
    """This rank holds the final average; when all ranks do, Stop → Stopped → Finish."""
    FINISHED = "finished"
    """`Finish` has been returned."""


class Trigger(Enum):
    """Events of the engine, messages by their kind, and signals of the parts of a peer."""

    STARTED = auto()
    COMPUTED = auto()
    EXCHANGE_TIMER = auto()
    GATHER_TIMER = auto()
    LINKS_TIMER = auto()
    UNTIL_TIMER = auto()
    HANG_TIMER = auto()
    EVALUATED = auto()
    PEER_JOINED = auto()
    PEER_LOST = auto()
    LEAVE = auto()

    OFFER = auto()
    REPLY = auto()
    """Answer or Declined."""
    READY = auto()
    PAIRED = auto()
    REDUCE_START = auto()
    PARTIAL_SUM = auto()
    FIRST_AVERAGE = auto()
    FINAL_AVERAGE = auto()
    AVERAGE_RECEIVED = auto()
    REDUCE_RETRY = auto()
    STATUS_WAITING = auto()
    STATUS_TRAINING = auto()
    COPY_REQUEST = auto()
    COPY_REPLY = auto()
    GOAL_REACHED = auto()
    LOOP_ENDED = auto()
    MEMBER_LIST = auto()
    SAMPLE_COUNTS = auto()
    STOP = auto()
    STOPPED = auto()

    REQUIRED_LINK_UP = auto()
    """A rank has joined while a restarted root waits for links. Content of this and the next: the rank."""
    RANK_ADDED = auto()
    """A rank has joined, and the root is the same."""
    RANK_REMOVED = auto()
    """A rank is lost. Content: the rank."""
    ROOT_CHANGED = auto()
    """Another rank is the root, possibly this one, and must be given what only the former root knew."""
    ROOT_KEPT = auto()
    """A rank is lost, and the root is the same. Content: the rank."""
    LOSS_HANDLED = auto()
    FIRST_DUE = auto()
    """This rank, the root, is to start the first global average."""
    FINAL_DUE = auto()
    """This rank, the root, is to start the final global average."""
    FIRST_ROUND = auto()
    """The root has started a round of the first global average. Content: the root and its message."""
    FINAL_ROUND = auto()
    """The root has started a round of the final global average. Content: the root and its message."""
    BEGIN = auto()
    """The replica holds the first average, or a copy. Content: the seconds since the start of training."""
    GOAL = auto()
    """As far as this rank knows, the goal of the run is reached."""
    END = auto()
    """This rank stops to train."""
    OWN_LOOP_ENDED = auto()
    """The user's training loop of this rank has ended."""
    IDLE = auto()
    """No computation is outstanding and no exchange is pending."""
    RESULT = auto()
    """The final average is complete. Content: the average."""
    LEFT = auto()
    """This rank leaves the run on its own, and is idle."""
    DONE = auto()
    """All ranks hold the result."""
    FAILED = auto()
    """This rank cannot continue. Content: the sentence for the user."""


@dataclass(frozen=True, slots=True)
class Signal:
    """What a part of a peer announces to the others."""

    trigger: Trigger
    at: float
    content: Any = None


Step = Action | Signal
Handler = Callable[..., Iterable[Step]]
"""A method of a part, which takes the event or signal that triggers it."""


@dataclass(frozen=True)
class Transition:
    """Enter `phase`, then call the handlers in order."""

    phase: Phase
    handlers: tuple[Handler, ...] = ()


class Unhandled(Enum):
    """Entries of the table without a transition."""

    IGNORED = auto()
    IMPOSSIBLE = auto()


_TIMERS = {
    "exchange": Trigger.EXCHANGE_TIMER,
    "gather": Trigger.GATHER_TIMER,
    "links": Trigger.LINKS_TIMER,
    "until": Trigger.UNTIL_TIMER,
    "hang": Trigger.HANG_TIMER,
}

_MESSAGES: dict[type[Message], Trigger] = {
    messages.Offer: Trigger.OFFER,
    messages.Answer: Trigger.REPLY,
    messages.Declined: Trigger.REPLY,
    messages.Ready: Trigger.READY,
    messages.Paired: Trigger.PAIRED,
    messages.ReduceStart: Trigger.REDUCE_START,
    messages.PartialSum: Trigger.PARTIAL_SUM,
    messages.AverageReceived: Trigger.AVERAGE_RECEIVED,
    messages.ReduceRetry: Trigger.REDUCE_RETRY,
    messages.CopyRequest: Trigger.COPY_REQUEST,
    messages.CopyReply: Trigger.COPY_REPLY,
    messages.GoalReached: Trigger.GOAL_REACHED,
    messages.LoopEnded: Trigger.LOOP_ENDED,
    messages.MemberList: Trigger.MEMBER_LIST,
    messages.SampleCounts: Trigger.SAMPLE_COUNTS,
    Stop: Trigger.STOP,
    Stopped: Trigger.STOPPED,
}


def trigger_of(event: Event) -> Trigger | None:
    """The trigger of an event; None for a message of an unknown kind, and for `Sent`, which peers do not use."""
    match event:
        case MessageArrived(message=messages.Average(final=final)):
            return Trigger.FINAL_AVERAGE if final else Trigger.FIRST_AVERAGE
        case MessageArrived(message=messages.Status(training=training)):
            return Trigger.STATUS_TRAINING if training else Trigger.STATUS_WAITING
        case MessageArrived(message=message):
            return _MESSAGES.get(type(message))
        case GradientReady() | StepReady():
            return Trigger.COMPUTED
        case TimerFired(name=name):
            return _TIMERS[name]
        case Evaluated():
            return Trigger.EVALUATED
        case PeerJoined():
            return Trigger.PEER_JOINED
        case PeerLost():
            return Trigger.PEER_LOST
        case Leave():
            return Trigger.LEAVE
        case Started():
            return Trigger.STARTED
        case _:
            return None
