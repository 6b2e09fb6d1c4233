"""Messages over TCP, encrypted between machines: one authenticated connection per link, to the one port of a listener.

For each pair of ranks the higher one connects. It asks rank 0 for the address of the lower one; see `rendezvous.py`.
The connection on which both authenticated becomes the link. Where both ends have the same address, they are on one
machine, and large tensors go through memory that they share; see `shared_memory.py`.

A transport that was not closed is closed at exit; see also `tensor_threads.py`.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from offbeat.core.events import LossReason, MessageArrived, PeerJoined, PeerLost
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Message
from offbeat.core.run_identity import RunIdentity
from offbeat.errors import OffbeatError, RunFailed
from offbeat.transports.address import Address
from offbeat.transports.byte_stream import ByteStream
from offbeat.transports.link import CLOSED_HERE, LinkLoss, LinkOptions, difference, different_versions
from offbeat.transports.listener import Listener
from offbeat.transports.relay import Relays
from offbeat.transports.rendezvous import (
    REPLY_SECONDS,
    Assignment,
    CallRequest,
    ControlConnection,
    Endpoint,
    LinkAccepted,
    LinkConfirmed,
    LinkRequest,
    Rejected,
    Rejection,
    RelayAccepted,
    RelayRequest,
    Unreachable,
    backoff,
    connect,
)
from offbeat.transports.shared_memory import SharedSlots
from offbeat.transports.stream_link import StreamLink
from offbeat.transports.tensor_threads import TensorThread
from offbeat.transports.tls import Credentials
from offbeat.transports.transport import QueuedTransport, TransportEvent
from offbeat.transports.wire import WIRE_VERSION

_STABLE_SECONDS = 2.0
"""After a link that lasted so long, the first attempt to reconnect follows soon."""

_DIRECT_ATTEMPTS = 3
"""A peer that could not be reached so often, is asked for through rank 0, every other time."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """How processes are admitted to a run."""

    member: str = ""
    """The name of this process, by which rank 0 recognises it."""
    assign: Callable[[CallRequest], Assignment | str] | None = None
    """On rank 0: answers a request with an assignment, or with the sentence of a rejection."""
    is_peer: Callable[[int], bool] = lambda rank: False
    """Whether a rank beyond the expected ones is a peer."""


class TcpTransport(QueuedTransport):
    """The links of one rank over TCP. Starts to connect at once; its threads end with `close`.

    Args:
        rank: of this process.
        processes: number of ranks that are expected.
        peers: ranks to have links with.
        rendezvous: for rank 0 its listener, for all others the address of that listener.
        credentials: which all ranks share: the token, and TLS.
        identity: of the run; ranks with different ones are rejected.
        admission: how processes are admitted to the run.
        options: settings of the links.
    """

    def __init__(
        self,
        *,
        rank: int,
        processes: int,
        peers: Iterable[int],
        rendezvous: Address | Listener,
        credentials: Credentials,
        identity: RunIdentity,
        admission: Admission = Admission(),  # noqa: B008 (frozen)
        options: LinkOptions = LinkOptions(),  # noqa: B008 (frozen)
    ) -> None:
        if (rank == 0) != isinstance(rendezvous, Listener):
            raise ValueError("internal error: rank 0 needs a listener, and all other ranks its address")
        super().__init__()
        self.rank = rank
        self.processes = processes
        self.peers = frozenset(peers) - {rank}
        self.pool = Pool()
        self._credentials = credentials
        self._identity = identity
        self._admission = admission
        self._assign = admission.assign or self._default_assignment
        self._options = options
        self._lock = threading.Lock()
        self._links: dict[int, StreamLink] = {}
        self._next_incarnation = dict.fromkeys(self.peers, options.first_incarnation)
        self._connections: set[ControlConnection] = set()
        """Connections that this rank opened and that are not links yet."""
        self._connecting: set[ControlConnection] = set()
        """Connections that become links."""
        self._connected = threading.Condition(self._lock)
        self._registered: dict[int, tuple[Endpoint, ControlConnection]] = {}
        self._refused: dict[int, str] = {}
        """Ranks that may not connect again, and why."""
        self._relays = Relays(options.silence_seconds)
        self._closing = threading.Event()
        self._threads: list[TensorThread] = []
        self._listener = rendezvous if isinstance(rendezvous, Listener) else None
        self._rendezvous = rendezvous.address if isinstance(rendezvous, Listener) else rendezvous
        self._process = os.getpid()
        atexit.register(self._at_exit)
        self._start()

    def _start(self) -> None:
        if self._listener is not None:
            self._listener.serve(self._serve)
        elif any(peer > self.rank for peer in self.peers):
            self._start_thread(self._keep_registered, "registers")
        for peer in sorted(self.peers):
            if peer < self.rank:
                self._start_thread(self._keep_connected, f"connects to {peer}", peer)

    def _start_thread(self, target: Callable[..., None], name: str, *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.ident is None or thread.is_alive()]
        thread = TensorThread(functools.partial(target, *arguments), f"offbeat rank {self.rank} {name}")
        self._threads.append(thread)
        thread.start()

    # The contract

    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        with self._lock:
            link = self._links.get(to)
        if link is not None and link.incarnation == incarnation:
            link.post(message, key)

    def disconnect(self, peer: int, incarnation: int, why: str, final: bool = False) -> None:
        with self._lock:
            link = self._links.get(peer)
            if final:
                self._refused[peer] = why
        if link is not None and link.incarnation == incarnation:
            link.drop(LinkLoss(LossReason.INVALID, why))

    def _on_receive(self, event: TransportEvent) -> None:
        if isinstance(event, MessageArrived):
            link = self._links.get(event.source)
            if link is not None and link.incarnation == event.incarnation:
                link.acknowledge()

    def close(self, linger_seconds: float = 5.0) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            links = list(self._links.values())
            for connection in self._connections:
                connection.disconnect()
            for _, connection in self._registered.values():
                connection.close()
        deadline = time.monotonic() + linger_seconds
        for link in links:
            link.finish()
        if self._listener is not None:
            self._listener.close()
        for link in links:
            if not link.ended.wait(max(0.0, deadline - time.monotonic())):
                link.drop(CLOSED_HERE)
        deadline = time.monotonic() + 1.0
        for link in links:
            link.ended.wait(max(0.0, deadline - time.monotonic()))
        self._relays.close()
        with self._lock:
            for connection in self._connecting:
                connection.shut_down()
            self._connected.wait_for(lambda: not self._connecting, REPLY_SECONDS + 1.0)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._closed = True
        self.wake()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # a forked copy must not touch the connections of its parent
            self.close(0.0)

    # Links

    def _add_link(self, peer: int, incarnation: int, stream: ByteStream, shared: SharedSlots) -> StreamLink | None:
        """Start a link, after an older one has ended; None if there is a newer one, or the transport is closing."""
        link = StreamLink(
            peer,
            incarnation,
            stream,
            options=self._options,
            pool=self.pool,
            deliver=self.deliver,
            on_end=self._on_link_end,
            shared=shared,
        )
        while True:
            with self._lock:
                old = self._links.get(peer)
                if self._closing.is_set() or (old is not None and old.incarnation > incarnation):
                    break
                if old is None:
                    self._next_incarnation[peer] = max(self._next_incarnation[peer], incarnation + 1)
                    self._links[peer] = link
                    self.put(functools.partial(PeerJoined, peer=peer, incarnation=incarnation))
                    break
            old.drop(LinkLoss(LossReason.REPLACED, f"rank {peer} connected again"))
            if not old.ended.wait(self._options.silence_seconds + 1.0):
                break
        if self._links.get(peer) is not link:
            stream.break_off()
            stream.close()
            shared.close()
            return None
        link.start()
        return link

    def _on_link_end(self, link: StreamLink) -> None:
        with self._lock:
            del self._links[link.peer]
            reason, detail = link.loss or LinkLoss(LossReason.BROKEN, "ended")
            self.put(
                functools.partial(PeerLost, peer=link.peer, incarnation=link.incarnation, reason=reason, detail=detail)
            )

    @contextmanager
    def _becoming_link(self, connection: ControlConnection) -> Iterator[None]:
        """`close` waits for the end of the block."""
        with self._lock:
            if self._closing.is_set():
                raise Unreachable("closing")
            self._connecting.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connecting.discard(connection)
                self._connected.notify_all()

    # The listener: ranks that connect to this one. Each connection is served by a thread of its own.

    def _serve(self, connection: ControlConnection) -> bool:
        """Answer an authenticated client; True if the connection is to stay open."""
        try:
            request = connection.recv(CallRequest)
            if request.version != WIRE_VERSION:
                raise Rejected(different_versions(self.rank, WIRE_VERSION, request.version))
            connection.send(self._decide(request))
            if request.purpose == "link":
                self._accept_link(connection, request)
            elif request.purpose == "register":
                return self._accept_registration(connection, request)
            elif request.purpose == "lookup":
                connection.send(self._look_up(request.about)[0])
            elif request.purpose == "relay" and request.rank is not None and request.about is not None:
                registered = self._look_up(request.about)[1]
                self._relays.ask(connection, request.rank, request.about, registered.send)
            elif request.purpose == "relayed" and request.relay is not None:
                self._relays.answer(connection, request.relay)
        except Rejected as error:
            connection.send(Rejection(str(error), error.final))
        return False

    def _decide(self, request: CallRequest) -> Assignment:
        try:
            assignment = self._assign(request)
        except Exception as error:
            _log.exception("internal error, no assignment for %s", request)
            raise Rejected(f"rank {self.rank} failed to answer: {type(error).__name__}: {error}") from error
        if isinstance(assignment, str):
            raise Rejected(assignment)
        if request.purpose != "assignment" and assignment.rank != request.rank:
            raise Rejected(
                f"this process connected as rank {request.rank}, but it is assigned rank {assignment.rank}; "
                "request an assignment first"
            )
        return assignment

    def _default_assignment(self, request: CallRequest) -> Assignment | str:
        if request.rank is None:
            return f"rank {self.rank} assigns no ranks; say which rank this process is"
        return Assignment(request.rank, self.processes, 0.0, None)

    def _accept_link(self, connection: ControlConnection, request: CallRequest) -> None:
        peer = request.rank
        link_request = connection.recv(LinkRequest)
        if peer in self._refused:
            raise Rejected(f"rank {self.rank} refuses rank {peer}: {self._refused[peer]}")
        is_late = peer is not None and peer >= self.processes and self._admission.is_peer(peer)
        if peer is None or not (is_late or peer in self.peers) or peer < self.rank:
            raise Rejected(f"rank {peer} is no peer of rank {self.rank}; give every rank the same strategy")
        if (sentence := difference(self.rank, self._identity, peer, link_request.identity)) is not None:
            raise Rejected(sentence)
        with self._lock:
            next_incarnation = self._next_incarnation.get(peer, self._options.first_incarnation)
            incarnation = max(next_incarnation, link_request.incarnation_min)
            self._next_incarnation[peer] = incarnation + 1
        shared = SharedSlots()
        with self._becoming_link(connection):
            with shared.handshake():
                slot_table = None
                if link_request.slot_table is not None and self._options.shared_memory and connection.same_host:
                    shared.accept(link_request.slot_table)
                    slot_table = shared.offer()
                connection.commit()
                connection.send(LinkAccepted(incarnation, slot_table))
                connection.recv(LinkConfirmed)
            self._add_link(peer, incarnation, connection.detach(self._options.silence_seconds), shared)

    def _accept_registration(self, connection: ControlConnection, request: CallRequest) -> bool:
        if request.listener is None or request.rank is None or not 0 < request.rank < self.processes:
            raise Rejected(f"rank {request.rank} cannot be registered")
        with self._lock:
            if self._closing.is_set():
                return False
            before = self._registered.get(request.rank)
            connection.keep_open(self._options.silence_seconds)
            self._registered[request.rank] = (request.listener, connection)
        if before is not None:
            before[1].close()
        return True

    def _look_up(self, rank: int | None) -> tuple[Endpoint, ControlConnection]:
        with self._lock:
            entry = self._registered.get(-1 if rank is None else rank)
        if entry is None:
            raise Rejected(f"rank {rank} is not registered yet", final=False)
        return entry

    # The client: ranks to which this one connects. Each has a thread of its own.

    def _keep_connected(self, peer: int) -> None:
        """Keep a link to a lower rank, until rank 0 sends a goodbye or the peer rejects this rank."""
        pauses = backoff()
        left_listener: str | None = None
        tried: str | None = None
        attempts = 0
        while not self._closing.is_set():
            try:
                endpoint = self._resolve(peer, left_listener)
                if endpoint.name != tried:  # a restarted process, which can perhaps be reached
                    tried, attempts = endpoint.name, 0
                attempts += 1
                is_relayed = peer != 0 and attempts >= _DIRECT_ATTEMPTS and attempts % 2
                link = self._connect_by_relay(peer) if is_relayed else self._connect(peer, endpoint)
            except Exception as error:
                if self._is_final(peer, error):
                    return
            else:
                if link is not None:
                    joined = time.monotonic()
                    link.ended.wait()
                    if link.left:
                        if peer == 0:
                            return
                        left_listener = endpoint.name
                    attempts = 0
                    if time.monotonic() - joined > _STABLE_SECONDS:
                        pauses = backoff()
            self._closing.wait(next(pauses))

    def _is_final(self, peer: int, error: Exception) -> bool:
        """Whether retrying would not help; if so, `receive` raises `RunFailed`."""
        if isinstance(error, Unreachable) or (isinstance(error, Rejected) and not error.final):
            _log.debug("rank %d cannot reach rank %d: %s", self.rank, peer, error)
            return False
        if not isinstance(error, OffbeatError):
            _log.error("internal error, rank %d cannot connect to rank %d", self.rank, peer, exc_info=error)
        self.put(RunFailed(str(error) if isinstance(error, OffbeatError) else repr(error)))
        return True

    def _resolve(self, peer: int, left_listener: str | None) -> Endpoint:
        """Where a peer listens; not the listener `left_listener`, which belongs to a process that has left."""
        if peer == 0:
            return Endpoint(self._rendezvous.host, self._rendezvous.port, "")
        with self._connection_to(self._rendezvous) as connection:
            request = CallRequest("lookup", self.rank, self._admission.member, about=peer)
            self._request(connection, request, from_rank_0=True)
            endpoint = connection.recv(Endpoint)
        if endpoint.name == left_listener:
            raise Rejected(f"rank {peer} has left", final=False)
        return endpoint

    def _connect(self, peer: int, endpoint: Endpoint) -> StreamLink | None:
        with self._connection_to(Address(endpoint.host, endpoint.port)) as connection:
            return self._link_over(connection, peer)

    def _connect_by_relay(self, peer: int) -> StreamLink | None:
        with self._connection_to(self._rendezvous) as connection:
            request = CallRequest("relay", self.rank, self._admission.member, about=peer)
            self._request(connection, request, from_rank_0=True)
            connection.recv(RelayAccepted)
            return self._link_over(connection, peer)

    def _link_over(self, connection: ControlConnection, peer: int) -> StreamLink | None:
        self._request(connection, CallRequest("link", self.rank, self._admission.member), from_rank_0=peer == 0)
        shared = SharedSlots()
        with self._becoming_link(connection):
            with shared.handshake():
                slot_table = shared.offer() if self._options.shared_memory and connection.same_host else None
                connection.send(LinkRequest(self._identity, self._next_incarnation[peer], slot_table))
                accepted = connection.recv(LinkAccepted)
                if accepted.slot_table is not None and slot_table is not None:
                    shared.accept(accepted.slot_table)
                connection.commit()
                connection.send(LinkConfirmed())
            stream = connection.detach(self._options.silence_seconds)
            return self._add_link(peer, accepted.incarnation, stream, shared)

    def _keep_registered(self) -> None:
        """Listen for the higher ranks and register the listener at rank 0; again whenever rank 0 was restarted."""
        pauses = backoff()
        while not self._closing.is_set():
            try:
                with self._connection_to(self._rendezvous) as connection:
                    listener = self._open_listener(connection.local_host)
                    endpoint = Endpoint(listener.address.host, listener.address.port, listener.name)
                    request = CallRequest("register", self.rank, self._admission.member, listener=endpoint)
                    self._request(connection, request, from_rank_0=True)
                    pauses = backoff()
                    connection.keep_open(self._options.silence_seconds)
                    while True:
                        relay = connection.recv(RelayRequest)
                        self._start_thread(self._answer_relay, "is relayed", relay.number)
            except Exception as error:
                if self._is_final(0, error):
                    return
            self._closing.wait(next(pauses))

    def _answer_relay(self, number: int) -> None:
        """Serve a rank that cannot reach this one, over rank 0."""
        try:
            with self._connection_to(self._rendezvous) as connection:
                request = CallRequest("relayed", self.rank, self._admission.member, relay=number)
                self._request(connection, request, from_rank_0=True)
                self._serve(connection)
        except (Unreachable, Rejected) as error:
            _log.debug("rank %d: relay %d ended: %s", self.rank, number, error)

    def _open_listener(self, host: str) -> Listener:
        """At the local address of the connection to rank 0: ranks that reach rank 0 are likely to reach it as well."""
        with self._lock:
            if self._closing.is_set():
                raise Unreachable("closing")
            if self._listener is None:
                self._listener = Listener(Address(host, 0), self._credentials)
                self._listener.serve(self._serve)
            return self._listener

    @contextmanager
    def _connection_to(self, address: Address) -> Iterator[ControlConnection]:
        """A connection that `close` ends."""
        with connect(address, self._credentials) as connection:
            with self._lock:
                if self._closing.is_set():
                    raise Unreachable("closing")
                self._connections.add(connection)
            try:
                yield connection
            finally:
                with self._lock:
                    self._connections.discard(connection)

    def _request(self, connection: ControlConnection, request: CallRequest, from_rank_0: bool) -> None:
        connection.send(request)
        assignment = connection.recv(Assignment)
        if from_rank_0:
            self.elapsed_at_join = (assignment.elapsed_seconds, time.monotonic())
