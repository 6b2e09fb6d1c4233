"""All ranks in one process, messages passed by reference: what every other transport should look like.

Nothing waits to leave here, so nothing is ever replaced, and a link is never busy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from queue import Empty, SimpleQueue
from threading import Lock

from offbeat.core.compression import saved_bytes
from offbeat.core.messages import Message
from offbeat.errors import ConfigurationError
from offbeat.transports.transport import Arrived, Departed, Incoming, Joined, Lost, Transport


class Loopback:
    """Ranks and who is whose peer. A link is there as soon as the transports of both its ends have been made."""

    def __init__(self, links: Mapping[int, Iterable[int]]) -> None:
        self._peers = {rank: frozenset(peers) for rank, peers in links.items()}
        self._open: dict[int, LoopbackTransport] = {}
        self._incarnations: dict[frozenset[int], int] = {}
        self._lock = Lock()
        for rank, peers in self._peers.items():
            for peer in peers:
                if peer == rank or rank not in self._peers.get(peer, ()):
                    raise ConfigurationError(
                        f"rank {rank} names {peer} as its peer, but not the other way round; links go both ways, "
                        f"between different ranks: Loopback({{0: [1], 1: [0]}})"
                    )

    def transport(self, rank: int) -> Transport:
        """The end of a rank. One that is there already is closed; its peers see the new one as another incarnation."""
        if rank not in self._peers:
            raise ConfigurationError(f"there is no rank {rank} in this loopback; known: {sorted(self._peers)}")
        with self._lock:
            self._leave(rank, "it came again")
            transport = self._open[rank] = LoopbackTransport(self, rank)
            for peer in sorted(self._peers[rank] & self._open.keys()):
                self._link(rank, peer)
        return transport

    def cut(self, rank: int, peer: int) -> None:
        """Break a link; it is made again at once, under a new incarnation."""
        with self._lock:
            if peer in self._open[rank].linked:
                self._unlink(rank, peer, "cut")
                self._unlink(peer, rank, "cut")
                self._link(rank, peer)

    def _link(self, rank: int, peer: int) -> None:
        pair = frozenset((rank, peer))
        incarnation = self._incarnations[pair] = self._incarnations.get(pair, -1) + 1
        for here, there in ((rank, peer), (peer, rank)):
            self._open[here].linked[there] = incarnation
            self._open[here].incoming.put(Joined(there, incarnation))

    def _unlink(self, rank: int, peer: int, why: str) -> None:
        transport = self._open[rank]
        transport.incoming.put(Lost(peer, transport.linked.pop(peer), why))

    def _leave(self, rank: int, why: str) -> None:
        transport = self._open.pop(rank, None)
        if transport is None:
            return
        for peer in sorted(transport.linked):
            self._unlink(peer, rank, why)
        transport.linked.clear()
        transport.closed = True
        transport.wake()

    def pass_on(self, source: LoopbackTransport, to: int, incarnation: int, message: Message, key: str | None) -> None:
        """For the ends only: a message to the end of another rank."""
        nbytes = message.nbytes
        with self._lock:
            if source.linked.get(to) != incarnation:
                return
            arrived = Arrived(source.rank, incarnation, message, nbytes)
            uncompressed = nbytes + saved_bytes(message)
            departed = Departed(to, incarnation, key, nbytes, 0.0, type(message).__name__, uncompressed)
            self._open[to].incoming.put((arrived, departed))

    def taken(self, source: int, departed: Departed) -> None:
        """For the ends only: a message has been taken, and so has left the one who sent it."""
        with self._lock:
            sender = self._open.get(source)
            if sender is not None and sender.linked.get(departed.to) == departed.incarnation:
                sender.incoming.put(departed)

    def leave(self, transport: LoopbackTransport) -> None:
        """For the ends only: one of them closes."""
        with self._lock:
            if not transport.closed:
                self._leave(transport.rank, "closed")


class LoopbackTransport(Transport):
    """One end; made by `Loopback.transport`."""

    def __init__(self, loopback: Loopback, rank: int) -> None:
        self.rank = rank
        self.linked: dict[int, int] = {}
        self.incoming: SimpleQueue[Incoming | tuple[Arrived, Departed] | None] = SimpleQueue()
        self.closed = False
        self._loopback = loopback
        self._woken = False

    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        self._loopback.pass_on(self, to, incarnation, message, key)

    def receive(self, timeout: float | None = None) -> Incoming | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.closed and not self._woken:
            try:
                rest = None if deadline is None else max(0.0, deadline - time.monotonic())
                item = self.incoming.get(timeout=rest)
            except Empty:
                return None
            if isinstance(item, tuple):
                arrived, departed = item
                self._loopback.taken(arrived.source, departed)
                return arrived
            if item is not None:
                return item
        self._woken = False
        return None

    def wake(self) -> None:
        self._woken = True
        self.incoming.put(None)  # only to end a wait: `_woken` is what counts, so wakes do not add up

    def close(self, linger_seconds: float = 5.0) -> None:
        self._loopback.leave(self)
