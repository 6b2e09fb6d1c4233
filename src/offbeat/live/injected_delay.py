"""Injected delay: makes real machines behave like the cluster of an experiment.

Only the *difference* to the cluster's usual speed is injected: a factor per worker, its extra cost per call, the delays
of its straggler model, and the delays of its links. If the cluster was measured on this machine, its speeds and links
are real, and only stragglers and `factors` are injected. Delay is added above the transport, so messages of different
peers may overtake each other.

Bandwidth is injected at the receiver: all sources share its network card, and none is faster than its own link. The
card of the sender is not emulated: messages to several peers leave at once and are delayed by each receiver separately.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from offbeat.cluster.cluster import Cluster, Link
from offbeat.cluster.faults import Hang
from offbeat.cluster.stragglers import NoStragglers, Speed, StragglerModel
from offbeat.core.bandwidth import NetworkCard
from offbeat.core.randomness import stream

_UNLIMITED = Link()


class InjectedRoundDelay(NamedTuple):
    """The injected delay of one round."""

    delay_seconds: float = 0.0
    """sleep before the first micro-batch"""
    factor: float = 1.0
    """how many times longer a micro-batch takes"""
    call_seconds: float = 0.0
    """extra time of every micro-batch"""

    def slowdown_seconds(self, seconds: float) -> float:
        """By how much to prolong a micro-batch that took `seconds`."""
        return max(0.0, seconds * (self.factor - 1.0) + self.call_seconds)


class InjectedDelay:
    """The delays of one rank; none without arguments."""

    def __init__(
        self,
        straggle: StragglerModel = NoStragglers(),  # noqa: B008  (frozen)
        factor: float = 1.0,
        call_seconds: float = 0.0,
        links: dict[int, Link] | None = None,
        seed: int = 0,
        rank: int = 0,
        bytes_per_second: float | None = None,
        hangs: tuple[tuple[float, float], ...] = (),
    ) -> None:
        """Build the delays of a rank.

        straggle: the straggler model of its rounds.
        factor: how many times slower than usual it is.
        call_seconds: extra time of every micro-batch; the straggler model scales it too.
        links: peer → the link to it; other links add no delay.
        seed, rank: select the random streams.
        bytes_per_second: the receiving bandwidth of this rank; None for no limit.
        hangs: begin and end of times in which its computation hangs.
        """
        self._factor = factor
        self._call_seconds = call_seconds
        self._hangs = hangs
        self._links = links or {}
        self._round_delays = straggle.draws(stream(seed, "speed", rank))
        self._delay_random = stream(seed, "delay", rank)
        self._free_at: dict[int, float] = {}
        self._card = NetworkCard(bytes_per_second) if bytes_per_second is not None else None

    @classmethod
    def of(cls, cluster: Cluster, workers: dict[int, int], rank: int, peers: Iterable[int], seed: int) -> InjectedDelay:
        """The delays that `cluster` implies for a rank.

        cluster: the cluster to behave like.
        workers: rank → its index among the ranks that compute.
        rank: the rank.
        peers: the ranks that it is linked to.
        seed: selects the random streams.
        """
        worker = workers.get(rank)
        slow, own = {}, None
        if not cluster.measured:
            links = {peer: cluster.link_between(worker, workers.get(peer)) for peer in peers}
            slow = {peer: link for peer, link in links.items() if link != Link()}
            own = cluster.link_of(worker).bytes_per_second
        if worker is None:
            return cls(links=slow, seed=seed, rank=rank, bytes_per_second=own)
        speed, natural = cluster.speed(worker), cluster.natural_speed(worker)
        factor = _ratio(speed, natural)
        # Negative where the factor of its samples would slow its calls down too much.
        call_seconds = speed.seconds_per_call - factor * natural.seconds_per_call
        hangs = tuple(
            (fault.at_seconds, fault.at_seconds + fault.seconds)
            for fault in cluster.faults
            if isinstance(fault, Hang) and fault.rank == rank
        )
        return cls(speed.straggle, factor, call_seconds, slow, seed, rank, own, hangs)

    def next_round_delay(self) -> InjectedRoundDelay:
        """Draw the delay and slowdown of the next round."""
        delay_seconds, factor = next(self._round_delays)
        return InjectedRoundDelay(delay_seconds, factor * self._factor, factor * self._call_seconds)

    def hang_seconds(self, now: float) -> float:
        """For how long a computation hangs that goes on at `now`."""
        return max((end - now for begin, end in self._hangs if begin <= now < end), default=0.0)

    def delay(self, source: int, nbytes: int, now: float) -> float:
        """By how many seconds to delay a message of `nbytes` bytes from `source` that arrives at `now`."""
        link = self._links.get(source, _UNLIMITED)
        if link is _UNLIMITED and self._card is None:
            return 0.0
        free = max(now, self._free_at.get(source, now)) + link.transmit_seconds(nbytes)
        self._free_at[source] = free
        received = free if self._card is None else self._card.receive(now, free, nbytes)
        delay = received - now + link.latency_seconds
        return delay + link.draw_delay(self._delay_random) if link.delay_std_seconds > 0 else delay


def _ratio(speed: Speed, natural: Speed) -> float:
    """How many times slower than its natural speed a worker is made; 1 if it computes in no time."""
    if natural.seconds_per_sample > 0:
        return speed.seconds_per_sample / natural.seconds_per_sample
    return speed.seconds_per_call / natural.seconds_per_call if natural.seconds_per_call > 0 else 1.0
