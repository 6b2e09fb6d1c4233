"""One link: a thread that sends, a thread that receives, and one way to end.

A link ends when both threads have ended, and only then is `Lost` reported, so that nothing of it can come later. Who
finds a reason to end it, *drops* it: the channel is broken, which wakes whoever waits on it. Who wants it to end well
*finishes* it: what is queued leaves, then a goodbye, and the other side answers with a goodbye of its own, so that
neither closes a connection on which something is still under way.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Message
from offbeat.errors import ContractViolation
from offbeat.transports import wire
from offbeat.transports.shared_memory import Shared
from offbeat.transports.transport import Arrived, Departed, Incoming

CLOSED = "closed"
"""Why a link is lost whose other end said goodbye."""

WINDOW = 3
"""Messages on the way that the other side has not taken; more wait on this side. With two workers each hears of two
updates per round, and its next gradient says so; below three it would need a word of its own."""

COPY_NOW_BYTES_MAX = 1 << 20
"""A payload that is larger is copied into shared memory by the link's own thread: who sends is not to wait for it."""

REST: tuple[str] = ("rest",)
"""What the sender does next where a message has partly left."""

_log = logging.getLogger(__name__)


class Channel(Protocol):
    """A stream of tensors in both directions. Both sides agree on the size of each."""

    def send(self, pieces: Iterable[Tensor]) -> None:
        """Return when they have left; ConnectionError if one cannot, or took too long."""

    def send_now(self, pieces: Iterable[Tensor]) -> list[memoryview] | None:
        """Send what can leave without waiting, and return the rest, for `send_rest`; None where none of it can."""

    def send_rest(self, rest: list[memoryview]) -> None:
        """Send what `send_now` has left over, before anything else."""

    def receive(self, pieces: Iterable[Tensor]) -> None:
        """Return when they are filled; ConnectionError if one cannot be, or took too long."""

    def break_off(self) -> None:
        """Let whoever sends or receives, here or there, fail now. From any thread, any number of times."""

    def close(self) -> None:
        """Give everything back. Nobody may send or receive any more."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How a transport treats all of its links."""

    silence_seconds: float
    message_bytes_max: int
    chunk_bytes: int
    checksum: bool


