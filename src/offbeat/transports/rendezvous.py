"""Where processes find each other: a door that only those who hold the token get through, and what is said there.

A call is a plain TCP connection on which both sides first prove that they know the token, by an HMAC challenge. Until
then nothing that a visitor sends is decoded, and afterwards only small typed messages are: there is no pickle. Every
wait has a limit, so a visitor that says nothing costs a thread for some seconds and no more.

What is said, after the challenge:

    every call   dialer: Hello             listener: Terms, or Refusal
    link         dialer: Ready             listener: Accepted, or Refusal; then both build their link over the call
    register     the call stays open, so that a rank notices that the desk is gone and registers again
    ask                                    listener: Found, or Refusal
    terms        nothing more

Calls are authenticated, but not encrypted: trusted networks only.
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

from offbeat.errors import ConfigurationError, OffbeatError, RunFailed
from offbeat.transports.shared_memory import SlotTable
from offbeat.transports.wire import WIRE_VERSION

CALL_SECONDS = 10.0
"""How long one side of a call waits for the other to say the next thing."""

WORDS_BYTES_MAX = 1 << 16
"""The longest message of a call."""

VISITORS_MAX = 64
"""How many may stand at a door at a time."""

_NO_TOKEN = b"offbeat on this machine"

_log = logging.getLogger(__name__)

Words = TypeVar("Words", bound=msgspec.Struct)


class Unreachable(OffbeatError):
    """Nobody is there, or the call broke off: trying again may help."""


class Rejected(OffbeatError):
    """The other side will not have us; `final` when trying again would not help."""

    def __init__(self, why: str, final: bool = True) -> None:
        super().__init__(why)
        self.final = final


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """From `HOST:PORT`; an IPv6 address stands in brackets."""
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
        """Whether only this machine can be meant."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Assignment(msgspec.Struct, frozen=True, tag=True):
    """What rank 0 tells a process that comes: who it is, and when it is. `experiment` is opaque here."""

    rank: int
    processes: int
    elapsed_seconds: float
    experiment: bytes | None


class Endpoint(msgspec.Struct, frozen=True, tag=True):
    """Where a rank can be dialled. `name` tells a door from an earlier one of the same rank."""

    host: str
    port: int
    name: str


class CallRequest(msgspec.Struct, frozen=True, tag=True):
    """The dialer's first words. `about` is the rank that is asked for, `listener` the one that is registered."""

    purpose: Literal["link", "assignment", "register", "lookup"]
    rank: int | None
    member: str = ""
    about: int | None = None
    listener: Endpoint | None = None
    version: int = WIRE_VERSION


class LinkRequest(msgspec.Struct, frozen=True, tag=True):
    """The dialer would have a link, under an incarnation that is not below `incarnation_min`.

    With `slot_table` it would share memory, too.
    """

    fingerprint: str
    incarnation_min: int
    chunk_bytes: int
    slot_table: SlotTable | None = None


class LinkAccepted(msgspec.Struct, frozen=True, tag=True):
    incarnation: int
    slot_table: SlotTable | None = None


class StoreEntry(msgspec.Struct, frozen=True, tag=True):
    """What the two ends of a link have to know of each other to connect."""

    key: str
    value: bytes


class Rejection(msgspec.Struct, frozen=True, tag=True):
    why: str
    final: bool


_DECODERS: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(Union[kind, Rejection])  # noqa: UP007 (kind is a value)
    for kind in (CallRequest, Assignment, LinkRequest, LinkAccepted, Endpoint, StoreEntry, Rejection)
}
"""Made here, before there are threads: while one thread makes the first decoder of a Struct, another one that does the
same gets a half-made one, and the process dies of it."""


