"""Links that go down and up in virtual time, and what the ranks at their ends are told."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from offbeat.core.events import LossReason, PeerJoined, PeerLost
from offbeat.simulation.event_queue import EventQueue
from offbeat.simulation.network import SimulatedNetwork
from offbeat.simulation.process import Process


class LinkControl:
    """Takes links down and up; the processes at their ends get `PeerLost` and `PeerJoined`.

    queue: the clock.
    processes: by rank, the ends of the links.
    network: the links.
    crash_seen_seconds: how long it takes a peer to notice that a process has ended.
    """

    def __init__(
        self, queue: EventQueue, processes: Sequence[Process], network: SimulatedNetwork, crash_seen_seconds: float
    ) -> None:
        self._queue = queue
        self._processes = processes
        self._network = network
        self._crash_seen_seconds = crash_seen_seconds

    def announce_all(self) -> None:
        """Send `PeerJoined` to both ends of every link."""
        for a, b in self._network:
            self._announce(a, b)

    def _announce(self, a: int, b: int) -> None:
        self._notify(PeerJoined, a, b, notify=(a, b))

    def close_all(self, rank: int) -> None:
        """Take down the links of a finished process, each once its last message has arrived."""
        for peer in self._network.links(rank):
            self.close(rank, peer)

    def close(self, rank: int, peer: int) -> None:
        """Take down a link of a finished process unless a message waits on it; the peer gets `PeerLost`."""
        link = self._network.link(rank, peer)
        outbox = link.outboxes[rank]
        if not link.up or outbox.transmitting is not None or outbox.queue or not self._processes[peer].active:
            return
        gone = max(self._queue.now + self._crash_seen_seconds, outbox.last_arrival, link.held_until)
        self._queue.schedule(gone, functools.partial(self._end_link, rank, peer))

    def _end_link(self, rank: int, peer: int) -> None:
        self.cut(rank, peer, f"end of {rank}", notify=(peer,), loss=LossReason.CLOSED)

    def cut(self, a: int, b: int, reason: str, notify: tuple[int, ...], loss: LossReason = LossReason.BROKEN) -> None:
        """Take a link down. It stays down until `restore` was called for every reason that it was cut for.

        a, b: the ends of the link.
        reason: identifies this cut; a second call with the same reason has no effect.
        notify: the ends that get `PeerLost`.
        loss: the reason in `PeerLost`.
        """
        link = self._network.link(a, b)
        if reason in link.cuts:
            return
        was_up = link.up
        link.cuts.add(reason)
        link.cut()
        if was_up:
            self._notify(functools.partial(PeerLost, reason=loss, detail=reason), a, b, notify)

    def restore(self, a: int, b: int, reason: str) -> None:
        """Remove one reason why a link is down; the last one removed brings it up under the next incarnation."""
        link = self._network.link(a, b)
        link.cuts.discard(reason)
        if not link.cuts and not link.up and self._processes[a].active and self._processes[b].active:
            link.restore()
            self._announce(a, b)

    def reset(self, a: int, b: int) -> None:
        """Take a link down, and up again as soon as both ends have noticed."""
        reason = f"reset at {self._queue.now}"
        self.cut(a, b, reason, notify=(a, b))
        self._queue.schedule(self._queue.now + self._crash_seen_seconds, functools.partial(self.restore, a, b, reason))

    def _notify(self, event: Callable[..., PeerJoined | PeerLost], a: int, b: int, notify: tuple[int, ...]) -> None:
        incarnation = self._network.link(a, b).incarnation
        for rank, peer in ((a, b), (b, a)):
            if rank in notify:
                self._processes[rank].emit(
                    self._queue.now, functools.partial(event, peer=peer, incarnation=incarnation)
                )
