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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from numpy.random import Generator

from offbeat.cluster.cluster import Cluster, Link
from offbeat.core.actions import Send
from offbeat.core.bandwidth import NetworkCard, TokenBucket
from offbeat.core.randomness import stream


@dataclass
class Outbox:
    """One direction of a link."""

    config: Link
    delay_random: Generator
    """Draws the random delays of messages to the receiver."""
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

    @property
    def is_unlimited(self) -> bool:
        """Whether a message leaves as soon as it is sent."""
        return self.sender_card is None and self.rate_limit is None

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
    """All links of a run, with the cards at their ends.

    delay_randoms: by rank, the generator of the random delays of messages to it.
    cards: rank → its card; a rank without a card has unlimited bandwidth.
    bytes_per_second: the rate limit of each direction of each link; None: no limit.
    """

    def __init__(
        self, delay_randoms: Sequence[Generator], cards: dict[int, NetworkCard], bytes_per_second: float | None
    ) -> None:
        self.cards = cards
        self._delay_randoms = delay_randoms
        self._bytes_per_second = bytes_per_second
        self._pairs: list[tuple[int, int]] = []
        self._links: list[dict[int, LinkState]] = [{} for _ in delay_randoms]
        """by rank: peer → their link"""

    def connect(self, a: int, b: int, config: Link, shared: bool = True) -> None:
        """Link two ranks. Unless `shared`, the link has its own bandwidth instead of a share of the ranks' cards."""
        if b not in self._links[a]:
            outboxes = {a: self._outbox(a, b, config, shared), b: self._outbox(b, a, config, shared)}
            self._links[a][b] = self._links[b][a] = LinkState(outboxes)
            self._pairs.append((min(a, b), max(a, b)))

    def _outbox(self, source: int, to: int, config: Link, shared: bool) -> Outbox:
        rate_limit = None if self._bytes_per_second is None else TokenBucket(self._bytes_per_second)
        delay_random = self._delay_randoms[to]
        if shared:
            return Outbox(config, delay_random, self.cards.get(source), self.cards.get(to), rate_limit)
        own = None if config.bytes_per_second is None else NetworkCard(config.bytes_per_second)
        return Outbox(config, delay_random, own, None, rate_limit)

    def links(self, rank: int) -> Mapping[int, LinkState]:
        """peer → the link to it, for all peers of a rank."""
        return self._links[rank]

    def link(self, a: int, b: int) -> LinkState:
        """The link between two ranks that are peers."""
        return self._links[a][b]

    def reset_card(self, rank: int) -> None:
        """Free the card of a rank that crashes or restarts."""
        for link in self._links[rank].values():
            card = link.outboxes[rank].sender_card
            if card is not None:
                card.reset()

    def limited_bytes(self, rank: int) -> dict[int, int]:
        """peer → bytes that a rank has sent to it under a rate limit."""
        return {peer: link.outboxes[rank].limited_bytes for peer, link in self._links[rank].items()}

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The linked pairs of ranks."""
        return iter(self._pairs)


def build_network(
    cluster: Cluster,
    peers: Callable[[int], Iterable[int]],
    workers: Sequence[int | None],
    seed: int,
    bytes_per_second: float | None,
) -> SimulatedNetwork:
    """The network of a cluster.

    cluster: its links.
    peers: rank → the ranks that it exchanges messages with.
    workers: by rank, its index among the ranks that compute; None for a rank that does not compute.
    seed: the seed of the run, for random delays.
    bytes_per_second: the rate limit of each direction of each link; None: no limit.
    """
    cards = {}
    if not cluster.measured:  # bandwidths are measured while all links are busy: cards are not shared a second time
        limits = {rank: cluster.link_of(worker).bytes_per_second for rank, worker in enumerate(workers)}
        cards = {rank: NetworkCard(capacity) for rank, capacity in limits.items() if capacity is not None}
    network = SimulatedNetwork([stream(seed, "delay", rank) for rank in range(len(workers))], cards, bytes_per_second)
    for rank, worker in enumerate(workers):
        for peer in peers(rank):
            network.connect(rank, peer, cluster.link_between(worker, workers[peer]), shared=not cluster.measured)
    return network
