"""How processes find each other: a listener that accepts clients with the right token, and the messages they exchange.

A control connection is a plain TCP connection on which both sides first prove that they know the token, by an HMAC
challenge. Until then nothing that a client sends is decoded, and afterwards only small typed messages are: there is no
pickle. Every wait is limited, so a client that sends nothing occupies a thread for some seconds and no more.

Messages after the challenge:

    purpose      client                    listener
    all          CallRequest               Assignment, or Rejection
    link         LinkRequest               LinkAccepted, or Rejection; then both build their link over the connection
    register                               nothing: it stays open, so that the rank notices when rank 0 is gone
    lookup                                 Endpoint, or Rejection
    assignment                             nothing more

Connections are authenticated, but not encrypted: trusted networks only.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Literal, TypeVar, Union

import msgspec

from offbeat.core.run_identity import RunIdentity
from offbeat.errors import ConfigurationError, OffbeatError, RunFailed
from offbeat.transports.shared_memory import SlotTable
from offbeat.transports.wire import WIRE_VERSION

REPLY_SECONDS = 10.0
"""How long one side of a connection waits for the next message of the other."""

REQUEST_BYTES_MAX = 1 << 16
"""The longest message of a connection."""

CLIENTS_MAX = 64
"""Connections that a listener serves at a time."""

_NO_TOKEN = b"offbeat on this machine"

_log = logging.getLogger(__name__)

ControlStruct = TypeVar("ControlStruct", bound=msgspec.Struct)


class Unreachable(OffbeatError):
    """Nothing listens there, or the connection broke: retrying may help."""


class Rejected(OffbeatError):
    """The other side rejected the request; `final` if retrying would not help."""

    def __init__(self, why: str, final: bool = True) -> None:
        super().__init__(why)
        self.final = final


@dataclass(frozen=True)
class Address:
    """A host and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """From `HOST:PORT`, with an IPv6 host in brackets; raises ConfigurationError."""
        host, colon, port = text.strip().rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ConfigurationError(f"{text!r} is ambiguous as an address; type an IPv6 address as [HOST]:PORT")
        if not colon or not host:
            raise ConfigurationError(f"{text!r} is not an address; type HOST:PORT, such as 192.168.1.5:7700")
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ConfigurationError(f"{port!r} in {text!r} is not a port; type a number from 0 to 65535")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Assignment(msgspec.Struct, frozen=True, tag=True):
    """Rank 0's answer to a request: the rank of the client and the elapsed time. `experiment` is opaque here."""

    rank: int
    processes: int
    elapsed_seconds: float
    experiment: bytes | None


class Endpoint(msgspec.Struct, frozen=True, tag=True):
    """Where a rank listens. `name` distinguishes a listener from earlier ones of the same rank."""

    host: str
    port: int
    name: str


Program = Literal["training", "network test"]
"""What listens: a run, or a network test, which refuses workers."""


class CallRequest(msgspec.Struct, frozen=True, tag=True):
    """The first message of a client.

    `about` is the rank whose listener it looks up, `listener` the listener that it registers, `program` what it is to
    take part in.
    """

    purpose: Literal["link", "assignment", "register", "lookup"]
    rank: int | None
    member: str = ""
    about: int | None = None
    listener: Endpoint | None = None
    program: Program = "training"
    version: int = WIRE_VERSION


class LinkRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for a link with an incarnation of at least `incarnation_min`, and with `slot_table` for shared memory."""

    identity: RunIdentity
    incarnation_min: int
    chunk_bytes: int
    slot_table: SlotTable | None = None


class LinkAccepted(msgspec.Struct, frozen=True, tag=True):
    """Answer to a LinkRequest; `slot_table` if memory is shared."""

    incarnation: int
    slot_table: SlotTable | None = None


class StoreEntry(msgspec.Struct, frozen=True, tag=True):
    """An entry of the store through which the two ends of a link connect by gloo."""

    key: str
    value: bytes


class Rejection(msgspec.Struct, frozen=True, tag=True):
    """The request is rejected; `final` if retrying would not help."""

    why: str
    final: bool


_DECODERS: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(Union[kind, Rejection])  # noqa: UP007 (kind is a value)
    for kind in (CallRequest, Assignment, LinkRequest, LinkAccepted, Endpoint, StoreEntry, Rejection)
}
"""Made at import, before there are threads: two threads that make the first decoder of a Struct at the same time crash
the process."""


class ControlConnection:
    """A connection with limited waits, used by one thread; any other may call `disconnect`, which wakes that thread."""

    def __init__(self, connected: socket.socket, limit_seconds: float = REPLY_SECONDS) -> None:
        self._socket = connected
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._limit(limit_seconds)
        self.local_host: str = self._socket.getsockname()[0]
        self.same_host: bool = self._socket.getpeername()[0] == self.local_host
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._committed = False
        self._detached = False

    def _limit(self, seconds: float) -> None:
        """Zero means no limit. Set on the socket, since `Connection` has no timeout."""
        span = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)

    def authenticate(self, token: bytes | None, first: bool) -> None:
        """Both sides prove that they know the token; the listener challenges first."""
        key = token or _NO_TOKEN
        for challenge in (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge):
            try:
                challenge(self._connection, key)
            except (OSError, EOFError) as error:
                raise Unreachable(_reason(error)) from None
            except AssertionError:
                raise Unreachable("what answers there is not offbeat") from None

    def send(self, message: msgspec.Struct) -> None:
        """Raises Unreachable, or ConfigurationError if the message is too long."""
        raw = msgspec.msgpack.encode(message)
        if len(raw) > REQUEST_BYTES_MAX:
            raise ConfigurationError(
                f"{type(message).__name__} takes {len(raw)} bytes, but at most {REQUEST_BYTES_MAX} can be sent when a "
                "process joins; make the experiment's description shorter"
            )
        try:
            self._connection.send_bytes(raw)
        except OSError as error:
            raise Unreachable(_reason(error)) from None

    def recv(self, kind: type[ControlStruct]) -> ControlStruct:
        """The next message, which must be of this kind; raises Unreachable, and Rejected for a Rejection."""
        try:
            message = _DECODERS[kind].decode(self._connection.recv_bytes(REQUEST_BYTES_MAX))
        except (OSError, EOFError) as error:
            raise Unreachable(_reason(error)) from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise Unreachable(f"{kind.__name__} was expected, but something else was received: {error}") from None
        if isinstance(message, Rejection):
            raise Rejected(message.why, message.final)
        assert isinstance(message, kind)
        return message

    def keep_open(self) -> None:
        """Wait without a limit from now on; the kernel checks whether the other side is alive."""
        self._limit(0.0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def detach(self, limit_seconds: float) -> socket.socket:
        """The socket, for other uses; closing this object does not shut it down any more."""
        self._limit(limit_seconds)
        self._detached = True
        return self._socket.dup()

    def commit(self) -> None:
        """From now on `disconnect` does nothing: the other side would wait for a connection that never comes."""
        self._committed = True

    def disconnect(self) -> None:
        if not self._committed:
            self.shut_down()

    def shut_down(self) -> None:
        """Disconnect even if committed."""
        if self._detached:
            return
        with suppress(OSError):  # the other side closed it first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()
        self._connection.close()
        self._socket.close()

    def __enter__(self) -> ControlConnection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _reason(error: BaseException) -> str:
    if isinstance(error, BlockingIOError | TimeoutError):
        return "no answer in time"
    if isinstance(error, EOFError):
        return "the connection was closed"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


class Listener:
    """Accepts clients that know the token. Before `serve`, connections wait in the socket's backlog."""

    def __init__(self, address: Address, token: bytes | None, inherited: int | None = None) -> None:
        """`inherited` is the file descriptor of a socket that listens at the address already."""
        if token is not None and not token:
            raise ConfigurationError("the token is empty; put some random characters into the token file")
        self._token = token
        self._socket = listen(address, token) if inherited is None else _inherit(inherited, address, token)
        host, port = self._socket.getsockname()[:2]
        self.address = Address(host, port)
        self.name = os.urandom(8).hex()
        self._lock = threading.Lock()
        self._clients: dict[ControlConnection, bool] = {}
        """Open connections, the oldest first, and whether they are authenticated."""
        self._closed = threading.Event()
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._wakeup_receiver, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None

    def serve(self, handler: Callable[[ControlConnection], bool]) -> None:
        """Call `handler` with each authenticated connection, in a thread each; True keeps the connection open."""
        self._handler = handler
        self._thread = threading.Thread(target=self._run, name=f"offbeat listener {self.address}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._selector.select()
            if self._closed.is_set():
                return
            try:
                connected, _ = self._socket.accept()
            except OSError as error:  # the client is gone, or too many files are open, of which others may close some
                _log.debug("no connection could be accepted at %s: %s", self.address, error)
                self._closed.wait(0.1)
                continue
            try:
                self._accept(ControlConnection(connected))
            except (OSError, RuntimeError) as error:  # the client is gone, or the limit of threads is reached
                _log.debug("a connection at %s was closed: %s", self.address, error)
                connected.close()

    def _accept(self, connection: ControlConnection) -> None:
        with self._lock:
            if self._closed.is_set() or not self._has_room():
                connection.close()
                return
            self._clients[connection] = False
        try:
            threading.Thread(target=self._handle, args=(connection,), name="offbeat client", daemon=True).start()
        except RuntimeError:
            with self._lock:
                del self._clients[connection]
            connection.close()
            raise

    def _has_room(self) -> bool:
        """If not, the oldest connection that is not authenticated is ended."""
        if len(self._clients) < CLIENTS_MAX:
            return True
        for client, is_authenticated in self._clients.items():
            if not is_authenticated:
                client.disconnect()
                break
        return False

    def _handle(self, connection: ControlConnection) -> None:
        stays_open = False
        try:
            connection.authenticate(self._token, first=True)
            with self._lock:
                self._clients[connection] = True
            stays_open = self._handler(connection)
        except (AuthenticationError, Unreachable, Rejected) as error:
            _log.debug("a connection at %s ended: %s", self.address, error)
        except Exception:
            _log.exception("internal error, a connection at %s is closed", self.address)
        finally:
            with self._lock:
                del self._clients[connection]
            if not stays_open:
                connection.close()

    def close(self) -> None:
        """Stop listening, and end all connections that are being handled. Idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            for client in self._clients:
                client.disconnect()
        self._wakeup_sender.send(b"!")
        if self._thread is not None:
            self._thread.join()
        self._selector.close()
        for end in (self._socket, self._wakeup_receiver, self._wakeup_sender):
            end.close()


def _inherit(number: int, address: Address, token: bytes | None) -> socket.socket:
    """A socket that the parent process opened."""
    try:
        listener = socket.socket(fileno=number)
        host = listener.getsockname()[0]
    except OSError as error:
        raise ConfigurationError(
            f"the inherited socket {number} that listens at {address} cannot be used ({error.strerror}); "
            "start the run with 'offbeat launch' or 'offbeat train'"
        ) from None
    _require_token(host, token, address)
    listener.setblocking(False)
    return listener


def _require_token(host: str, token: bytes | None, address: Address) -> None:
    if token is None and not ipaddress.ip_address(host).is_loopback:
        raise ConfigurationError(
            f"listening on {address} lets other machines in, which needs a token; give one with --token-file FILE, or "
            "listen on 127.0.0.1"
        )


def listen(address: Address, token: bytes | None) -> socket.socket:
    """A listening socket; port 0 means any free one. Raises ConfigurationError; beyond loopback a token is needed."""
    listener = None
    try:
        family, kind, protocol, _, sockaddr = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        _require_token(str(sockaddr[0]), token, address)
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(sockaddr)
        listener.listen(128)
        listener.setblocking(False)  # a client that is gone before `accept` must not block the thread
    except OSError as error:
        if listener is not None:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {address.port} of {address.host} is taken; choose another, or 0 for any that is free"
            ) from None
        reason = (error.strerror or str(error)).lower()
        raise ConfigurationError(
            f"cannot listen on {address}: {reason}; type an address of this machine, such as 127.0.0.1:0"
        ) from None
    return listener


def connect(address: Address, token: bytes | None, limit_seconds: float = REPLY_SECONDS) -> ControlConnection:
    """An authenticated connection; raises Unreachable, and Rejected if the token is wrong."""
    try:
        connected = socket.create_connection((address.host, address.port), timeout=limit_seconds)
    except OSError as error:
        raise Unreachable(_reason(error)) from None
    connection: ControlConnection | None = None
    try:
        connection = ControlConnection(connected, limit_seconds)
        connection.authenticate(token, first=False)
    except BaseException as error:
        connected.close() if connection is None else connection.close()
        if isinstance(error, AuthenticationError):
            problem = "requires a token" if token is None else "does not accept the token"
            sentence = f"the process at {address} {problem}; give the one of the run with --token-file FILE"
            raise Rejected(sentence) from None
        if isinstance(error, OSError):
            raise Unreachable(_reason(error)) from None
        raise
    return connection


def backoff() -> Iterator[float]:
    """Seconds to wait before each further attempt."""
    seconds = 0.1
    while True:
        yield seconds
        seconds = min(2 * seconds, 2.0)


def request_assignment(
    address: Address,
    token: bytes | None,
    *,
    member: str,
    rank: int | None,
    wait_seconds: float,
    program: Program = "training",
) -> Assignment:
    """Ask rank 0 which rank this process is to be.

    Args:
        address: of rank 0's listener.
        token: secret of the run.
        member: name of this process, by which rank 0 recognises it.
        rank: the rank it wants; None for any.
        wait_seconds: how long to retry while rank 0 cannot be reached.
        program: what this process expects to join.

    Raises:
        RunFailed: rank 0 rejected the request, or could not be reached in time.
    """
    deadline = time.monotonic() + wait_seconds
    for pause in backoff():
        left = max(deadline - time.monotonic(), 0.1)
        try:
            with connect(address, token, min(left, REPLY_SECONDS)) as connection:
                connection.send(CallRequest("assignment", rank, member, program=program))
                return connection.recv(Assignment)
        except Rejected as error:
            reason = str(error)
            if error.final:
                raise RunFailed(reason) from None
        except Unreachable as error:
            reason = f"nothing answers at {address}: {error}; start the hub first, or check the address"
        if time.monotonic() + pause >= deadline:
            raise RunFailed(reason)
        time.sleep(pause)
    raise AssertionError("backoff never ends")
