"""Byte streams over one TCP connection, plain or TLS: what links and control messages are sent over.

One thread may write while another reads. OpenSSL forbids that for one connection, so a TLS stream never blocks inside
OpenSSL: each call is made under a lock, and the waiting is done outside it.

A read or a write fails when nothing has moved for `limit_seconds`. If this process itself was stopped meanwhile, what
has arrived was not looked at yet, and the count starts anew.
"""

from __future__ import annotations

import itertools
import select
import socket
import ssl
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from offbeat.core.events import LossReason
from offbeat.failpoints import failpoint
from offbeat.transports.link import ConnectionLost

_PARTS_MAX = 1024
"""Parts of one system call: Linux accepts no more."""

_RECORD_BYTES = 256 << 10
"""Bytes that are encrypted under the lock at a time, which the reading thread may have to wait for."""

_JOINED_BYTES_MAX = 16 << 10
"""Smaller parts are joined before they are encrypted: a TLS record has up to 16 KiB and a cost of its own."""

_BATCH_BYTES = 1 << 20
"""Of a large tensor so many bytes arrive before the reading thread is woken. Without that it is woken for every few
segments, which costs a tenth of the time on loopback."""

_SLICES = 4
"""A wait is cut into so many, so that a process that stood still itself can tell."""


class ByteStream(ABC):
    """An open connection. `connected` is owned by the stream, which closes it."""

    def __init__(self, connected: socket.socket, limit_seconds: float) -> None:
        self._socket = connected
        with suppress(OSError):  # not a TCP socket, or the other side is gone, which the next read reports
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._drops_writes = False
        self.set_limit(limit_seconds)

    def set_limit(self, seconds: float | None) -> None:
        """Fail when nothing has moved for so long; None: wait for ever."""
        self.limit_seconds = seconds

    @abstractmethod
    def write(self, parts: Iterable[memoryview]) -> None:
        """Return when all parts are sent; ConnectionLost if that fails or nothing moves for too long."""

    @abstractmethod
    def write_now(self, parts: list[memoryview]) -> list[memoryview] | None:
        """Send what can be sent without waiting. Returns the rest, which must be written next, or None if nothing was
        sent and nothing has to be."""

    def read(self, into: memoryview) -> None:
        """Return when all of the memory is filled; ConnectionLost if that fails or nothing moves for too long."""
        while into:
            into = into[self._receive(into, socket.MSG_WAITALL) :]

    def read_some(self, into: memoryview) -> int:
        """As `read`, but return as soon as there is anything; how much it is."""
        return self._receive(into, 0)

    @abstractmethod
    def _receive(self, into: memoryview, flags: int) -> int:
        """Wait for at least a byte, and return how many were received."""

    def watch_other_machine(self, seconds: float) -> None:
        """Let the kernel ask whether an idle other end is there; it has about so many seconds to answer."""
        options = {"TCP_KEEPIDLE": seconds / 2, "TCP_KEEPINTVL": seconds / 8, "TCP_KEEPCNT": 4}
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(1, round(value)))

    def _is_dropped(self) -> bool:
        """Whether a test has the next write thrown away."""
        fault = failpoint("link.send")
        if fault == "cut":
            self.break_off()
        self._drops_writes = self._drops_writes or fault == "drop"
        return self._drops_writes

    def break_off(self) -> None:
        """Make all reads and writes fail now, at both ends. From any thread, any number of times."""
        with suppress(OSError):  # the other side closed it first, or it is closed already
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # that of SSLSocket would go on unencrypted

    def close(self) -> None:
        """Release the connection. No thread may be reading or writing any more."""
        self._socket.close()

    @property
    def local_host(self) -> str:
        return str(self._socket.getsockname()[0])

    @property
    def peer_host(self) -> str:
        return str(self._socket.getpeername()[0])


