"""Messages by their kind: what a node that matches on the type of a message needs besides `match`."""

from __future__ import annotations

from typing import TypeVar, cast

from offbeat.core.events import MessageArrived
from offbeat.core.messages import Message
from offbeat.errors import UnexpectedMessage

AnyMessage = TypeVar("AnyMessage", bound=Message)


def matched(event: MessageArrived, kind: type[AnyMessage]) -> AnyMessage:
    """The message of an event, whose type has been matched as `kind`; its tensors are a lease."""
    return cast(AnyMessage, event.message)


def kept(event: MessageArrived, kind: type[AnyMessage]) -> AnyMessage:
    """The message of an event, whose type has been matched as `kind`, as one that may be stored."""
    return cast(AnyMessage, event.keep())


def unexpected(event: MessageArrived, receiver: int) -> UnexpectedMessage:
    """The error for a message of a kind that the node of rank `receiver` does not handle."""
    return UnexpectedMessage(event.source, type(event.message).__name__, receiver)
