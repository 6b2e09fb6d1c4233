"""The simulated network: one outbox per direction of a link, first in first out, and one network card per rank.

A message leaves when the budget of its link has paid for it and the card of its rank is free, for as long as the
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
from offbeat.core.bandwidth import TokenBucket, enqueue


@dataclass
class NetworkCard:
    """What connects one rank to the others, where its bandwidth is limited. Both directions have all of it."""

    bytes_per_second: float
    sending: Send | None = None
    waiting: dict[int, None] = field(default_factory=dict)
    """The peers whose turn comes, in the order in which something for them came up."""
    free_at: float = 0.0
    """When all that is on its way here will have come in."""

    def receive(self, first: float, last: float, nbytes: int) -> float:
        """When a message is in whose first and last byte could be here at these times, after all that came before."""
        self.free_at = max(self.free_at, first) + nbytes / self.bytes_per_second
        return max(self.free_at, last)

    def next(self) -> int | None:
        """The peer whose turn it is."""
        peer = next(iter(self.waiting), None)
        if peer is not None:
            del self.waiting[peer]
        return peer

    def reset(self) -> None:
        """Its rank has died, or begins anew: nothing leaves any more, and nothing comes in."""
        self.sending, self.free_at = None, 0.0
        self.waiting.clear()


@dataclass
class Outbox:
    """One direction of a link."""

    config: Link
    out: NetworkCard | None = None
    """The sender's card; none: unlimited."""
    into: NetworkCard | None = None
    """The receiver's card; none: unlimited."""
    budget: TokenBucket | None = None
    queue: deque[Send] = field(default_factory=deque)
    leaving: Send | None = None
    """The message that the link is busy with."""
    alarm: float | None = None
    """When the first in the queue will have been paid for, if it is not yet."""
    paid_bytes: int = 0
    """What has left on a budget."""
    last_arrival: float = 0.0
    """When the last message that has left will have arrived."""

    def put(self, send: Send) -> None:
        """Queue a message, in the place of one that it supersedes."""
        enqueue(self.queue, send)

    def clear(self) -> None:
        self.queue.clear()
        self.leaving, self.alarm = None, None
        if self.budget is not None:
            self.budget.forget()


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
    """All links of a run, with the cards at their ends; `budget` is what each direction of each link may carry."""

    def __init__(self, cards: dict[int, NetworkCard] | None = None, budget: float | None = None) -> None:
        self.cards = cards or {}
        """rank → its card; a rank without one is not limited."""
        self._budget = budget
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
        budget = None if self._budget is None else TokenBucket(self._budget)
        if shared:
            return Outbox(config, self.cards.get(source), self.cards.get(to), budget)
        own = None if config.bytes_per_second is None else NetworkCard(config.bytes_per_second)
        return Outbox(config, own, None, budget)

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

    def paid_bytes(self, rank: int) -> dict[int, int]:
        """peer → what a rank has sent to it on a budget."""
        links = {peer: self._links[min(rank, peer), max(rank, peer)] for peer in self.peers(rank)}
        return {peer: link.outboxes[rank].paid_bytes for peer, link in links.items()}

    def __iter__(self) -> Iterator[tuple[tuple[int, int], LinkState]]:
        return iter(self._links.items())
