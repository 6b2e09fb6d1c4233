"""The protocol of a link as a state machine without I/O, threads or clock: outbox, window, heartbeats, goodbyes.

- A link sends while fewer than WINDOW of its messages are unacknowledged. Every head carries the number of messages
  that were received so far, and a heartbeat is sent where nothing else would carry it in time.
- A heartbeat is also sent when nothing else was sent for a quarter of `silence_seconds`.
- A side that wants to end the link sends what is queued, then a goodbye; the other answers with its own goodbye and
  discards what it had queued. After both neither side sends anything, so that no data is in transit when they close.

The caller holds a lock around every call, and sends what `next_step` returns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from offbeat.core.messages import Message
from offbeat.transports.wire import GOODBYE, HEARTBEAT, Encoded, WireError

WINDOW = 3
"""Unacknowledged messages per link; further ones wait in the outbox, where newer ones can replace them. With two
workers each receives two updates per round, which its next gradient acknowledges; a smaller window would need extra
heartbeats."""


@dataclass(slots=True)
class Outgoing:
    """A message to be sent. It is encoded when its turn comes, since a newer one may replace it before."""

    key: str | None
    message: Message
    encoded: Encoded | None = None


class LinkProtocol:
    """One end of a link."""

    def __init__(self, silence_seconds: float, now: float) -> None:
        self._heartbeat_seconds = silence_seconds / 4
        self._sent_at = now
        self._outbox: deque[Outgoing] = deque()
        self._finishing = False
        self.goodbye_sent = self.goodbye_received = False
        self._sent = self._acked_by_peer = 0
        """Messages of this rank: sent, and acknowledged by the peer."""
        self.delivered = self._acked_to_peer = 0
        """Messages of the peer: received by the user of the transport, and acknowledged to the peer."""

    # What the user does

    def post(self, outgoing: Outgoing) -> bool:
        """Queue a message, in the place of a queued one with the same key if there is one; whether it was added."""
        if self._finishing:
            return False
        if outgoing.key is not None:
            for index, queued in enumerate(self._outbox):
                if queued.key == outgoing.key:
                    self._outbox[index] = outgoing
                    return False
        self._outbox.append(outgoing)
        return True

    def deliver(self) -> bool:
        """The user has received a message of the peer; whether the peer has to be told at once."""
        self.delivered += 1
        return self.window_is_full

    def finish(self) -> None:
        """Send what is queued, then a goodbye."""
        self._finishing = True

    def discard(self) -> None:
        """Send nothing of what is queued."""
        self._outbox.clear()

    # What the link sends

    @property
    def window_is_full(self) -> bool:
        """Whether the peer has to stop sending until it gets an acknowledgement."""
        return self.delivered - self._acked_to_peer >= WINDOW

    @property
    def may_send_message(self) -> bool:
        return bool(self._outbox) and (self._finishing or self._sent - self._acked_by_peer < WINDOW)

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing to send, but perhaps a heartbeat later on."""
        return not (self._outbox or self._finishing or self.window_is_full)

    def is_next(self, outgoing: Outgoing) -> bool:
        """Whether this message may be sent now, before any other."""
        return self.may_send_message and self._outbox[0] is outgoing

    def next_message(self) -> Outgoing | None:
        return self._outbox.popleft() if self.may_send_message else None

    def next_step(self, now: float) -> Outgoing | int | None:
        """What to send now: a message, HEARTBEAT or GOODBYE; None: nothing."""
        if self.goodbye_sent:
            return None
        if (message := self.next_message()) is not None:
            return message
        if self._finishing:
            self.goodbye_sent = True
            return GOODBYE
        if self.window_is_full or now - self._sent_at >= self._heartbeat_seconds:
            return HEARTBEAT
        return None

    def seconds_to_heartbeat(self, now: float) -> float:
        return max(0.0, self._sent_at + self._heartbeat_seconds - now)

    def count_message(self) -> None:
        """A message leaves."""
        self._sent += 1

    def acknowledged_with(self, now: float) -> int:
        """A head leaves; the number that it acknowledges."""
        self._sent_at = now
        self._acked_to_peer = self.delivered
        return self.delivered

    # What the peer sends

    def on_acknowledgement(self, count: int) -> None:
        """Raises WireError for a number that cannot be."""
        if not self._acked_by_peer <= count <= self._sent:
            raise WireError(f"the peer acknowledges {count} messages, but {self._sent} were sent")
        self._acked_by_peer = count

    def on_goodbye(self) -> None:
        """From now on the peer discards everything but a goodbye."""
        self.goodbye_received = self._finishing = True
        self._outbox.clear()
