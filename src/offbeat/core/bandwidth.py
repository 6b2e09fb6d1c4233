"""Limited bandwidth: the rate limit of each direction of a link, and the network card of a rank.

A rate limit is set by the user; the capacity of a card belongs to the cluster. The simulator and live runs use the same
rule: a token bucket per link and direction starts empty and fills at `bytes_per_second`, and a message is sent when the
bucket holds its size. So the bytes sent since the start never exceed limit × time. Nothing here reads a clock: callers
pass `now`, in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from offbeat.core.actions import Send
from offbeat.core.wire_size import wire_size

BURST_SECONDS = 1.0
"""The capacity of an idle bucket, in seconds of its rate."""


class TokenBucket:
    """The rate limit of one direction of a link.

    While a message larger than the capacity waits, the bucket fills up to the size of that message.
    """

    def __init__(self, bytes_per_second: float, now: float = 0.0) -> None:
        self._rate = bytes_per_second
        self._used_until = now
        """The tokens of all earlier time are used; the bucket holds those from this time until now."""
        self._has_waiting = False

    def ready_at(self, nbytes: int, now: float) -> float:
        """When a message of `nbytes` bytes may be sent; it counts as waiting from the first call on."""
        if not self._has_waiting:
            self._used_until = max(self._used_until, now - BURST_SECONDS)
            self._has_waiting = True
        return self._used_until + nbytes / self._rate

    def consume(self, nbytes: int) -> None:
        """The waiting message is sent. Call it when the message is ready, or later."""
        self._used_until += nbytes / self._rate
        self._has_waiting = False

    def cancel(self) -> None:
        """The waiting message was dropped."""
        self._has_waiting = False

    def shift(self, seconds: float) -> None:
        """The clock was adjusted by `seconds`."""
        self._used_until += seconds


@dataclass
class NetworkCard:
    """The network card of a rank with limited bandwidth: full duplex, one message at a time in each direction."""

    bytes_per_second: float
    sending: Send | None = None
    waiting: dict[int, None] = field(default_factory=dict)
    """The peers with a message to send, in round-robin order."""
    free_at: float = 0.0
    """When all messages in flight to this rank will have been received."""

    def receive(self, first: float, last: float, nbytes: int) -> float:
        """The time at which a message has been received, after all earlier ones.

        first: the earliest arrival of its first byte
        last: the earliest arrival of its last byte
        nbytes: its size
        """
        self.free_at = max(self.free_at, first) + nbytes / self.bytes_per_second
        return max(self.free_at, last)

    def next(self) -> int | None:
        """Remove and return the next peer with a message to send; None if there is none."""
        peer = next(iter(self.waiting), None)
        if peer is not None:
            del self.waiting[peer]
        return peer

    def reset(self) -> None:
        """Drop everything: the rank was lost or restarts."""
        self.sending, self.free_at = None, 0.0
        self.waiting.clear()


class Queued(Protocol):
    """An item of a queue that a later item with the same key may replace."""

    @property
    def supersedes(self) -> str | None: ...


Item = TypeVar("Item", bound=Queued)


def enqueue(queue: deque[Item], item: Item) -> None:
    """Append an item to a queue, or replace the item that it supersedes."""
    if item.supersedes is not None:
        for position, queued in enumerate(queue):
            if queued.supersedes == item.supersedes:
                queue[position] = item
                return
    queue.append(item)


class _Sized(NamedTuple):
    send: Send
    nbytes: int
    supersedes: str | None


class RateLimitedOutbox:
    """Holds the messages of a live rank back until the rate limit allows each to be passed to the transport.

    There is a FIFO queue per peer. A newer message replaces a queued one that it supersedes; messages to a lost peer
    are dropped. Not thread-safe.

    bytes_per_second: the limit of each direction of each link
    """

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.is_lifted = False
        """Whether messages are no longer held back, because this rank is about to end."""
        self._buckets: dict[int, TokenBucket] = {}
        self._queues: dict[int, deque[_Sized]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def open(self, peer: int, now: float) -> None:
        """The link to this peer is up. A peer that reconnects keeps its bucket."""
        self._buckets.setdefault(peer, TokenBucket(self.bytes_per_second, now))
        self._queues[peer] = deque()

    def lose(self, peer: int) -> None:
        """The link to this peer is down."""
        if self._queues.pop(peer, None):
            self._buckets[peer].cancel()

    def put(self, send: Send) -> None:
        """Queue a message to a peer whose link is up."""
        enqueue(self._queues[send.to], _Sized(send, wire_size(send.message).nbytes, send.supersedes))

    def take(self, peer: int, now: float) -> Send | None:
        """Remove and return the next message to this peer, if it may be sent now."""
        ready = self.ready_at(peer, now)
        if ready is None or ready > now:
            return None
        first = self._queues[peer].popleft()
        self._buckets[peer].consume(first.nbytes)
        return first.send

    def ready_at(self, peer: int, now: float) -> float | None:
        """When the next message to this peer may be sent; None if there is none."""
        queue = self._queues.get(peer)
        if not queue:
            return None
        ready = self._buckets[peer].ready_at(queue[0].nbytes, now)
        return now if self.is_lifted else ready

    def empty_at(self, now: float) -> float:
        """When all queued messages may have been sent."""
        ends = [now]
        for peer, queue in self._queues.items():
            if queue:
                rest = sum(waiting.nbytes for waiting in queue)
                ends.append(self._buckets[peer].ready_at(rest, now))
        return max(ends)

    def shift(self, seconds: float) -> None:
        """The clock was adjusted by `seconds`."""
        for bucket in self._buckets.values():
            bucket.shift(seconds)
