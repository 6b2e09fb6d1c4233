"""The simulated network: one outbox per direction of a link, first in first out.

A message leaves for as long as the bandwidth says, then travels for the latency and a random delay. While one is
leaving, others queue; a queued one is replaced by a newer one that supersedes it. A link that is cut loses what is
queued and under way; it comes back under a higher incarnation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from offbeat.actions import Send
from offbeat.cluster.links import Link


@dataclass
class Outbox:
    """One direction of a link."""

    config: Link
    queue: deque[Send] = field(default_factory=deque)
    leaving: Send | None = None
    last_arrival: float = 0.0
    """When the last message that has left will have arrived."""

    def put(self, send: Send) -> None:
        """Queue a message, in the place of one that it supersedes."""
        if send.supersedes is not None:
            for place, queued in enumerate(self.queue):
                if queued.supersedes == send.supersedes:
                    self.queue[place] = send
                    return
        self.queue.append(send)

    def next(self) -> Send | None:
        """Begin to send the next message, if the link is free."""
        if self.leaving is None and self.queue:
            self.leaving = self.queue.popleft()
            return self.leaving
        return None

    def clear(self) -> None:
        self.queue.clear()
        self.leaving = None


@dataclass
class LinkState:
    """Both directions between two ranks. `cuts` are the reasons why it is down; it is up when there is none."""

    outboxes: dict[int, Outbox]
    """sender → its outbox"""
    incarnation: int = 0
    up: bool = True
    cuts: set[str] = field(default_factory=set)
    held_until: float = 0.0
    """Messages wait until then: a partition that is too short for anybody to notice."""

    def cut(self) -> None:
        self.up = False
        for outbox in self.outboxes.values():
            outbox.clear()

    def mend(self) -> None:
        self.up = True
        self.incarnation += 1


class Network:
    """All links of a run."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], LinkState] = {}
        self._of: dict[int, list[int]] = {}

    def connect(self, a: int, b: int, config: Link) -> None:
        if (min(a, b), max(a, b)) not in self._links:
            self._links[min(a, b), max(a, b)] = LinkState({a: Outbox(config), b: Outbox(config)})
            self._of.setdefault(a, []).append(b)
            self._of.setdefault(b, []).append(a)

    def link(self, a: int, b: int) -> LinkState | None:
        return self._links.get((min(a, b), max(a, b)))

    def peers(self, rank: int) -> list[int]:
        return self._of.get(rank, [])

    def __iter__(self) -> Iterator[tuple[tuple[int, int], LinkState]]:
        return iter(self._links.items())
