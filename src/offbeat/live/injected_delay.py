"""Induced trouble: the cluster of an experiment, as delay on real machines.

Speeds are what they are here, so only what is *different* from the cluster's usual speed is induced: a factor per
worker, what its calls cost on top, what disturbs a round, and what the links add. Of a cluster that was measured here,
speeds and links are there already: what disturbs a round and `factors` are left. It sits above the transport, so
messages may overtake.

Bandwidth is induced where messages come in: all sources share the card of the receiver, and none is faster than its
own link. The card of the sender is not induced: what a rank sends to several others at once leaves at once, and is held
up by each of them on its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from offbeat.cluster.cluster import Cluster, Link, WorkerOverride
from offbeat.cluster.stragglers import NoStragglers, RoundDelay, StragglerModel
from offbeat.core.bandwidth import NetworkCard
from offbeat.core.randomness import stream

_UNLIMITED = Link()


class InjectedDelay:
    """What one rank suffers. Without arguments: nothing."""

    def __init__(
        self,
        straggle: StragglerModel = NoStragglers(),  # noqa: B008  (frozen)
        factor: float = 1.0,
        call_seconds: float = 0.0,
        links: dict[int, Link] | None = None,
        seed: int = 0,
        rank: int = 0,
        bytes_per_second: float | None = None,
    ) -> None:
        """`links` are those to the others, and `bytes_per_second` is what the rank itself can receive."""
        self._factor = factor
        self.call_seconds = call_seconds
        """What every micro-batch costs on top."""
        self._links = links or {}
        self._disturbances = straggle.draws(stream(seed, "speed", rank))
        self._delay_random = stream(seed, "delay", rank)
        self._free_at: dict[int, float] = {}
        self._card = NetworkCard(bytes_per_second) if bytes_per_second is not None else None

    @classmethod
    def of(cls, cluster: Cluster, workers: dict[int, int], rank: int, peers: Iterable[int], seed: int) -> InjectedDelay:
        """What `cluster` means for a rank; `workers` says which worker each computing rank is, from 0."""
        worker = workers.get(rank)
        if cluster.measured:
            asked = tuple(WorkerOverride(override.workers, straggle=override.straggle) for override in cluster.workers)
            cluster = Cluster(straggle=cluster.straggle, factors=cluster.factors, workers=asked)
        links = {peer: cluster.link_between(worker, workers.get(peer)) for peer in peers}
        slow = {peer: link for peer, link in links.items() if link != Link()}
        own = cluster.link_of(worker).bytes_per_second
        if worker is None:
            return cls(links=slow, seed=seed, rank=rank, bytes_per_second=own)
        speed = cluster.speed(worker)
        usual = cluster.seconds_per_sample
        factor = speed.seconds_per_sample / usual if usual > 0 else speed.seconds_per_call / cluster.seconds_per_call
        call_seconds = max(0.0, speed.seconds_per_call - factor * cluster.seconds_per_call)
        return cls(speed.straggle, factor, call_seconds, slow, seed, rank, own)

    def next_round_delay(self) -> RoundDelay:
        """What happens to the next round."""
        drawn = next(self._disturbances)
        return RoundDelay(drawn.delay_seconds, drawn.factor * self._factor)

    def delay(self, source: int, nbytes: int, now: float) -> float:
        """For how long a message that arrives now is held up."""
        link = self._links.get(source, _UNLIMITED)
        if link is _UNLIMITED and self._card is None:
            return 0.0
        free = max(now, self._free_at.get(source, now)) + link.transmit_seconds(nbytes)
        self._free_at[source] = free
        received = free if self._card is None else self._card.receive(now, free, nbytes)
        delay = received - now + link.latency_seconds
        return delay + link.draw_delay(self._delay_random) if link.delay_std_seconds > 0 else delay