class Call:
    """A connection on which both sides have a limited time to say the next thing.

    One thread speaks and listens; any other may `hang_up`, which wakes it.
    """

    def __init__(self, connected: socket.socket, limit_seconds: float = CALL_SECONDS) -> None:
        self._socket = connected
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._limit(limit_seconds)
        self.local_host: str = self._socket.getsockname()[0]
        self.same_host: bool = self._socket.getpeername()[0] == self.local_host
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._committed = False
        self._handed_over = False

    def _limit(self, seconds: float) -> None:
        """Zero means no limit. Set on the socket, since `Connection` has no notion of time."""
        span = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)

    def authenticate(self, token: bytes | None, first: bool) -> None:
        """Both sides show that they know the token; the listener asks first."""
        key = token or _NO_TOKEN
        for challenge in (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge):
            try:
                challenge(self._connection, key)
            except (OSError, EOFError) as error:
                raise Unreachable(_reason(error)) from None
            except AssertionError:
                raise Unreachable("what answers there is not offbeat") from None

    def send(self, words: msgspec.Struct) -> None:
        raw = msgspec.msgpack.encode(words)
        if len(raw) > WORDS_BYTES_MAX:
            raise ConfigurationError(
                f"{type(words).__name__} takes {len(raw)} bytes, but at most {WORDS_BYTES_MAX} can be said when a "
                "process joins; make the experiment's description shorter"
            )
        try:
            self._connection.send_bytes(raw)
        except OSError as error:
            raise Unreachable(_reason(error)) from None

    def recv(self, kind: type[Words]) -> Words:
        """The next words, which must be of this kind; a refusal is raised as `Rejected`."""
        try:
            words = _DECODERS[kind].decode(self._connection.recv_bytes(WORDS_BYTES_MAX))
        except (OSError, EOFError) as error:
            raise Unreachable(_reason(error)) from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise Unreachable(f"something else than {kind.__name__} came: {error}") from None
        if isinstance(words, Rejection):
            raise Rejected(words.why, words.final)
        assert isinstance(words, kind)
        return words

    def keep(self) -> None:
        """Stay on the line without a limit; the kernel looks whether the other side is still there."""
        self._limit(0.0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def hand_over(self, limit_seconds: float) -> socket.socket:
        """The connection itself, for whoever goes on with it; the call is over, and closing it closes nothing more."""
        self._limit(limit_seconds)
        self._handed_over = True
        return self._socket.dup()

    def commit(self) -> None:
        """Go through with it: who hangs up now leaves the other side waiting for a connection that never comes."""
        self._committed = True

    def hang_up(self) -> None:
        if not self._committed:
            self.cut()

    def cut(self) -> None:
        """Break it off, even if the other side then waits for a connection in vain."""
        if self._handed_over:
            return
        with suppress(OSError):  # the other side was quicker
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._connection.close()
        self._socket.close()

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _reason(error: BaseException) -> str:
    if isinstance(error, BlockingIOError | TimeoutError):
        return "no answer in time"
    if isinstance(error, EOFError):
        return "the call was ended"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


class Listener:
    """Listens, and lets those in who hold the token. Nobody is let in before `serve`, but they may already wait."""

    def __init__(self, address: Address, token: bytes | None, inherited: int | None = None) -> None:
        """`inherited` is the number of a socket that listens at the address already."""
        if token is not None and not token:
            raise ConfigurationError("the token is empty; put some random characters into the token file")
        self._token = token
        self._listener = listen(address, token) if inherited is None else _inherit(inherited, address, token)
        host, port = self._listener.getsockname()[:2]
        self.address = Address(host, port)
        self.name = os.urandom(8).hex()
        self._lock = threading.Lock()
        self._visitors: dict[Call, bool] = {}
        """Who is there, the oldest first, and whether they have shown that they know the token."""
        self._closed = threading.Event()
        self._bell, self._button = socket.socketpair()
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(self._listener, selectors.EVENT_READ)
        self._waiting.register(self._bell, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None

    def serve(self, visit: Callable[[Call], bool]) -> None:
        """Have `visit` called with everybody who comes, in a thread each; the call ends unless it returns True."""
        self._visit = visit
        self._thread = threading.Thread(target=self._accept, name=f"offbeat door {self.address}", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            self._waiting.select()
            if self._closed.is_set():
                return
            try:
                connected, _ = self._listener.accept()
            except OSError as error:  # the visitor has gone again, or there are too many files: others may close some
                _log.debug("nobody could be let in at %s: %s", self.address, error)
                self._closed.wait(0.1)
                continue
            try:
                self._let_in(Call(connected))
            except (OSError, RuntimeError) as error:  # it has gone, or there can be no more threads
                _log.debug("a visitor at %s was turned away: %s", self.address, error)
                connected.close()

    def _let_in(self, call: Call) -> None:
        with self._lock:
            if self._closed.is_set() or not self._has_room():
                call.close()
                return
            self._visitors[call] = False
        try:
            threading.Thread(target=self._receive, args=(call,), name="offbeat visitor", daemon=True).start()
        except RuntimeError:
            with self._lock:
                del self._visitors[call]
            call.close()
            raise

    def _has_room(self) -> bool:
        """Where there are too many, the one who has stood there longest without the token has to go."""
        if len(self._visitors) < VISITORS_MAX:
            return True
        for visitor, proven in self._visitors.items():
            if not proven:
                visitor.hang_up()
                break
        return False

    def _receive(self, call: Call) -> None:
        stays = False
        try:
            call.authenticate(self._token, first=True)
            with self._lock:
                self._visitors[call] = True
            stays = self._visit(call)
        except (AuthenticationError, Unreachable, Rejected) as error:
            _log.debug("a visitor at %s went away: %s", self.address, error)
        except Exception:
            _log.exception("a visitor at %s met a mistake of ours", self.address)
        finally:
            with self._lock:
                del self._visitors[call]
            if not stays:
                call.close()

    def close(self) -> None:
        """Let nobody in any more, and end the calls with those who are there. A second call is nothing."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            for visitor in self._visitors:
                visitor.hang_up()
        self._button.send(b"!")
        if self._thread is not None:
            self._thread.join()
        self._waiting.close()
        for end in (self._listener, self._bell, self._button):
            end.close()


def _inherit(number: int, address: Address, token: bytes | None) -> socket.socket:
    """A socket that who started us has opened."""
    try:
        listener = socket.socket(fileno=number)
        host = listener.getsockname()[0]
    except OSError as error:
        raise ConfigurationError(
            f"the socket {number} that was to listen at {address} is not there ({error.strerror}); "
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
    """A socket that listens, at a port that is free where none is named. Beyond this machine it needs a token."""
    listener = None
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        _require_token(str(place[0]), token, address)
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(128)
        listener.setblocking(False)  # a visitor who is gone before `accept` must not stop the others
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


def dial(address: Address, token: bytes | None, limit_seconds: float = CALL_SECONDS) -> Call:
    """A call on which both sides know of each other that they hold the token."""
    try:
        connected = socket.create_connection((address.host, address.port), timeout=limit_seconds)
    except OSError as error:
        raise Unreachable(_reason(error)) from None
    call: Call | None = None
    try:
        call = Call(connected, limit_seconds)
        call.authenticate(token, first=False)
    except BaseException as error:
        connected.close() if call is None else call.close()
        if isinstance(error, AuthenticationError):
            raise Rejected(_token_sentence(address, token)) from None
        if isinstance(error, OSError):
            raise Unreachable(_reason(error)) from None
        raise
    return call


def _token_sentence(address: Address, token: bytes | None) -> str:
    if token is None:
        return f"the process at {address} wants a token; give the one of the run with --token-file FILE"
    return f"the process at {address} does not accept the token; give the one of the run with --token-file FILE"


def back_off() -> Iterator[float]:
    """How long to wait before each further try."""
    seconds = 0.1
    while True:
        yield seconds
        seconds = min(2 * seconds, 2.0)


def request_assignment(
    address: Address, token: bytes | None, *, member: str, rank: int | None, wait_seconds: float
) -> Assignment:
    """Ask rank 0 who we are to be. Tries until `wait_seconds` have passed; then RunFailed says what was in the way."""
    until = time.monotonic() + wait_seconds
    for pause in back_off():
        left = max(until - time.monotonic(), 0.1)
        try:
            with dial(address, token, min(left, CALL_SECONDS)) as call:
                call.send(CallRequest("assignment", rank, member))
                return call.recv(Assignment)
        except Rejected as error:
            reason = str(error)
            if error.final:
                raise RunFailed(reason) from None
        except Unreachable as error:
            reason = f"nothing answers at {address}: {error}; start the hub first, or check the address"
        if time.monotonic() + pause >= until:
            raise RunFailed(reason)
        time.sleep(pause)
    raise AssertionError("back_off never ends")
