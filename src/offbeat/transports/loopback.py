"""All ranks in one process, messages passed by reference: the shortest transport that keeps the contract.

Messages are never queued for sending here, so none is ever replaced, and a link is never busy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Lock

from offbeat.core.events import LossReason, MessageArrived, PeerJoined, PeerLost, Sent
from offbeat.core.messages import Message
from offbeat.core.wire_size import MessageSize, wire_size
from offbeat.errors import ConfigurationError
from offbeat.transports.transport import QueuedTransport


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

    def transport(self, rank: int) -> QueuedTransport:
        """The transport of a rank. An earlier one is closed; peers see the new one as another incarnation."""
        if rank not in self._peers:
            raise ConfigurationError(f"there is no rank {rank} in this loopback; known: {sorted(self._peers)}")
        with self._lock:
            self._leave(rank, LossReason.REPLACED, "connected again")
            transport = self._open[rank] = LoopbackTransport(self, rank)
            for peer in sorted(self._peers[rank] & self._open.keys()):
                self._link(rank, peer)
        return transport

    def cut(self, rank: int, peer: int) -> None:
        """Break a link; it is established again at once, under a new incarnation."""
        with self._lock:
            if peer in self._open[rank].linked:
                self._unlink(rank, peer, LossReason.BROKEN, "cut")
                self._unlink(peer, rank, LossReason.BROKEN, "cut")
                self._link(rank, peer)

    def _link(self, rank: int, peer: int) -> None:
        pair = frozenset((rank, peer))
        incarnation = self._incarnations[pair] = self._incarnations.get(pair, -1) + 1
        for here, there in ((rank, peer), (peer, rank)):
            self._open[here].linked[there] = incarnation
            self._open[here].put(functools.partial(PeerJoined, peer=there, incarnation=incarnation))

    def _unlink(self, rank: int, peer: int, reason: LossReason, detail: str) -> None:
        transport = self._open[rank]
        incarnation = transport.linked.pop(peer)
        transport.put(functools.partial(PeerLost, peer=peer, incarnation=incarnation, reason=reason, detail=detail))

    def _leave(self, rank: int, reason: LossReason, detail: str) -> None:
        transport = self._open.pop(rank, None)
        if transport is None:
            return
        for peer in sorted(transport.linked):
            self._unlink(peer, rank, reason, detail)
        transport.linked.clear()
        transport._closed = True
        transport.wake()

    def pass_on(self, source: LoopbackTransport, to: int, incarnation: int, message: Message, key: str | None) -> None:
        """For `LoopbackTransport`: send a message to another rank."""
        size = wire_size(message)
        with self._lock:
            if source.linked.get(to) == incarnation:
                self._open[to].put(_Passed(self, source.rank, to, incarnation, message, key, size))

    def disconnect(self, transport: LoopbackTransport, peer: int, incarnation: int, why: str) -> None:
        """For `LoopbackTransport`: end a link for good, since both ends are in one process."""
        with self._lock:
            if transport.linked.get(peer) == incarnation:
                self._unlink(transport.rank, peer, LossReason.INVALID, why)
                self._unlink(peer, transport.rank, LossReason.BROKEN, why)

    def confirm(self, passed: _Passed) -> None:
        """A message was received, and so has been sent."""
        with self._lock:
            sender = self._open.get(passed.source)
            if sender is not None and sender.linked.get(passed.to) == passed.incarnation:
                sender.put(
                    functools.partial(
                        Sent, to=passed.to, key=passed.key, incarnation=passed.incarnation, size=passed.size
                    )
                )

    def leave(self, transport: LoopbackTransport) -> None:
        """For `LoopbackTransport`: it closes."""
        with self._lock:
            if self._open.get(transport.rank) is transport:
                self._leave(transport.rank, LossReason.CLOSED, "closed")


@dataclass(frozen=True, slots=True)
class _Passed:
    """A message in the inbox of its receiver."""

    loopback: Loopback
    source: int
    to: int
    incarnation: int
    message: Message
    key: str | None
    size: MessageSize

    def __call__(self, at: float) -> MessageArrived:
        self.loopback.confirm(self)
        return MessageArrived(at, self.source, self.message, self._keep, self.incarnation, self.size.nbytes)

    def _keep(self) -> Message:
        return self.message


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

    def disconnect(self, peer: int, incarnation: int, why: str, final: bool = False) -> None:
        self._loopback.disconnect(self, peer, incarnation, why)

    def close(self, linger_seconds: float = 5.0) -> None:
        self._loopback.leave(self)
