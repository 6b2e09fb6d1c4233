"""The simulated network: one outbox per direction of a link, first in first out, and one network card per rank.

A message is transmitted when the rate limit of its link allows it and the card of the sender is free; that takes its
size over the card's bandwidth, and is followed by the latency and a random delay. A queued message is replaced by a
newer one that supersedes it. Cards are full duplex: a rank sends one message at a time, its links taking turns, and
receives one at a time. Switches are cut-through and buffer at most one message per link: the next one starts when the
receiver's card has received the one before.

A link that is cut drops its queued and travelling messages; it comes back under a higher incarnation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from offbeat.cluster.cluster import Link
from offbeat.core.actions import Send
from offbeat.core.bandwidth import NetworkCard, TokenBucket


@dataclass
class Outbox:
    """One direction of a link."""

    config: Link
    sender_card: NetworkCard | None = None
    """The sender's card; None for unlimited bandwidth."""
    receiver_card: NetworkCard | None = None
    """The receiver's card; None for unlimited bandwidth."""
    rate_limit: TokenBucket | None = None
    queue: deque[Send] = field(default_factory=deque)
    transmitting: Send | None = None
    """The message that occupies the link."""
    ready_at_scheduled: float | None = None
    """The time for which `_transmit` is scheduled, if the rate limit holds the next message back."""
    limited_bytes: int = 0
    """Bytes sent under a rate limit."""
    last_arrival: float = 0.0
    """The latest arrival time of the messages sent so far."""

    def clear(self) -> None:
        self.queue.clear()
        self.transmitting, self.ready_at_scheduled = None, None
        if self.rate_limit is not None:
            self.rate_limit.cancel()


@dataclass
class LinkState:
    """Both directions between two ranks. `cuts` are the reasons why the link is down."""

    outboxes: dict[int, Outbox]
    """sender → its outbox"""
    incarnation: int = 0
    up: bool = True
    cuts: set[str] = field(default_factory=set)
    held_until: float = 0.0
    """Arrivals are postponed until then: a partition that is too short to take the link down."""

    def cut(self) -> None:
        self.up = False
        for outbox in self.outboxes.values():
            outbox.clear()

    def restore(self) -> None:
        self.up = True
        self.incarnation += 1


class SimulatedNetwork:
    """All links of a run, with the cards at their ends. `bytes_per_second` is the rate limit of each direction."""

    def __init__(self, cards: dict[int, NetworkCard] | None = None, bytes_per_second: float | None = None) -> None:
        self.cards = cards or {}
        """rank → its card; a rank without a card has unlimited bandwidth"""
        self._bytes_per_second = bytes_per_second
        self._links: dict[tuple[int, int], LinkState] = {}
        self._peers: dict[int, list[int]] = {}

    def connect(self, a: int, b: int, config: Link, shared: bool = True) -> None:
        """Link two ranks. Unless `shared`, the link has its own bandwidth instead of a share of the ranks' cards."""
        if (min(a, b), max(a, b)) not in self._links:
            outboxes = {a: self._outbox(a, b, config, shared), b: self._outbox(b, a, config, shared)}
            self._links[min(a, b), max(a, b)] = LinkState(outboxes)
            self._peers.setdefault(a, []).append(b)
            self._peers.setdefault(b, []).append(a)

    def _outbox(self, source: int, to: int, config: Link, shared: bool) -> Outbox:
        rate_limit = None if self._bytes_per_second is None else TokenBucket(self._bytes_per_second)
        if shared:
            return Outbox(config, self.cards.get(source), self.cards.get(to), rate_limit)
        own = None if config.bytes_per_second is None else NetworkCard(config.bytes_per_second)
        return Outbox(config, own, None, rate_limit)

    def link(self, a: int, b: int) -> LinkState | None:
        return self._links.get((min(a, b), max(a, b)))

    def peers(self, rank: int) -> list[int]:
        return self._peers.get(rank, [])

    def reset_card(self, rank: int) -> None:
        """Free the card of a rank that crashes or restarts."""
        for peer in self.peers(rank):
            card = self._links[min(rank, peer), max(rank, peer)].outboxes[rank].sender_card
            if card is not None:
                card.reset()

    def limited_bytes(self, rank: int) -> dict[int, int]:
        """peer → bytes that a rank has sent to it under a rate limit."""
        links = {peer: self._links[min(rank, peer), max(rank, peer)] for peer in self.peers(rank)}
        return {peer: link.outboxes[rank].limited_bytes for peer, link in links.items()}

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The linked pairs of ranks."""
        return iter(self._links)