class Link:
    """What there is between this rank and one incarnation of a peer."""

    def __init__(
        self,
        peer: int,
        incarnation: int,
        channel: Channel,
        *,
        name: str,
        options: LinkOptions,
        pool: Pool,
        deliver: Callable[[Incoming | ContractViolation], None],
        on_end: Callable[[Link], None],
        shared: Shared | None = None,
    ) -> None:
        self.peer = peer
        self.incarnation = incarnation
        self.why: str | None = None
        self.left = False
        """Whether the other end said goodbye."""
        self.ended = threading.Event()
        self._channel = channel
        self._options = options
        self._pool = pool
        self._deliver = deliver
        self._on_end = on_end
        self._shared = shared or Shared()
        self._changed = threading.Condition()
        self._outbox: deque[tuple[str | None, Message]] = deque()
        self._finishing = False
        self._sent = self._acknowledged = 0
        """Messages of ours: that have left, and that the other side has taken."""
        self._delivered = self._acked = 0
        """Messages of theirs: that were taken here, and of which they know."""
        self._busy = False
        """Whether the thread that sends has taken something to send, and may not be overtaken."""
        self._ack_due = False
        self._rest: tuple[list[memoryview], wire.Encoded, str | None, float] | None = None
        """What is left of a message that could not leave at once; it comes before what is queued."""
        self._raw = torch.empty(wire.HEAD_BYTES, dtype=torch.uint8)
        self._receiver = threading.Thread(target=self._run, name=f"{name} receive", daemon=True)
        self._sender = threading.Thread(target=self._run_sender, name=f"{name} send", daemon=True)

    def start(self) -> None:
        try:
            self._sender.start()
            self._receiver.start()
        except RuntimeError as error:  # there can be no more threads
            self.drop(str(error))
            if self._sender.ident is not None:
                self._sender.join()
            self._end()

    def post(self, message: Message, key: str | None) -> None:
        """Queue a message, in the place of one that it supersedes."""
        with self._changed:
            if self._finishing or self.why is not None:
                return
            if key is not None:
                for place, (queued, _) in enumerate(self._outbox):
                    if queued == key:
                        self._outbox[place] = (key, message)
                        return
            free = not (self._busy or self._outbox or self._rest) and self._may_leave()
            if not (free and self._send_now(message, key)):
                self._outbox.append((key, message))
                self._changed.notify()

    def _may_leave(self) -> bool:
        """What the other side has not taken yet would only grow old on the way; let it wait here, to be superseded."""
        return self._finishing or self._sent - self._acknowledged < WINDOW

    def take(self) -> None:
        """A message of theirs was taken. Whatever we send says so; where we send nothing, a word of its own does."""
        with self._changed:
            self._delivered += 1
            if self._delivered - self._acked >= WINDOW and self.why is None:
                self._ack_due = True
                self._changed.notify()

    def _send_now(self, message: Message, key: str | None) -> bool:
        """Send in the thread at hand what the connection takes at once: it spares another one from waking up."""
        try:
            encoded = self._encoded(message)
            if encoded is None:
                return True
            begun = time.perf_counter()
            wire.tell(encoded.head, self._delivered)
            if self._shared.takes(encoded.payload_bytes):
                rest = self._lay_now(encoded)
            else:
                rest = self._channel.send_now(self._pieces(encoded))
            if rest is None:
                return False
            self._sent += 1
            self._telling()
            if rest:
                self._rest = (rest, encoded, key, begun)
                self._changed.notify()
            else:
                self._departed(encoded, key, begun)
        except ConnectionError as error:
            self._broken(_reason(error))
        return True

    def _lay_now(self, encoded: wire.Encoded) -> list[memoryview] | None:
        """As the channel's `send_now`, with the payload in shared memory."""
        if encoded.payload_bytes > COPY_NOW_BYTES_MAX:
            return None
        place = self._lay(encoded)
        if place is None:
            return None
        rest = self._channel.send_now(_opening(encoded))
        if rest is None:
            self._shared.take_back(place)
        return rest

    def _lay(self, encoded: wire.Encoded) -> int | None:
        """Copy the payload into a slot, if one is free, and let the head say so."""
        place = self._shared.write(encoded.tensors, encoded.payload_bytes)
        if place is not None:
            wire.set_slot(encoded.head, place)
        return place

    def _broken(self, why: str) -> None:
        """As `drop`, for who holds the lock: the thread that receives finds the connection broken, and ends it."""
        self.why = self.why or why
        self._outbox.clear()
        self._changed.notify()
        self._channel.break_off()

    def finish(self) -> None:
        """Let what is queued leave, say goodbye, and end when the other side has answered."""
        with self._changed:
            self._finishing = True
            self._changed.notify()

    def drop(self, why: str) -> None:
        """End now. The first reason counts."""
        with self._changed:
            if self.why is None:
                self.why = why
            self._outbox.clear()
            self._changed.notify()
        self._channel.break_off()

    # The thread that receives; the link ends with it

    def _run(self) -> None:
        try:
            while self._receive():
                pass
            self.left = True
            with self._changed:  # the other side takes nothing more but our goodbye
                self.why = self.why or CLOSED
                self._outbox.clear()
            self.finish()
        except BaseException as error:
            self.drop(_reason(error))
        self._sender.join()
        self._end()

    def _end(self) -> None:
        try:
            self._channel.close()
            self._shared.close()
        finally:
            self._on_end(self)
            self.ended.set()

    def _receive(self) -> bool:
        """Receive one message; False after a goodbye."""
        while True:
            self._channel.receive([self._raw])
            head = wire.read_head(self._raw, self._options.message_bytes_max)
            self._hear(head.taken)
            if head.kind == wire.GOODBYE:
                return False
            if head.kind == wire.MESSAGE:
                break
            if head.kind == wire.SLOT:
                self._shared.map(wire.read_slot(head))
        meta = head.meta
        if meta is None:
            rest = torch.empty(head.meta_bytes, dtype=torch.uint8)
            self._channel.receive([rest])
            meta = rest.numpy().tobytes()
        payload = self._payload(head, wire.tensor_sizes(head, meta))
        nbytes = wire.HEAD_BYTES + (head.meta_bytes if head.meta is None else 0) + head.payload_bytes
        self._deliver(Arrived(self.peer, self.incarnation, wire.decode(head, meta, payload), nbytes))
        return True

    def _payload(self, head: wire.Head, sizes: list[int]) -> Tensor:
        if head.place is not None:
            return self._shared.read(head.place, head.payload_bytes)
        payload = self._pool.take(head.payload_bytes)
        self._channel.receive(self._chunks(_parts(payload, sizes)))
        return payload

    def _hear(self, taken: int) -> None:
        with self._changed:
            if not self._acknowledged <= taken <= self._sent:
                raise wire.WireError(f"{taken} messages are said to be taken, of {self._sent} that were sent")
            if taken > self._acknowledged:
                self._acknowledged = taken
                if self._outbox:
                    self._changed.notify()

    def _chunks(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Pieces small enough that none takes as long as a silent peer is given. Both ends cut in the same places."""
        nbytes = self._options.chunk_bytes
        for tensor in tensors:
            for first in range(0, tensor.numel(), nbytes):
                yield tensor[first : first + nbytes]

    # The thread that sends

    def _run_sender(self) -> None:
        try:
            while True:
                step = self._next()
                if step is None:
                    break
                if step is REST:
                    self._send_rest()
                elif step == ():
                    self._channel.send([self._word(wire.HEARTBEAT)])
                else:
                    self._send(*step)
                del step  # the message is not ours to keep until the next one comes
            if self.why is None or self.left:
                self._channel.send([self._word(wire.GOODBYE)])
        except BaseException as error:
            self.drop(_reason(error))

    def _next(self) -> tuple[Any, ...] | None:
        """What to send next; empty for a heartbeat, None at the end."""
        with self._changed:
            self._busy = False
            while True:
                if self._rest is not None and (self.why is None or self.left):  # a goodbye comes after a whole message
                    self._busy = True
                    return REST
                if self._outbox and self._may_leave():
                    self._busy = True
                    return self._outbox.popleft()
                if self._finishing or self.why is not None:
                    return None
                if self._ack_due or not self._changed.wait(self._options.silence_seconds / 4):
                    self._busy = True
                    return ()

    def _send(self, key: str | None, message: Message) -> None:
        encoded = self._encoded(message)
        if encoded is not None:
            begun = time.perf_counter()
            pieces = self._shared_pieces(encoded)
            with self._changed:
                self._sent += 1
                wire.tell(encoded.head, self._telling())
            self._channel.send(pieces)
            self._departed(encoded, key, begun)

    def _word(self, kind: int) -> Tensor:
        head = wire.control(kind)
        with self._changed:
            wire.tell(head, self._telling())
        return head

    def _telling(self) -> int:
        """What is said of their messages in what leaves now."""
        self._acked, self._ack_due = self._delivered, False
        return self._delivered

    def _send_rest(self) -> None:
        assert self._rest is not None
        rest, encoded, key, begun = self._rest
        self._channel.send_rest(rest)
        self._rest = None
        self._departed(encoded, key, begun)

    def _encoded(self, message: Message) -> wire.Encoded | None:
        """The message as bytes; who sent what cannot be that gets to know, and the link lives on."""
        try:
            return wire.encode(message, self._options.checksum)
        except ContractViolation as error:
            self._deliver(error)
            return None

    def _pieces(self, encoded: wire.Encoded) -> Iterable[Tensor]:
        return itertools.chain(_opening(encoded), self._chunks(encoded.tensors))

    def _shared_pieces(self, encoded: wire.Encoded) -> Iterable[Tensor]:
        """What is left to send where memory is shared; without a free slot all of it, and perhaps one slot more."""
        nbytes = encoded.payload_bytes
        if not self._shared.takes(nbytes):
            return self._pieces(encoded)
        if self._lay(encoded) is not None:
            return _opening(encoded)
        slot = self._shared.grow(nbytes)
        return self._pieces(encoded) if slot is None else itertools.chain([self._offered(slot)], self._pieces(encoded))

    def _offered(self, slot: wire.Slot) -> Tensor:
        head = wire.offer(slot)
        with self._changed:
            wire.tell(head, self._telling())
        return head

    def _departed(self, encoded: wire.Encoded, key: str | None, begun: float) -> None:
        seconds = time.perf_counter() - begun
        weight = encoded.nbytes, seconds, encoded.kind, encoded.nbytes_uncompressed
        self._deliver(Departed(self.peer, self.incarnation, key, *weight))


def _opening(encoded: wire.Encoded) -> list[Tensor]:
    return [encoded.head] if encoded.meta is None else [encoded.head, encoded.meta]


def _parts(memory: Tensor, sizes: Iterable[int]) -> Iterator[Tensor]:
    first = 0
    for size in sizes:
        yield memory[first : first + size]
        first += size


def _reason(error: BaseException) -> str:
    if isinstance(error, ConnectionError | wire.WireError):
        return str(error)
    _log.error("a link is dropped because of a mistake", exc_info=error)
    return f"{type(error).__name__}: {error}"