class PlainStream(ByteStream):
    """Unencrypted. Waits in the kernel, so that a large tensor is one call."""

    def __init__(self, connected: socket.socket, limit_seconds: float) -> None:
        connected.setblocking(True)
        super().__init__(connected, limit_seconds)

    def set_limit(self, seconds: float | None) -> None:
        super().set_limit(seconds)
        wait = 0.0 if seconds is None else max(seconds / _SLICES, 1e-3)  # 0 is no limit
        packed = struct.pack("ll", int(wait), int(wait % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)

    def write(self, parts: Iterable[memoryview]) -> None:
        if self._is_dropped():
            return
        silence = _Silence(self.limit_seconds)
        with _losses():
            remaining = iter(parts)
            while group := list(itertools.islice(remaining, _PARTS_MAX)):
                while group:
                    try:
                        group = rest_of(group, self._socket.sendmsg(group))
                        silence.restart()
                    except BlockingIOError:
                        silence.count()

    def read(self, into: memoryview) -> None:
        if len(into) >= 4 * _BATCH_BYTES:
            last = len(into) - _BATCH_BYTES  # what is awaited must not be more than what still comes
            self._wake_after(_BATCH_BYTES)
            super().read(into[:last])
            self._wake_after(1)
            into = into[last:]
        super().read(into)

    def _wake_after(self, nbytes: int) -> None:
        with _losses():
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def write_now(self, parts: list[memoryview]) -> list[memoryview] | None:
        if self._is_dropped():
            return []
        with _losses():
            try:
                return rest_of(parts, self._socket.sendmsg(parts[:_PARTS_MAX], [], socket.MSG_DONTWAIT))
            except BlockingIOError:
                return None

    def _receive(self, into: memoryview, flags: int) -> int:
        silence = _Silence(self.limit_seconds)
        with _losses():
            while True:
                try:
                    count = self._socket.recv_into(into, len(into), flags)
                except BlockingIOError:
                    silence.count()
                    continue
                if not count:
                    raise broken()
                return count


class TlsStream(ByteStream):
    """Encrypted. `connected` has completed its handshake."""

    _socket: ssl.SSLSocket

    def __init__(self, connected: ssl.SSLSocket, limit_seconds: float) -> None:
        connected.setblocking(False)
        super().__init__(connected, limit_seconds)
        self._lock = threading.Lock()

    def write(self, parts: Iterable[memoryview]) -> None:
        if self._is_dropped():
            return
        silence = _Silence(self.limit_seconds)
        with _losses():
            for record in _records(parts):
                # OpenSSL wants the same bytes again, if it could send only some of them.
                while (events := self._write(record)) is not None:
                    self._wait(events, silence)
                silence.restart()

    def write_now(self, parts: list[memoryview]) -> list[memoryview] | None:
        if self._is_dropped():
            return []
        with _losses():
            if not _poll(self._socket, select.POLLOUT, 0.0):
                return None
            records = list(_records(parts))
            for index, record in enumerate(records):
                if self._write(record) is not None:
                    return records[index:]
            return []

    def _receive(self, into: memoryview, flags: int) -> int:
        silence = _Silence(self.limit_seconds)
        with _losses():
            while True:
                try:
                    with self._lock:
                        count = self._socket.recv_into(into)
                except ssl.SSLWantReadError:
                    self._wait(select.POLLIN, silence)
                except ssl.SSLWantWriteError:
                    self._wait(select.POLLOUT, silence)
                else:
                    if not count:
                        raise broken()
                    return count

    def _write(self, record: memoryview) -> int | None:
        """Write it whole, or return what to wait for."""
        try:
            with self._lock:
                self._socket.send(record)
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except ssl.SSLWantReadError:
            return select.POLLIN
        return None

    def _wait(self, events: int, silence: _Silence) -> None:
        """Wait until the socket is ready, for a slice of the limit."""
        if _poll(self._socket, events, silence.slice_seconds):
            silence.restart()
        else:
            silence.count()


class _Silence:
    """How long nothing has moved, in slices of the limit."""

    def __init__(self, limit_seconds: float | None) -> None:
        self._limit = limit_seconds
        self.slice_seconds = None if limit_seconds is None else limit_seconds / _SLICES
        self.restart()

    def restart(self) -> None:
        self._slices = 0
        self._since = time.monotonic()

    def count(self) -> None:
        """A slice has passed in vain; ConnectionLost after the last. One that took twice as long counts for nothing:
        this process stood still itself."""
        assert self._limit is not None
        assert self.slice_seconds is not None
        now = time.monotonic()
        if now - self._since > 2 * self.slice_seconds + 0.1:
            self._slices = 0
        else:
            self._slices += 1
        self._since = now
        if self._slices >= _SLICES:
            raise ConnectionLost(LossReason.SILENT, f"silent for {self._limit:g} seconds")


def broken(detail: str = "the connection was closed") -> ConnectionLost:
    return ConnectionLost(LossReason.BROKEN, detail)


@contextmanager
def _losses() -> Iterator[None]:
    """Errors of sockets and of OpenSSL as ConnectionLost."""
    try:
        yield
    except ConnectionLost:
        raise
    except ssl.SSLError as error:
        if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            raise broken() from None
        raise ConnectionLost(LossReason.INVALID, f"the encrypted data is damaged ({error.reason})") from None
    except (OSError, ValueError):  # ValueError: it was closed meanwhile
        raise broken() from None


def rest_of(parts: list[memoryview], sent: int) -> list[memoryview]:
    """What remains of the parts after `sent` bytes."""
    rest = []
    for part in parts:
        if sent < len(part):
            rest.append(part[sent:])
        sent = max(0, sent - len(part))
    return rest


def first_of(parts: list[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` bytes of the parts."""
    first = []
    for part in parts:
        if nbytes > 0:
            first.append(part[:nbytes])
        nbytes -= len(part)
    return first


def _records(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes in pieces to encrypt: small parts joined, large ones cut."""
    small: list[memoryview] = []
    joined = 0
    for part in parts:
        if joined + len(part) <= _JOINED_BYTES_MAX:
            small.append(part)
            joined += len(part)
            continue
        if joined:
            yield memoryview(b"".join(small))
        small, joined = [], 0
        for first in range(0, len(part), _RECORD_BYTES):
            yield part[first : first + _RECORD_BYTES]
    if joined:
        yield memoryview(b"".join(small))


def _poll(one: socket.socket, events: int, seconds: float | None) -> bool:
    poller = select.poll()
    poller.register(one, events)
    return bool(poller.poll(None if seconds is None else seconds * 1e3))
