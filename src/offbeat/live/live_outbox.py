"""The outgoing messages of a live rank: which peers are linked, and when a message may leave.

Messages to a peer that has not joined yet wait for it; unlike in virtual time, links take a moment to come up. With a
rate limit, messages wait here until the limit allows them, and only then are given to the transport.
"""

from __future__ import annotations

from offbeat.core.actions import Send
from offbeat.core.bandwidth import RateLimitedOutbox
from offbeat.live.due_queue import DueQueue, OutboxDue
from offbeat.records.schema import LinkUse
from offbeat.transports.transport import Transport


class LiveOutbox:
    """Sends the messages of one rank. Not thread-safe: the caller holds the lock of the runner.

    transport: the links of this rank.
    due: where the next turn of the rate limit is entered.
    bytes_per_second: rate limit per peer; None for no limit.
    """

    def __init__(self, transport: Transport, due: DueQueue, bytes_per_second: float | None) -> None:
        self._transport = transport
        self._due = due
        self._limit = None if bytes_per_second is None else RateLimitedOutbox(bytes_per_second)
        self.linked: dict[int, int] = {}
        """peer → the incarnation of its link, as announced to the node"""
        self.ever_linked: set[int] = set()
        self._before_link: dict[int, list[Send]] = {}
        """peer → messages to a peer that has not joined yet"""
        self._bytes_sent: dict[int, int] = {}
        """peer → bytes sent to it, without records"""

    def open(self, peer: int, incarnation: int, now: float) -> None:
        """The link to a peer is up: send what has waited for it."""
        self.linked[peer] = incarnation
        self.ever_linked.add(peer)
        if self._limit is not None:
            self._limit.open(peer, now)
        for send in self._before_link.pop(peer, []):
            self.send(send, now)

    def close(self, peer: int) -> int | None:
        """The link to a peer is down: drop what is queued. Returns the incarnation, or None if there was no link."""
        self._due.remove(OutboxDue(peer))
        if self._limit is not None:
            self._limit.lose(peer)
        return self.linked.pop(peer, None)

    def send(self, send: Send, now: float) -> None:
        """Send a message as soon as link and rate limit allow; drop it if the link of its peer has been lost."""
        if send.to not in self.linked:
            if send.to not in self.ever_linked:
                self._before_link.setdefault(send.to, []).append(send)
        elif self._limit is None:
            self._transmit(send)
        else:
            self._limit.put(send)
            self.send_ready(send.to, now)

    def send_ready(self, peer: int, now: float) -> None:
        """Transmit the messages to a peer that the rate limit allows now, and enter the next turn."""
        assert self._limit is not None
        while (send := self._limit.take(peer, now)) is not None:
            self._transmit(send)
        due = self._limit.ready_at(peer, now)
        if due is not None:
            self._due.put(due, OutboxDue(peer))

    def _transmit(self, send: Send) -> None:
        self._transport.send(send.to, self.linked[send.to], send.message, send.supersedes)

    def disconnect(self, peer: int, why: str) -> None:
        """End the link to a peer, if there is one; the transport reports it as lost."""
        if peer in self.linked:
            self._transport.disconnect(peer, self.linked[peer], why)

    def count(self, to: int, nbytes: int) -> None:
        """A message of the node has left."""
        self._bytes_sent[to] = self._bytes_sent.get(to, 0) + nbytes

    def lift_limit(self, now: float) -> None:
        """Send what is queued at once, whatever the rate limit: this rank is about to end."""
        if self._limit is not None:
            self._limit.is_lifted = True
            for peer in list(self.linked):
                self.send_ready(peer, now)

    @property
    def is_empty(self) -> bool:
        """Whether the rate limit holds no message back."""
        return self._limit is None or not len(self._limit)

    def empty_at(self, now: float) -> float:
        """When the rate limit will have let all queued messages leave."""
        return now if self._limit is None else self._limit.empty_at(now)

    def shift(self, seconds: float) -> None:
        """The clock was adjusted by `seconds`."""
        if self._limit is not None:
            self._limit.shift(seconds)

    def link_use(self, at: float, rank: int) -> LinkUse | None:
        """The record of the bytes sent under a rate limit; None without a limit."""
        if self._limit is None:
            return None
        used = {str(peer): nbytes for peer, nbytes in sorted(self._bytes_sent.items())}
        return LinkUse(at=at, rank=rank, bytes_per_second=self._limit.bytes_per_second, used=used)
