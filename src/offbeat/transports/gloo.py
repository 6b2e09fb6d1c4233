"""Messages over gloo, the library that comes with torch: one group of two ranks per link.

With a group per link, a peer that dies breaks its own link and nothing else, and one that comes back gets a new group.
For each pair of ranks the higher one dials. It asks the desk, the door of rank 0, where the lower one is; see
`rendezvous.py`. The connection on which they showed each other the token stays: headers and what is small go there, and
large tensors through gloo, whose sockets are not authenticated. Nothing is encrypted: trusted networks only. Where both
ends have the same address, they are on one machine, and tensors go through memory that they share; see `slots.py`.

What gloo does and does not do, and what follows
- A wait that runs out of time breaks the connection. That is what a silent peer deserves, and the only way to wake
  somebody else who waits: `break_off` lets a receive that nobody will ever serve run out of time.
- A message that is larger than the memory it is received into ends the process. So both sides must agree on each size:
  it follows from what came before, and what cannot be understood costs the link before anything else is received.
- Its threads must not be waiting when Python ends. So a transport that nobody closed is closed at exit.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Message
from offbeat.errors import ContractViolation, OffbeatError
from offbeat.transports.link import Channel, Link, LinkOptions
from offbeat.transports.rendezvous import (
    Address,
    Assignment,
    Call,
    CallRequest,
    Endpoint,
    LinkAccepted,
    LinkRequest,
    Listener,
    Rejected,
    Rejection,
    StoreEntry,
    Unreachable,
    back_off,
    dial,
)
from offbeat.transports.shared_memory import Shared
from offbeat.transports.transport import (
    MESSAGE_BYTES_MAX,
    SILENCE_SECONDS,
    Arrived,
    Incoming,
    Joined,
    Lost,
    Refused,
    Transport,
)
from offbeat.transports.wire import WIRE_VERSION, encode

_DATA, _NOBODY = 0, 1
"""Tags: everything travels under the first, and never anything under the second."""

BULK_BYTES = 1 << 20
"""From this size on a piece goes through gloo."""

_CLOSED = "the connection was closed"

_AHEAD = 1
"""Pieces of a message that are posted while an earlier one is still under way."""

_CONNECT_SECONDS = 5.0
"""How long the two ends of a link, who know of each other by then, wait for the connection."""

_SETTLED_SECONDS = 2.0
"""A link that lasted so long was a good one: after it, the first try to have it again comes soon."""

_log = logging.getLogger(__name__)


class PairStore(dist.Store):  # type: ignore[name-defined, misc]
    """What gloo wants to look up of the other end, told over the call that made the link."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._known[key] = raw
        self._call.send(StoreEntry(key, raw))

    def get(self, key: str) -> bytes:
        while key not in self._known:
            entry = self._call.recv(StoreEntry)
            self._known[entry.key] = entry.value
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class GlooChannel(Channel):
    """A group of two for what is large, and the connection that made it for the rest.

    `place` is 0 for the listener and 1 for the dialer. A gloo operation costs several packets and as many threads that
    wake up, whatever its size; a piece of less than BULK_BYTES is cheaper on a plain connection. Both ends know the
    size of each piece, and so on which way it comes.
    """

    def __init__(self, call: Call, place: int, silence_seconds: float) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=_CONNECT_SECONDS)
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=call.local_host, lazy_init=False)]
        store = PairStore(call)
        self._group: Any = dist.ProcessGroupGloo(store, place, 2, options)
        store.set(f"connected {place}", b"")  # who broke off before the other was there would leave it waiting
        store.get(f"connected {1 - place}")
        self._peer = 1 - place
        self._limit = timedelta(seconds=silence_seconds)
        self._silent = f"silent for {silence_seconds:g} seconds"
        self._stream = call.hand_over(silence_seconds)

    def send(self, pieces: Iterable[Tensor]) -> None:
        small: list[memoryview] = []
        with self._bulk() as bulk:
            for piece in pieces:
                if piece.numel() < BULK_BYTES:
                    small.append(_memory(piece))
                else:
                    self._write(small)
                    bulk.post(self._posting("send"), piece)
            self._write(small)

    def send_now(self, pieces: Iterable[Tensor]) -> list[memoryview] | None:
        parts = []
        for piece in pieces:
            if piece.numel() >= BULK_BYTES:
                return None
            parts.append(_memory(piece))
        try:
            sent = self._stream.sendmsg(parts, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            raise ConnectionError(_CLOSED) from None
        return _rest_of(parts, sent)

    def send_rest(self, rest: list[memoryview]) -> None:
        with self._bulk():
            self._write(rest)

    def receive(self, pieces: Iterable[Tensor]) -> None:
        with self._bulk() as bulk:
            for piece in pieces:
                if piece.numel() < BULK_BYTES:
                    self._read(_memory(piece))
                else:
                    bulk.post(self._posting("recv"), piece)

    def _write(self, parts: list[memoryview]) -> None:
        """Everything in one go, if the kernel takes that much."""
        if not parts:
            return
        for part in _rest_of(parts, self._stream.sendmsg(parts)):
            self._stream.sendall(part)
        parts.clear()

    def _read(self, into: memoryview) -> None:
        while into:
            count = self._stream.recv_into(into, len(into), socket.MSG_WAITALL)
            if not count:
                raise ConnectionError(_CLOSED)
            into = into[count:]

    def _posting(self, what: str) -> Callable[[Tensor], Any]:
        group = self._group
        if group is None:
            raise ConnectionError(_CLOSED)
        return lambda piece: getattr(group, what)([piece], self._peer, _DATA)

    @contextmanager
    def _bulk(self) -> Iterator[_Bulk]:
        """Operations of gloo, all of them done at the end; whatever fails is a connection that is gone."""
        bulk = _Bulk(self._limit)
        try:
            yield bulk
            bulk.wait_for_all()
        except BlockingIOError:
            raise ConnectionError(self._silent) from None
        except (OSError, ValueError) as error:
            if isinstance(error, ConnectionError) and error.errno is None:
                raise  # in words of our own already
            raise ConnectionError(_CLOSED) from None
        except RuntimeError as error:
            raise ConnectionError(self._reason(str(error))) from None
        finally:
            bulk.posted.clear()  # before the memory goes, which gloo uses until then

    def _reason(self, text: str) -> str:
        if "imed out" in text or "pplication timeout" in text:
            return self._silent
        if "closed by peer" in text or "reset by peer" in text or "roken pipe" in text:
            return _CLOSED
        return text.splitlines()[0]

    def break_off(self) -> None:
        with suppress(OSError):  # the other side was quicker
            self._stream.shutdown(socket.SHUT_RDWR)
        group = self._group
        if group is None:
            return
        nothing = torch.empty(1, dtype=torch.uint8)
        with suppress(RuntimeError):  # it always runs out of time, unless the connection was broken already
            group.recv([nothing], self._peer, _NOBODY).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self._group = None
        self._stream.close()


def _rest_of(parts: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of these when so many bytes have gone."""
    rest = []
    for part in parts:
        if sent < len(part):
            rest.append(part[sent:])
        sent = max(0, sent - len(part))
    return rest


def _memory(piece: Tensor) -> memoryview:
    return memoryview(piece.numpy())  # type: ignore[arg-type]


class _Bulk:
    """Operations that were posted. The next is posted before the last is waited for, so that none waits for us."""

    def __init__(self, limit: timedelta) -> None:
        self.posted: deque[Any] = deque()
        self._limit = limit

    def post(self, how: Callable[[Tensor], Any], piece: Tensor) -> None:
        self.posted.append(how(piece))
        if len(self.posted) > _AHEAD:
            self._wait_for_first()

    def wait_for_all(self) -> None:
        while self.posted:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        if not self.posted[0].wait(self._limit):
            raise ConnectionError(_CLOSED)
        self.posted.popleft()


class GlooTransport(Transport):
    """The links of one rank over gloo. Rank 0 brings the door where everybody is met; all others know its address.

    `assign` decides about those who come: it answers with their assignment, or with a sentence why they are refused.
    `is_peer` tells whether a rank beyond those that were expected is a neighbour. Without `shared_memory` tensors go
    through sockets between processes of one machine, too.
    """

    def __init__(
        self,
        *,
        rank: int,
        processes: int,
        peers: Iterable[int],
        rendezvous: Address | Listener,
        token: bytes | None,
        fingerprint: str,
        member: str = "",
        assign: Callable[[CallRequest], Assignment | str] | None = None,
        first_incarnation: int = 0,
        is_peer: Callable[[int], bool] = lambda rank: False,
        silence_seconds: float = SILENCE_SECONDS,
        checksum: bool = False,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        chunk_bytes: int = 4 << 20,
        shared_memory: bool = True,
    ) -> None:
        if (rank == 0) != isinstance(rendezvous, Listener):
            raise ValueError("rank 0 brings the door itself, and all others its address")
        self.rank = rank
        self.processes = processes
        self.peers = frozenset(peers) - {rank}
        self.elapsed_at_join: tuple[float, float] | None = None
        """What rank 0 said how long the run had lasted, and `time.monotonic()` when it said so."""
        self.pool = Pool()
        self._token = token
        self._fingerprint = fingerprint
        self._member = member
        self._assign = assign or self._default_assignment
        self._options = LinkOptions(silence_seconds, message_bytes_max, chunk_bytes, checksum)
        self._shares = shared_memory
        self._incoming: SimpleQueue[Incoming | ContractViolation | None] = SimpleQueue()
        self._woken = False
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._first = first_incarnation
        self._is_peer = is_peer
        self._next = dict.fromkeys(self.peers, first_incarnation)
        self._calls: set[Call] = set()
        self._connecting: set[Call] = set()
        """Calls that are becoming links: a thread is inside gloo for each, which must not outlive the interpreter."""
        self._connected = threading.Condition(self._lock)
        self._registered: dict[int, tuple[Endpoint, Call]] = {}
        self._closing = threading.Event()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._listener = rendezvous if isinstance(rendezvous, Listener) else None
        self._rendezvous = rendezvous.address if isinstance(rendezvous, Listener) else rendezvous
        self._process = os.getpid()
        atexit.register(self._at_exit)
        self._begin()

    def _begin(self) -> None:
        if self._listener is not None:
            self._listener.serve(self._visit)
        elif any(peer > self.rank for peer in self.peers):
            self._start(self._register, "registers")
        for peer in sorted(self.peers):
            if peer < self.rank:
                self._start(self._dial, f"dials {peer}", peer)

    def _start(self, work: Callable[..., None], name: str, *arguments: object) -> None:
        name = f"offbeat rank {self.rank} {name}"
        thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # What the contract asks for

    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        with self._lock:
            link = self._links.get(to)
        if link is not None and link.incarnation == incarnation:
            link.post(message, key)

    def weight(self, message: Message) -> int:
        return encode(message).nbytes

    def receive(self, timeout: float | None = None) -> Incoming | None:
        """As the contract says. A message of ours that could not be written raises its ContractViolation here."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._closed and not self._woken:
            try:
                item = self._incoming.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except Empty:
                return None
            if isinstance(item, ContractViolation):
                raise item
            if isinstance(item, Arrived):
                self._took(item)
            if item is not None:
                return item
        self._woken = False
        return None

    def _took(self, arrived: Arrived) -> None:
        link = self._links.get(arrived.source)
        if link is not None and link.incarnation == arrived.incarnation:
            link.take()

    def wake(self) -> None:
        self._woken = True
        self._incoming.put(None)  # only to end a wait: `_woken` is what counts, so wakes do not add up

    def close(self, linger_seconds: float = 5.0) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            links = list(self._links.values())
            for call in self._calls:
                call.hang_up()
            for _, call in self._registered.values():
                call.close()
        until = time.monotonic() + linger_seconds
        for link in links:
            link.finish()
        if self._listener is not None:
            self._listener.close()
        for link in links:
            if not link.ended.wait(max(0.0, until - time.monotonic())):
                link.drop("closed by this side")
        until = time.monotonic() + 1.0
        for link in links:
            link.ended.wait(max(0.0, until - time.monotonic()))
        with self._lock:
            for call in self._connecting:
                call.cut()
            self._connected.wait_for(lambda: not self._connecting, _CONNECT_SECONDS + 1.0)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._closed = True
        self.wake()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # a copy of this process has no business with its connections
            self.close(0.0)

    # Links

    def _welcome(self, peer: int, incarnation: int, channel: GlooChannel, shared: Shared) -> Link | None:
        """A link over a channel, unless a newer one is there. An older one ends first."""
        link = Link(
            peer,
            incarnation,
            channel,
            name=f"offbeat link {self.rank}-{peer}",
            options=self._options,
            pool=self.pool,
            deliver=self._incoming.put,
            on_end=self._ended,
            shared=shared,
        )
        while True:
            with self._lock:
                old = self._links.get(peer)
                if self._closing.is_set() or (old is not None and old.incarnation > incarnation):
                    break
                if old is None:
                    self._next[peer] = max(self._next[peer], incarnation + 1)
                    self._links[peer] = link
                    self._incoming.put(Joined(peer, incarnation))
                    break
            old.drop(f"rank {peer} came again")
            if not old.ended.wait(self._options.silence_seconds + 1.0):
                break
        if self._links.get(peer) is not link:
            channel.break_off()
            channel.close()
            shared.close()
            return None
        link.start()
        return link

    def _ended(self, link: Link) -> None:
        with self._lock:
            del self._links[link.peer]
            self._incoming.put(Lost(link.peer, link.incarnation, link.why or "ended"))

    # Those who come

    def _visit(self, call: Call) -> bool:
        """Somebody who holds the token; True if the call is to stay open."""
        try:
            request = call.recv(CallRequest)
            if request.version != WIRE_VERSION:
                raise Rejected(
                    f"rank {self.rank} speaks version {WIRE_VERSION} of the wire, but this process version "
                    f"{request.version}; install the same offbeat everywhere"
                )
            call.send(self._decide(request))
            if request.purpose == "link":
                self._visit_for_link(call, request)
            elif request.purpose == "register":
                return self._visit_to_register(call, request)
            elif request.purpose == "lookup":
                call.send(self._look_up(request.about))
        except Rejected as error:
            call.send(Rejection(str(error), error.final))
        return False

    def _decide(self, request: CallRequest) -> Assignment:
        try:
            assignment = self._assign(request)
        except Exception as error:
            _log.exception("no terms could be found for %s", request)
            raise Rejected(f"rank {self.rank} failed to answer: {type(error).__name__}: {error}") from error
        if isinstance(assignment, str):
            raise Rejected(assignment)
        if request.purpose != "assignment" and assignment.rank != request.rank:
            raise Rejected(f"rank {request.rank} came, but is to be rank {assignment.rank}; ask for the terms first")
        return assignment

    def _default_assignment(self, request: CallRequest) -> Assignment | str:
        if request.rank is None:
            return f"rank {self.rank} gives out no ranks; say which one this process is to be"
        return Assignment(request.rank, self.processes, 0.0, None)

    def _visit_for_link(self, call: Call, request: CallRequest) -> None:
        peer = request.rank
        ready = call.recv(LinkRequest)
        late = peer is not None and peer >= self.processes and self._is_peer(peer)
        if peer is None or not (late or peer in self.peers) or peer < self.rank:
            raise Rejected(f"rank {peer} is no neighbour of rank {self.rank}; give every rank the same strategy")
        if ready.fingerprint != self._fingerprint:
            raise Rejected(
                f"rank {peer} has a different model: its fingerprint is {ready.fingerprint}, that of rank {self.rank} "
                f"is {self._fingerprint}; every rank must build the same model"
            )
        if ready.chunk_bytes != self._options.chunk_bytes:
            raise Rejected(
                f"rank {peer} sends in chunks of {ready.chunk_bytes} bytes, but rank {self.rank} of "
                f"{self._options.chunk_bytes}; give every rank the same chunk_bytes"
            )
        with self._lock:
            incarnation = max(self._next.get(peer, self._first), ready.incarnation_min)
            self._next[peer] = incarnation + 1
        shared = Shared()
        with self._becomes_link(call):
            with shared.meeting():
                slot_table = None
                if ready.slot_table is not None and self._may_share(call):
                    shared.accept(ready.slot_table)
                    slot_table = shared.offer()
                call.send(LinkAccepted(incarnation, slot_table))
                channel = self._channel(call, 0)
            self._welcome(peer, incarnation, channel, shared)

    @contextmanager
    def _becomes_link(self, call: Call) -> Iterator[None]:
        """Who closes this transport waits for the end of it."""
        with self._lock:
            if self._closing.is_set():
                raise Unreachable("closing")
            self._connecting.add(call)
        try:
            yield
        finally:
            with self._lock:
                self._connecting.discard(call)
                self._connected.notify_all()

    def _may_share(self, call: Call) -> bool:
        return self._shares and call.same_host

    def _channel(self, call: Call, place: int) -> GlooChannel:
        call.commit()
        try:
            return GlooChannel(call, place, self._options.silence_seconds)
        except RuntimeError as error:  # the other side died while both were connecting
            raise Unreachable(str(error)) from None

    def _visit_to_register(self, call: Call, request: CallRequest) -> bool:
        if request.listener is None or request.rank is None or not 0 < request.rank < self.processes:
            raise Rejected(f"rank {request.rank} cannot be registered")
        with self._lock:
            if self._closing.is_set():
                return False
            before = self._registered.get(request.rank)
            call.keep()
            self._registered[request.rank] = (request.listener, call)
        if before is not None:
            before[1].close()
        return True

    def _look_up(self, rank: int | None) -> Endpoint:
        with self._lock:
            found = self._registered.get(-1 if rank is None else rank)
        if found is None:
            raise Rejected(f"rank {rank} has not come yet", final=False)
        return found[0]

    # Those whom we call

    def _dial(self, peer: int) -> None:
        """Keep up the link to a lower rank, until rank 0 says goodbye, or the peer refuses us."""
        pauses = back_off()
        gone: str | None = None
        while not self._closing.is_set():
            try:
                listener = self._find(peer, gone)
                link = self._connect(peer, Address(listener.host, listener.port))
            except Exception as error:
                if self._give_up(peer, error):
                    return
            else:
                if link is not None:
                    joined = time.monotonic()
                    link.ended.wait()
                    if link.left:
                        if peer == 0:
                            return
                        gone = listener.name
                    if time.monotonic() - joined > _SETTLED_SECONDS:
                        pauses = back_off()
            self._closing.wait(next(pauses))

    def _give_up(self, peer: int, error: Exception) -> bool:
        """Whether there is no use in trying again; then whoever receives is told."""
        if isinstance(error, Unreachable) or (isinstance(error, Rejected) and not error.final):
            _log.debug("rank %d does not reach rank %d: %s", self.rank, peer, error)
            return False
        if not isinstance(error, OffbeatError):
            _log.error("rank %d cannot dial rank %d", self.rank, peer, exc_info=error)
        self._incoming.put(Refused(peer, str(error) if isinstance(error, OffbeatError) else repr(error)))
        return True

    def _find(self, peer: int, gone: str | None) -> Endpoint:
        """Where to dial a peer; not at the door `gone`, where it said goodbye."""
        if peer == 0:
            return Endpoint(self._rendezvous.host, self._rendezvous.port, "")
        with self._own_call(self._rendezvous) as call:
            self._greet(call, CallRequest("lookup", self.rank, self._member, about=peer), to_desk=True)
            listener = call.recv(Endpoint)
        if listener.name == gone:
            raise Rejected(f"rank {peer} has left", final=False)
        return listener

    def _connect(self, peer: int, address: Address) -> Link | None:
        with self._own_call(address) as call:
            self._greet(call, CallRequest("link", self.rank, self._member), to_desk=peer == 0)
            shared = Shared()
            with self._becomes_link(call):
                with shared.meeting():
                    slot_table = shared.offer() if self._may_share(call) else None
                    call.send(LinkRequest(self._fingerprint, self._next[peer], self._options.chunk_bytes, slot_table))
                    accepted = call.recv(LinkAccepted)
                    if accepted.slot_table is not None and slot_table is not None:
                        shared.accept(accepted.slot_table)
                    channel = self._channel(call, 1)
                return self._welcome(peer, accepted.incarnation, channel, shared)

    def _register(self) -> None:
        """Have a door for the higher ranks, and let the desk know of it; again whenever the desk has gone."""
        pauses = back_off()
        while not self._closing.is_set():
            try:
                with self._own_call(self._rendezvous) as call:
                    listener = self._open_door(call.local_host)
                    endpoint = Endpoint(listener.address.host, listener.address.port, listener.name)
                    self._greet(call, CallRequest("register", self.rank, self._member, listener=endpoint), to_desk=True)
                    pauses = back_off()
                    call.keep()
                    call.recv(Rejection)
            except Exception as error:
                if self._give_up(0, error):
                    return
            self._closing.wait(next(pauses))

    def _open_door(self, host: str) -> Listener:
        """On the address by which this machine reaches the desk: others who reach the desk may reach that as well."""
        with self._lock:
            if self._closing.is_set():
                raise Unreachable("closing")
            if self._listener is None:
                self._listener = Listener(Address(host, 0), self._token)
                self._listener.serve(self._visit)
            return self._listener

    @contextmanager
    def _own_call(self, address: Address) -> Iterator[Call]:
        """A call that ends when this transport closes."""
        with dial(address, self._token) as call:
            with self._lock:
                if self._closing.is_set():
                    raise Unreachable("closing")
                self._calls.add(call)
            try:
                yield call
            finally:
                with self._lock:
                    self._calls.discard(call)

    def _greet(self, call: Call, request: CallRequest, to_desk: bool) -> None:
        call.send(request)
        assignment = call.recv(Assignment)
        if to_desk:
            self.elapsed_at_join = (assignment.elapsed_seconds, time.monotonic())
