"""The simulated network: one outbox per direction of a link, first in first out, and one network card per rank.

A message leaves when the rate limit of its link allows it and the card of its rank is free, for as long as the
card's bandwidth says; then it travels for the latency and a random delay. While it waits, a newer one that supersedes
it takes its place. Cards are full duplex: all that a rank sends leaves one after the other, links taking turns, and
all that it receives comes in one after the other. Switches forward a message while it is still being sent, and hold
one of each link at the most: the next begins to leave when the receiver's card has had time for the one before.

A link that is cut loses what is queued and under way; it comes back under a higher incarnation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from offbeat.cluster.cluster import Link
from offbeat.core.actions import Send
from offbeat.core.bandwidth import NetworkCard, TokenBucket, enqueue


@dataclass
class Outbox:
    """One direction of a link."""

    config: Link
    out: NetworkCard | None = None
    """The sender's card; none: unlimited."""
    into: NetworkCard | None = None
    """The receiver's card; none: unlimited."""
    rate_limit: TokenBucket | None = None
    queue: deque[Send] = field(default_factory=deque)
    leaving: Send | None = None
    """The message that the link is busy with."""
    alarm: float | None = None
    """When the rate limit lets the first in the queue leave, if it does not yet."""
    limited_bytes: int = 0
    """Bytes that have left under a rate limit."""
    last_arrival: float = 0.0
    """When the last message that has left will have arrived."""

    def put(self, send: Send) -> None:
        """Queue a message, in the place of one that it supersedes."""
        enqueue(self.queue, send)

    def clear(self) -> None:
        self.queue.clear()
        self.leaving, self.alarm = None, None
        if self.rate_limit is not None:
            self.rate_limit.cancel()


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

    def restore(self) -> None:
        self.up = True
        self.incarnation += 1


class SimulatedNetwork:
    """All links of a run, with the cards at their ends; `bytes_per_second` limits each direction of each link."""

    def __init__(self, cards: dict[int, NetworkCard] | None = None, bytes_per_second: float | None = None) -> None:
        self.cards = cards or {}
        """rank → its card; a rank without one is not limited."""
        self._bytes_per_second = bytes_per_second
        self._links: dict[tuple[int, int], LinkState] = {}
        self._of: dict[int, list[int]] = {}

    def connect(self, a: int, b: int, config: Link, shared: bool = True) -> None:
        """Link two ranks. Unless `shared`, the bandwidth is the link's own, whatever else goes on at its ends."""
        if (min(a, b), max(a, b)) not in self._links:
            ends = {a: self._outbox(a, b, config, shared), b: self._outbox(b, a, config, shared)}
            self._links[min(a, b), max(a, b)] = LinkState(ends)
            self._of.setdefault(a, []).append(b)
            self._of.setdefault(b, []).append(a)

    def _outbox(self, source: int, to: int, config: Link, shared: bool) -> Outbox:
        rate_limit = None if self._bytes_per_second is None else TokenBucket(self._bytes_per_second)
        if shared:
            return Outbox(config, self.cards.get(source), self.cards.get(to), rate_limit)
        own = None if config.bytes_per_second is None else NetworkCard(config.bytes_per_second)
        return Outbox(config, own, None, rate_limit)

    def link(self, a: int, b: int) -> LinkState | None:
        return self._links.get((min(a, b), max(a, b)))

    def peers(self, rank: int) -> list[int]:
        return self._of.get(rank, [])

    def reset_card(self, rank: int) -> None:
        """For a rank that dies or comes back: its card is free."""
        for peer in self.peers(rank):
            card = self._links[min(rank, peer), max(rank, peer)].outboxes[rank].out
            if card is not None:
                card.reset()

    def limited_bytes(self, rank: int) -> dict[int, int]:
        """peer → bytes that a rank has sent to it under a rate limit."""
        links = {peer: self._links[min(rank, peer), max(rank, peer)] for peer in self.peers(rank)}
        return {peer: link.outboxes[rank].limited_bytes for peer, link in links.items()}

    def __iter__(self) -> Iterator[tuple[tuple[int, int], LinkState]]:
        return iter(self._links.items())
