"""Limited bandwidth: the rate limit of each direction of a link, and the network card of a rank.

A rate limit is set by the user, unlike the capacity of a card. The simulator and live runs follow the same rule: a
token bucket per link and direction starts empty, fills with so many bytes a second, and a message leaves when the
bucket holds its size. So from the beginning up to any moment, no more has left than the limit allows. Nothing here
looks at a clock: callers pass `now`, in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from offbeat.core.actions import Send
from offbeat.core.messages import Message

BURST_SECONDS = 1.0
"""An unused bucket holds what flows in during this time; what flows in after that is lost."""


class TokenBucket:
    """The rate limit of one direction of a link.

    A message that is larger than the bucket lets it fill further while it waits: up to its size, and no more.
    """

    def __init__(self, bytes_per_second: float, now: float = 0.0) -> None:
        self._rate = bytes_per_second
        self._used_until = now
        """All that has left is as much as flowed in until then; what has flowed in since is in the bucket."""
        self._has_waiting = False

    def ready_at(self, nbytes: int, now: float) -> float:
        """When a message of `nbytes` bytes may leave; it waits from now on, or does already."""
        if not self._has_waiting:
            self._used_until = max(self._used_until, now - BURST_SECONDS)
            self._has_waiting = True
        return self._used_until + nbytes / self._rate

    def consume(self, nbytes: int) -> None:
        """The waiting message leaves; call it when it is ready, or later."""
        self._used_until += nbytes / self._rate
        self._has_waiting = False

    def cancel(self) -> None:
        """The waiting message was dropped."""
        self._has_waiting = False


@dataclass
class NetworkCard:
    """What connects one rank to the others, where its bandwidth is limited. Both directions have all of it."""

    bytes_per_second: float
    sending: Send | None = None
    waiting: dict[int, None] = field(default_factory=dict)
    """The peers with a message to send, in the order of their turns."""
    free_at: float = 0.0
    """When all that is under way to this rank will have been received."""

    def receive(self, first: float, last: float, nbytes: int) -> float:
        """When a message has been received, after all earlier ones.

        first: when its first byte could be here
        last: when its last byte could be here
        nbytes: its size
        """
        self.free_at = max(self.free_at, first) + nbytes / self.bytes_per_second
        return max(self.free_at, last)

    def next(self) -> int | None:
        """Remove and return the peer whose turn it is; None where no message waits."""
        peer = next(iter(self.waiting), None)
        if peer is not None:
            del self.waiting[peer]
        return peer

    def reset(self) -> None:
        """Drop everything: the rank has died, or starts again."""
        self.sending, self.free_at = None, 0.0
        self.waiting.clear()


class Queued(Protocol):
    """An item of a queue that a later item with the same key may replace."""

    @property
    def supersedes(self) -> str | None: ...


Item = TypeVar("Item", bound=Queued)


def enqueue(queue: deque[Item], item: Item) -> None:
    """Put an item at the end of a queue, or in the place of the item that it supersedes."""
    if item.supersedes is not None:
        for place, queued in enumerate(queue):
            if queued.supersedes == item.supersedes:
                queue[place] = item
                return
    queue.append(item)


class _Sized(NamedTuple):
    send: Send
    nbytes: int
    supersedes: str | None


class RateLimitedOutbox:
    """The messages of one live rank in front of its transport: each waits here until the rate limit lets it leave.

    A queue per peer, first in first out; a queued message is replaced by a newer one that supersedes it, and what
    waits for a lost peer is dropped.

    bytes_per_second: the limit of each direction of each link
    size_of: the bytes of a message on the wire
    """

    def __init__(self, bytes_per_second: float, size_of: Callable[[Message], int]) -> None:
        self.bytes_per_second = bytes_per_second
        self.is_lifted = False
        """Whether everything leaves at once from now on, because this rank is about to end."""
        self._size_of = size_of
        self._buckets: dict[int, TokenBucket] = {}
        self._queues: dict[int, deque[_Sized]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def open(self, peer: int, now: float) -> None:
        """There is a link to this peer. A peer that comes back keeps the bucket it had."""
        self._buckets.setdefault(peer, TokenBucket(self.bytes_per_second, now))
        self._queues[peer] = deque()

    def lose(self, peer: int) -> None:
        """The link to this peer is gone."""
        if self._queues.pop(peer, None):
            self._buckets[peer].cancel()

    def put(self, send: Send) -> None:
        enqueue(self._queues[send.to], _Sized(send, self._size_of(send.message), send.supersedes))

    def take(self, peer: int, now: float) -> Send | None:
        """Remove and return the next message to this peer, if it may leave now."""
        ready = self.ready_at(peer, now)
        if ready is None or ready > now:
            return None
        first = self._queues[peer].popleft()
        self._buckets[peer].consume(first.nbytes)
        return first.send

    def ready_at(self, peer: int, now: float) -> float | None:
        """When the next message to this peer may leave; None where none waits."""
        queue = self._queues.get(peer)
        if not queue:
            return None
        ready = self._buckets[peer].ready_at(queue[0].nbytes, now)
        return now if self.is_lifted else ready

    def empty_at(self, now: float) -> float:
        """When all waiting messages will have left."""
        ends = [now]
        for peer, queue in self._queues.items():
            if queue:
                rest = sum(waiting.nbytes for waiting in queue)
                ends.append(self._buckets[peer].ready_at(rest, now))
        return max(ends)
