"""The bandwidth budget: how much training traffic each direction of each link may carry.

A limit that one sets oneself, unlike the capacity of a link. Both engines keep to the same rule: a bucket per link and
direction starts empty, fills with so many bytes a second, and a message leaves when the bucket has paid for it. So from
the beginning up to any moment, no more has left than the budget allows. Nothing here looks at a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from offbeat.core.actions import Send
from offbeat.core.messages import Message

HOLDS_SECONDS = 1.0
"""A bucket that nobody draws from holds what flows in during this time; what flows in after that is gone."""


class TokenBucket:
    """The budget of one direction of a link.

    A message that is larger than the bucket lets it fill further while it waits: all that is needed, and no more.
    """

    def __init__(self, bytes_per_second: float, now: float = 0.0) -> None:
        self._rate = bytes_per_second
        self._paid_until = now
        """All that has left is as much as flowed in until then; what has flowed in since is in the bucket."""
        self._waits = False

    def due(self, nbytes: int, now: float) -> float:
        """When a message of this size can be paid for, which waits from now on, or does already."""
        if not self._waits:
            self._paid_until = max(self._paid_until, now - HOLDS_SECONDS)
            self._waits = True
        return self._paid_until + nbytes / self._rate

    def pay(self, nbytes: int) -> None:
        """The message that waited leaves; call it when it is due, or later."""
        self._paid_until += nbytes / self._rate
        self._waits = False

    def forget(self) -> None:
        """The message that waited is gone."""
        self._waits = False


class Queued(Protocol):
    """What can wait in a queue, and be replaced there by what supersedes it."""

    @property
    def supersedes(self) -> str | None: ...


Item = TypeVar("Item", bound=Queued)


def enqueue(queue: deque[Item], item: Item) -> None:
    """Put something at the end of a queue, or in the place of what it supersedes."""
    if item.supersedes is not None:
        for place, queued in enumerate(queue):
            if queued.supersedes == item.supersedes:
                queue[place] = item
                return
    queue.append(item)


class _Weighed(NamedTuple):
    send: Send
    nbytes: int
    supersedes: str | None


class PacedOutbox:
    """What one live rank wants to send, in front of its transport: each message waits here until it is paid for.

    `weigh` says what a message weighs on the wire. A queue per peer, first in first out; a queued message is replaced
    by a newer one that supersedes it, and what waits for a peer that is lost vanishes with it.
    """

    def __init__(self, bytes_per_second: float, weigh: Callable[[Message], int]) -> None:
        self.bytes_per_second = bytes_per_second
        self.in_a_hurry = False
        """Whether everything leaves at once from now on: somebody wants to go home."""
        self._weigh = weigh
        self._buckets: dict[int, TokenBucket] = {}
        self._queues: dict[int, deque[_Weighed]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def open(self, peer: int, now: float) -> None:
        """There is a link to this peer. Its bucket is the one it had, if it comes again."""
        self._buckets.setdefault(peer, TokenBucket(self.bytes_per_second, now))
        self._queues[peer] = deque()

    def lose(self, peer: int) -> None:
        """The link to this peer is gone."""
        if self._queues.pop(peer, None):
            self._buckets[peer].forget()

    def put(self, send: Send) -> None:
        enqueue(self._queues[send.to], _Weighed(send, self._weigh(send.message), send.supersedes))

    def take(self, peer: int, now: float) -> Send | None:
        """The next message to this peer, if it is paid for now."""
        due = self.due(peer, now)
        if due is None or due > now:
            return None
        first = self._queues[peer].popleft()
        self._buckets[peer].pay(first.nbytes)
        return first.send

    def due(self, peer: int, now: float) -> float | None:
        """When the next message to this peer is paid for; None where none waits."""
        queue = self._queues.get(peer)
        if not queue:
            return None
        due = self._buckets[peer].due(queue[0].nbytes, now)
        return now if self.in_a_hurry else due

    def last_due(self, now: float) -> float:
        """When all that waits will have been paid for."""
        ends = [now]
        for peer, queue in self._queues.items():
            if queue:
                rest = sum(waiting.nbytes for waiting in queue)
                ends.append(self._buckets[peer].due(rest, now))
        return max(ends)
