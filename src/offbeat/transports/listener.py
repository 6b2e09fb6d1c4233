"""The listener of a rank: it serves clients that show the token of the run, and others cost it little.

One thread accepts connections and takes all of them through TLS and authentication, a step whenever a client has sent
something. So a client that sends nothing holds a socket and a few bytes, for HANDSHAKE_SECONDS at most, and no thread.

- There are at most PENDING_MAX connections that have not shown the token yet, and PENDING_PER_HOST_MAX from one
  address. When one more comes, another is closed in its place: one that has said nothing so far, the oldest first.
- A TLS handshake costs the listener a signature, and the client nothing. So TLS_PER_SECOND of them are begun per
  second, for one address after the other; those from which a client with the token has come before are first.
- Clients that do not show the token are counted, and mentioned in the log once a minute at most.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import selectors
import socket
import ssl
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress

from offbeat.errors import ConfigurationError
from offbeat.transports.address import Address
from offbeat.transports.authentication import NEEDS_TLS, REFUSED, NotAuthenticated, Steps, listener_steps, refusal_steps
from offbeat.transports.byte_stream import PlainStream, TlsStream
from offbeat.transports.rendezvous import REPLY_SECONDS, ControlConnection, Rejected, Unreachable
from offbeat.transports.tls import Credentials, ListenerTls

HANDSHAKE_SECONDS = 10.0
"""From the first packet of a client until it has shown the token."""

PENDING_MAX = 256
PENDING_PER_HOST_MAX = 128

TLS_PER_SECOND = 100.0
_TLS_BURST = 50.0

_ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before others are looked at."""

_DISCARDED_MAX = 1 << 16
"""Bytes that a refused client may still send before its connection is closed."""

_LOG_SECONDS = 60.0
_KNOWN_HOSTS_MAX = 4096
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_TLS_FIRST_BYTE = b"\x16"
_TLS_REFUSAL = bytes([0x15, 3, 3, 0, 2, 2, 40])
"""A fatal alert, handshake_failure, in the record format of all versions of TLS."""

_log = logging.getLogger(__name__)

Handler = Callable[[ControlConnection], bool]


class _PendingConnection:
    """A connection whose client has not shown the token yet."""

    def __init__(self, connected: socket.socket, host: str) -> None:
        self.connected = connected
        self.host = host
        self.deadline = time.monotonic() + HANDSHAKE_SECONDS
        self.has_spoken = False
        self.in_handshake = False
        """Whether the TLS handshake has begun and is not over."""
        self.refused: str | None = None
        """Why it was refused; what it still sends is discarded."""
        self.discarded = 0
        self.steps: Steps | None = None
        self._outgoing = b""
        self._wanted = 0
        self._received = b""

    def begin(self, steps: Steps) -> None:
        self.steps = steps
        self._take(next(steps))

    def _take(self, wanted: bytes | int) -> None:
        self._received = b""
        self._outgoing, self._wanted = (wanted, 0) if isinstance(wanted, bytes) else (b"", wanted)

    def advance(self) -> bool:
        """Send and receive what is possible now; True at the end. Raises what a non-blocking socket raises."""
        assert self.steps is not None
        while True:
            if self._outgoing:
                self._outgoing = self._outgoing[self.connected.send(self._outgoing) :]
            elif len(self._received) < self._wanted:
                more = self.connected.recv(self._wanted - len(self._received))
                if not more:
                    raise ConnectionResetError(0, "the connection was closed")
                self._received += more
            else:
                try:
                    self._take(self.steps.send(self._received))
                except StopIteration:
                    return True

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outgoing)


class _Host:
    """The pending connections of one address, the oldest first."""

    def __init__(self) -> None:
        self.silent: dict[_PendingConnection, None] = {}
        self.spoken: dict[_PendingConnection, None] = {}

    def __len__(self) -> int:
        return len(self.silent) + len(self.spoken)


