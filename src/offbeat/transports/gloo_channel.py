"""A channel of two ends: gloo for large tensors, and the control connection that established it for the rest.

Properties of gloo and their consequences
- A wait that times out breaks the connection. That is wanted for a silent peer, and it is the only way to wake another
  thread that waits: `break_off` lets a receive that is never matched time out.
- A message that is larger than the memory it is received into ends the process. So both ends must agree on each size:
  it follows from what came before, and data that cannot be decoded ends the link before anything else is received.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.events import LossReason
from offbeat.transports.channel_link import Channel
from offbeat.transports.link import ConnectionLost
from offbeat.transports.rendezvous import ControlConnection, StoreEntry

CONNECT_SECONDS = 5.0
"""How long the two ends of a link wait for gloo's connection, once both have agreed to it."""

BULK_BYTES = 1 << 20
"""From this size on a piece goes through gloo."""

_DATA, _UNMATCHED = 0, 1
"""Tags: all data is sent under the first, and nothing ever under the second."""

_POSTED_AHEAD = 1
"""Pieces of a message that are posted while an earlier one is still in transit."""


class PairStore(dist.Store):  # type: ignore[name-defined, misc]
    """The store through which gloo learns the address of the other end, over the control connection."""

    def __init__(self, connection: ControlConnection) -> None:
        super().__init__()
        self._connection = connection
        self._entries: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._entries[key] = raw
        self._connection.send(StoreEntry(key, raw))

    def get(self, key: str) -> bytes:
        while key not in self._entries:
            entry = self._connection.recv(StoreEntry)
            self._entries[entry.key] = entry.value
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class GlooChannel(Channel):
    """A process group of two, and the socket of the control connection.

    A gloo operation costs several packets and as many thread switches, whatever its size; a piece of less than
    BULK_BYTES is cheaper on a plain socket. Both ends know the size of each piece, and so which way it takes.
    """

    def __init__(self, connection: ControlConnection, index: int, silence_seconds: float) -> None:
        """`index` is 0 at the listener and 1 at the client."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=CONNECT_SECONDS)
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=connection.local_host, lazy_init=False)]
        store = PairStore(connection)
        self._group: Any = dist.ProcessGroupGloo(store, index, 2, options)
        store.set(f"connected {index}", b"")  # an end that broke off before the other connects would leave it waiting
        store.get(f"connected {1 - index}")
        self._peer = 1 - index
        self._limit = timedelta(seconds=silence_seconds)
        self._stream = connection.detach(silence_seconds)

    def send(self, pieces: Iterable[Tensor]) -> None:
        small: list[memoryview] = []
        with self._bulk() as bulk:
            for piece in pieces:
                if piece.numel() < BULK_BYTES:
                    small.append(_memory(piece))
                else:
                    self._write(small)
                    bulk.post(self._operation("send"), piece)
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
            raise _broken() from None
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
                    bulk.post(self._operation("recv"), piece)

    def _write(self, parts: list[memoryview]) -> None:
        """All parts in one system call, if the kernel accepts that much."""
        if not parts:
            return
        for part in _rest_of(parts, self._stream.sendmsg(parts)):
            self._stream.sendall(part)
        parts.clear()

    def _read(self, into: memoryview) -> None:
        while into:
            count = self._stream.recv_into(into, len(into), socket.MSG_WAITALL)
            if not count:
                raise _broken()
            into = into[count:]

    def _operation(self, name: str) -> Callable[[Tensor], Any]:
        group = self._group
        if group is None:
            raise _broken()
        return lambda piece: getattr(group, name)([piece], self._peer, _DATA)

    @contextmanager
    def _bulk(self) -> Iterator[_Bulk]:
        """Operations of gloo, all complete at the end; any failure becomes a ConnectionLost."""
        bulk = _Bulk(self._limit)
        try:
            yield bulk
            bulk.wait_for_all()
        except ConnectionLost:
            raise
        except BlockingIOError:
            raise self._silent() from None
        except (OSError, ValueError):
            raise _broken() from None
        except RuntimeError as error:
            raise self._failed(str(error)) from None
        finally:
            bulk.posted.clear()  # before the memory is released, which gloo uses until then

    def _silent(self) -> ConnectionLost:
        return ConnectionLost(LossReason.SILENT, f"silent for {self._limit.total_seconds():g} seconds")

    def _failed(self, text: str) -> ConnectionLost:
        """The kind of an error of gloo, which has nothing but a text."""
        if "imed out" in text or "pplication timeout" in text:
            return self._silent()
        if "closed by peer" in text or "reset by peer" in text or "roken pipe" in text:
            return _broken()
        return _broken(text.splitlines()[0])

    def break_off(self) -> None:
        with suppress(OSError):  # the peer closed it first
            self._stream.shutdown(socket.SHUT_RDWR)
        group = self._group
        if group is None:
            return
        unused = torch.empty(1, dtype=torch.uint8)
        with suppress(RuntimeError):  # it always times out, unless the connection was broken already
            group.recv([unused], self._peer, _UNMATCHED).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self._group = None
        self._stream.close()


def _broken(detail: str = "the connection was closed") -> ConnectionLost:
    return ConnectionLost(LossReason.BROKEN, detail)


def _rest_of(parts: list[memoryview], sent: int) -> list[memoryview]:
    """What remains of the parts after `sent` bytes."""
    rest = []
    for part in parts:
        if sent < len(part):
            rest.append(part[sent:])
        sent = max(0, sent - len(part))
    return rest


def _memory(piece: Tensor) -> memoryview:
    return memoryview(piece.numpy())  # type: ignore[arg-type]


class _Bulk:
    """Posted operations. The next one is posted before the last is waited for, so that gloo is never idle."""

    def __init__(self, limit: timedelta) -> None:
        self.posted: deque[Any] = deque()
        self._limit = limit

    def post(self, operation: Callable[[Tensor], Any], piece: Tensor) -> None:
        self.posted.append(operation(piece))
        if len(self.posted) > _POSTED_AHEAD:
            self._wait_for_first()

    def wait_for_all(self) -> None:
        while self.posted:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        if not self.posted[0].wait(self._limit):
            raise _broken()
        self.posted.popleft()
