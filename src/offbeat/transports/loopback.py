"""All ranks in one process, messages passed by reference: the shortest transport that keeps the contract.

Messages are never queued for sending here, so none is ever replaced, and a link is never busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import Lock

from offbeat.core.compression import saved_bytes
from offbeat.core.messages import Message
from offbeat.errors import ConfigurationError
from offbeat.transports.transport import Arrived, Departed, Incoming, Joined, Lost, QueuedTransport, Transport


class Loopback:
    """Ranks and their peers. A link is established when the transports of both its ends exist."""

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
        """The transport of a rank. An earlier one is closed; peers see the new one as another incarnation."""
        if rank not in self._peers:
            raise ConfigurationError(f"there is no rank {rank} in this loopback; known: {sorted(self._peers)}")
        with self._lock:
            self._leave(rank, "connected again")
            transport = self._open[rank] = LoopbackTransport(self, rank)
            for peer in sorted(self._peers[rank] & self._open.keys()):
                self._link(rank, peer)
        return transport

    def cut(self, rank: int, peer: int) -> None:
        """Break a link; it is established again at once, under a new incarnation."""
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
            self._open[here].inbox.put(Joined(there, incarnation))

    def _unlink(self, rank: int, peer: int, why: str) -> None:
        transport = self._open[rank]
        transport.inbox.put(Lost(peer, transport.linked.pop(peer), why))

    def _leave(self, rank: int, why: str) -> None:
        transport = self._open.pop(rank, None)
        if transport is None:
            return
        for peer in sorted(transport.linked):
            self._unlink(peer, rank, why)
        transport.linked.clear()
        transport._closed = True
        transport.wake()

    def pass_on(self, source: LoopbackTransport, to: int, incarnation: int, message: Message, key: str | None) -> None:
        """For `LoopbackTransport`: send a message to another rank."""
        nbytes = message.nbytes
        with self._lock:
            if source.linked.get(to) != incarnation:
                return
            arrived = Arrived(source.rank, incarnation, message, nbytes)
            uncompressed = nbytes + saved_bytes(message)
            departed = Departed(to, incarnation, key, nbytes, 0.0, type(message).__name__, uncompressed)
            self._open[to].inbox.put((arrived, departed))

    def confirm(self, source: int, departed: Departed) -> None:
        """For `LoopbackTransport`: a message was received, and so has left its sender."""
        with self._lock:
            sender = self._open.get(source)
            if sender is not None and sender.linked.get(departed.to) == departed.incarnation:
                sender.inbox.put(departed)

    def leave(self, transport: LoopbackTransport) -> None:
        """For `LoopbackTransport`: it closes."""
        with self._lock:
            if self._open.get(transport.rank) is transport:
                self._leave(transport.rank, "closed")


class LoopbackTransport(QueuedTransport):
    """The transport of one rank; made by `Loopback.transport`."""

    def __init__(self, loopback: Loopback, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.linked: dict[int, int] = {}
        """Incarnations of the links, by peer."""
        self._loopback = loopback

    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        self._loopback.pass_on(self, to, incarnation, message, key)

    def _on_receive(self, item: Incoming | tuple[Arrived, Departed]) -> Incoming:
        if isinstance(item, tuple):
            arrived, departed = item
            self._loopback.confirm(arrived.source, departed)
            return arrived
        return item

    def close(self, linger_seconds: float = 5.0) -> None:
        self._loopback.leave(self)