class Listener:
    """Accepts clients that know the token. Before `serve`, connections wait in the socket's backlog."""

    def __init__(self, address: Address, credentials: Credentials, inherited: int | None = None) -> None:
        """`inherited` is the file descriptor of a socket that listens at the address already."""
        self._credentials = credentials
        self._socket = listen(address) if inherited is None else _inherit(inherited, address)
        host, port = self._socket.getsockname()[:2]
        self.address = Address(host, port)
        self.name = os.urandom(8).hex()
        self.accepted = self.turned_away = 0
        """Connections so far, and those of them that never showed the token."""
        self.processor_seconds = 0.0
        """Processor time of the thread that accepts connections."""
        self._tls: ListenerTls | None = None
        if credentials.tls.mode == "on" or not ipaddress.ip_address(host).is_loopback:
            self._tls = credentials.tls.listener_side() if credentials.tls.mode != "off" else None
        self._pending: dict[_PendingConnection, None] = {}
        """The oldest first; used by the listener's thread alone, as are the next four."""
        self._hosts: dict[str, _Host] = {}
        self._tls_queue: OrderedDict[str, deque[_PendingConnection]] = OrderedDict()
        self._tls_allowance, self._tls_counted_at = _TLS_BURST, time.monotonic()
        self._known_hosts: OrderedDict[str, None] = OrderedDict()
        self._logged_at = -_LOG_SECONDS
        self._unlogged = 0
        self._lock = threading.Lock()
        self._clients: set[ControlConnection] = set()
        """Connections with the token that are being handled."""
        self._closed = threading.Event()
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._wakeup_receiver, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None

    def serve(self, handler: Handler) -> None:
        """Call `handler` with each authenticated connection, in a thread each; True keeps the connection open."""
        self._handler = handler
        self._thread = threading.Thread(target=self._run, name=f"offbeat listener {self.address}", daemon=True)
        self._thread.start()

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

    # The listener's thread

    def _run(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._socket:
                    for _ in range(_ACCEPTED_AT_ONCE):
                        if not self._accept():
                            break
                elif key.data is not None and key.data in self._pending:
                    self._advance(key.data)
            self._expire()
            self._begin_handshakes()
            self.processor_seconds = time.thread_time()
        for pending in list(self._pending):
            self._turn_away(pending)

    def _patience(self) -> float | None:
        """Seconds until something has to be done without any packet."""
        now = time.monotonic()
        oldest = next(iter(self._pending), None)
        if oldest is None:
            return None
        wait = oldest.deadline - now
        if self._tls_queue:
            wait = min(wait, (1.0 - self._tls_allowance) / TLS_PER_SECOND)
        return max(0.0, wait)

    def _accept(self) -> bool:
        """Accept one connection; whether there may be another."""
        try:
            connected, sockaddr = self._socket.accept()
        except BlockingIOError:
            return False
        except OSError as error:  # the client is gone, or too many files are open, of which others may close some
            _log.debug("no connection could be accepted at %s: %s", self.address, error)
            if error.errno in _NO_RESOURCES and not self._make_room(None):
                self._closed.wait(0.1)
            return False
        self.accepted += 1
        name = str(sockaddr[0])
        host = self._hosts.get(name)
        if host is not None and len(host) >= PENDING_PER_HOST_MAX:
            self._make_room(host)
        elif len(self._pending) >= PENDING_MAX:
            self._make_room(max(self._hosts.values(), key=len))
        connected.setblocking(False)
        pending = _PendingConnection(connected, name)
        self._pending[pending] = None
        self._hosts.setdefault(name, _Host()).silent[pending] = None
        self._selector.register(connected, selectors.EVENT_READ, pending)
        return True

    def _make_room(self, host: _Host | None) -> bool:
        """Close one of this address, or of that with the most: the oldest silent one, or else the oldest."""
        if host is None:
            host = max(self._hosts.values(), key=len, default=None)
        if host is None:
            return False
        self._turn_away(next(iter(host.silent or host.spoken)), "too many connections")
        return True

    def _expire(self) -> None:
        now = time.monotonic()
        while self._pending and (first := next(iter(self._pending))).deadline <= now:
            self._turn_away(first, f"it did not show the token within {HANDSHAKE_SECONDS:g} seconds")

    def _advance(self, pending: _PendingConnection) -> None:
        try:
            if pending.refused is not None:
                self._discard(pending)
                return
            if not pending.has_spoken and not self._begin(pending):
                return
            if pending.in_handshake:
                assert isinstance(pending.connected, ssl.SSLSocket)
                pending.connected.do_handshake()
                pending.in_handshake = False
                assert self._tls is not None
                pending.begin(listener_steps(self._credentials.token, self._tls.binding))
            if pending.advance():
                self._admit(pending)
        except ssl.SSLWantReadError:
            self._await(pending, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._await(pending, selectors.EVENT_WRITE)
        except BlockingIOError:
            self._await(pending, selectors.EVENT_WRITE if pending.wants_to_write else selectors.EVENT_READ)
        except NotAuthenticated as error:
            end = self._turn_away if error.status is None else self._refuse
            end(pending, str(error))
        except ssl.SSLError as error:  # OpenSSL has told the client
            self._refuse(pending, f"TLS failed ({error.reason})")
        except OSError as error:
            self._turn_away(pending, error.strerror or "the connection was closed")

    def _refuse(self, pending: _PendingConnection, why: str) -> None:
        """Turn away a client that was told so, when it has closed the connection too.

        Closing a connection on which something is unread, or arrives later, destroys the answer.
        """
        pending.refused = why
        try:
            socket.socket.shutdown(pending.connected, socket.SHUT_WR)
            self._await(pending, selectors.EVENT_READ)
        except OSError:
            self._turn_away(pending, why)

    def _discard(self, pending: _PendingConnection) -> None:
        received = socket.socket.recv(pending.connected, 1 << 12)  # of the socket, not of TLS
        pending.discarded += len(received)
        if not received or pending.discarded > _DISCARDED_MAX:
            self._turn_away(pending, pending.refused or "")

    def _await(self, pending: _PendingConnection, events: int) -> None:
        self._selector.modify(pending.connected, events, pending)

    def _begin(self, pending: _PendingConnection) -> bool:
        """The first byte has arrived, which tells whether the client speaks TLS; False if it has to wait."""
        first = pending.connected.recv(1, socket.MSG_PEEK)
        if not first:
            raise ConnectionResetError(0, "")
        pending.has_spoken = True
        host = self._hosts[pending.host]
        del host.silent[pending]
        host.spoken[pending] = None
        if first == _TLS_FIRST_BYTE:
            if self._credentials.tls.mode == "off":
                pending.connected.send(_TLS_REFUSAL)
                raise NotAuthenticated("it speaks TLS, which is off here", REFUSED)
            self._selector.unregister(pending.connected)
            self._tls_queue.setdefault(pending.host, deque()).append(pending)
            return False
        needs_tls = self._credentials.tls.covers(pending.host)
        refusal = refusal_steps(NEEDS_TLS, "it does not speak TLS")
        pending.begin(refusal if needs_tls else listener_steps(self._credentials.token))
        return True

    def _begin_handshakes(self) -> None:
        """Begin as many TLS handshakes as are allowed by now."""
        now = time.monotonic()
        allowance = self._tls_allowance + (now - self._tls_counted_at) * TLS_PER_SECOND
        self._tls_allowance, self._tls_counted_at = min(allowance, _TLS_BURST), now
        while self._tls_queue and self._tls_allowance >= 1.0:
            host = next((one for one in self._tls_queue if one in self._known_hosts), next(iter(self._tls_queue)))
            queue = self._tls_queue.pop(host)
            pending = queue.popleft()
            if queue:
                self._tls_queue[host] = queue  # at the end
            if pending in self._pending:
                self._tls_allowance -= 1.0
                self._begin_handshake(pending)

    def _begin_handshake(self, pending: _PendingConnection) -> None:
        try:
            self._tls = self._tls or self._credentials.tls.listener_side()
            pending.connected = self._tls.context.wrap_socket(
                pending.connected, server_side=True, do_handshake_on_connect=False
            )
        except (OSError, ConfigurationError) as error:  # the client is gone, or the user's certificate is
            self._turn_away(pending, str(error))
            return
        pending.in_handshake = True
        self._selector.register(pending.connected, selectors.EVENT_READ, pending)
        self._advance(pending)

    def _forget(self, pending: _PendingConnection) -> None:
        del self._pending[pending]
        host = self._hosts[pending.host]
        del (host.spoken if pending.has_spoken else host.silent)[pending]
        if not len(host):
            del self._hosts[pending.host]
        with suppress(KeyError, ValueError):  # one that waits for its handshake is not registered
            self._selector.unregister(pending.connected)

    def _turn_away(self, pending: _PendingConnection, why: str = "") -> None:
        self._forget(pending)
        self.turned_away += 1
        with suppress(OSError):
            pending.connected.close()
        if pending.has_spoken and why:
            self._log_turned_away(pending.host, why)

    def _log_turned_away(self, host: str, why: str) -> None:
        self._unlogged += 1
        now = time.monotonic()
        if now - self._logged_at >= _LOG_SECONDS:
            count = "a connection" if self._unlogged == 1 else f"{self._unlogged} connections"
            _log.warning(
                "offbeat: %s at %s did not show the token, the last one from %s: %s", count, self.address, host, why
            )
            self._logged_at, self._unlogged = now, 0

    def _admit(self, pending: _PendingConnection) -> None:
        self._forget(pending)
        self._known_hosts[pending.host] = None
        while len(self._known_hosts) > _KNOWN_HOSTS_MAX:
            self._known_hosts.popitem(last=False)
        kind = TlsStream if isinstance(pending.connected, ssl.SSLSocket) else PlainStream
        try:
            connection = ControlConnection(kind(pending.connected, REPLY_SECONDS))  # type: ignore[arg-type]
        except OSError:  # the client is gone
            pending.connected.close()
            return
        with self._lock:
            if self._closed.is_set():
                connection.close()
                return
            self._clients.add(connection)
        try:
            threading.Thread(target=self._handle, args=(connection,), name="offbeat client", daemon=True).start()
        except RuntimeError as error:  # the limit of threads is reached
            _log.warning("offbeat: a connection at %s was closed: %s", self.address, error)
            self._end(connection)

    # A thread for each client that has shown the token

    def _handle(self, connection: ControlConnection) -> None:
        stays_open = False
        try:
            stays_open = self._handler(connection)
        except (Unreachable, Rejected) as error:
            _log.debug("a connection at %s ended: %s", self.address, error)
        except Exception:
            _log.exception("internal error, a connection at %s is closed", self.address)
        finally:
            self._end(connection, stays_open)

    def _end(self, connection: ControlConnection, stays_open: bool = False) -> None:
        with self._lock:
            self._clients.discard(connection)
        if not stays_open:
            connection.close()


def _inherit(number: int, address: Address) -> socket.socket:
    """A socket that the parent process opened."""
    try:
        listener = socket.socket(fileno=number)
        listener.getsockname()
    except OSError as error:
        raise ConfigurationError(
            f"the inherited socket {number} that listens at {address} cannot be used ({error.strerror}); "
            "start the run with 'offbeat launch' or 'offbeat train'"
        ) from None
    listener.setblocking(False)
    return listener


def listen(address: Address) -> socket.socket:
    """A listening socket; port 0 means any free one. Raises ConfigurationError."""
    listener = None
    try:
        family, kind, protocol, _, sockaddr = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(sockaddr)
        listener.listen(1024)
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
