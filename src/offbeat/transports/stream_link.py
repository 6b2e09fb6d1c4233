"""A link over a byte stream, with one thread that sends and one that receives.

The link ends when both threads have ended, and only then is its loss reported, so that no event of it can follow.
`drop` ends it at once: it breaks the stream, which wakes any thread that waits on it. `finish` ends it in order: what
is queued is sent, then a goodbye, and the peer answers with its own goodbye, so that neither side closes a connection
on which data is still in transit.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable

from torch import Tensor

from offbeat.core.events import LossReason
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Message
from offbeat.transports import wire
from offbeat.transports.byte_stream import ByteStream, first_of, rest_of
from offbeat.transports.link import CLOSED, ConnectionLost, LinkBase, LinkLoss, LinkOptions, loss_of
from offbeat.transports.link_protocol import Outgoing
from offbeat.transports.shared_memory import SharedSlots
from offbeat.transports.tensor_threads import TensorThread
from offbeat.transports.transport import InboxItem

COPY_NOW_BYTES_MAX = 1 << 20
"""What `post` copies itself, into shared memory or the kernel's, at the most. The rest of a message that goes through
the stream, and all of one that goes through shared memory, is left to the sending thread: `post` must not wait."""

_log = logging.getLogger(__name__)


class StreamLink(LinkBase):
    """The link to one incarnation of a peer. `post`, `acknowledge`, `finish` and `drop` may be called by any thread."""

    def __init__(
        self,
        peer: int,
        incarnation: int,
        stream: ByteStream,
        *,
        options: LinkOptions,
        pool: Pool,
        deliver: Callable[[InboxItem], None],
        on_end: Callable[[StreamLink], None],
        shared: SharedSlots | None = None,
    ) -> None:
        """A link that `start` sets in motion.

        Args:
            peer: rank of the other end.
            incarnation: number of this link among those to the same peer.
            stream: moves the bytes; closed by the link.
            options: settings of the transport's links.
            pool: buffers for received payloads.
            deliver: takes events and encoding errors, from any thread.
            on_end: called once, when both threads have ended.
            shared: memory shared with the peer; closed by the link.
        """
        super().__init__(peer, incarnation, options, pool, deliver)
        self.loss: LinkLoss | None = None
        """Why the link ends; None while it does not."""
        self.left = False
        """Whether the peer sent a goodbye."""
        self.ended = threading.Event()
        self._stream = stream
        self._on_end = on_end
        self._shared = shared or SharedSlots()
        self._changed = threading.Condition()
        self._busy = False
        """Whether the sending thread has something to send, which nothing may overtake."""
        self._rest: tuple[list[memoryview], wire.Encoded, str | None, float] | None = None
        """What is left of a message that `post` could send only in part; it precedes the outbox."""
        name = f"offbeat link to {peer}.{incarnation}"
        self._receiver = TensorThread(self._run_receiver, f"{name} receives")
        self._sender = TensorThread(self._run_sender, f"{name} sends")

    def start(self) -> None:
        try:
            self._sender.start()
            self._receiver.start()
        except RuntimeError as error:  # the limit of threads is reached
            self.drop(LinkLoss(LossReason.LOCAL, str(error)))
            if self._sender.ident is not None:
                self._sender.join()
            self._end()

    def post(self, message: Message, key: str | None) -> None:
        """Queue a message, or replace a queued one with the same key."""
        outgoing = Outgoing(key, message)
        with self._changed:
            if self.loss is not None or not self._protocol.post(outgoing):
                return
            is_free = not (self._busy or self._rest) and self._protocol.is_next(outgoing)
            if is_free and self._send_now(outgoing):
                self._protocol.discard()  # it was the only one
            else:
                self._changed.notify()

    def acknowledge(self) -> None:
        """The user received a message of the peer. What is sent next says so; a heartbeat, if the window is full."""
        with self._changed:
            if self._protocol.deliver():
                self._changed.notify()

    def finish(self) -> None:
        """Send what is queued, then a goodbye, and end when the peer has answered."""
        with self._changed:
            self._protocol.finish()
            self._changed.notify()

    def drop(self, loss: LinkLoss) -> None:
        """End now. The first reason counts."""
        with self._changed:
            self._set_broken(loss)
        self._stream.break_off()

    def _set_broken(self, loss: LinkLoss) -> None:
        self.loss = self.loss or loss
        self._protocol.discard()
        self._changed.notify()

    # Sending without the sending thread, which saves a thread switch; the caller of `post` holds the lock

    def _send_now(self, outgoing: Outgoing) -> bool:
        """Send what the stream accepts at once; False if the message has to stay in the queue."""
        try:
            encoded = self._encode(outgoing)
            if encoded is None:
                return True
            begun = time.perf_counter()
            is_shared = self._shared.accepts(encoded.payload_bytes)
            if is_shared and encoded.payload_bytes > COPY_NOW_BYTES_MAX:
                return False
            wire.set_acknowledged(encoded.head, self._protocol.delivered)
            rest = self._send_shared_now(encoded) if is_shared else self._send_beginning_now(encoded)
            if rest is None:
                return False
            self._protocol.count_message()
            self._protocol.acknowledged_with(time.monotonic())
            if rest:
                self._rest = (rest, encoded, outgoing.key, begun)
                self._changed.notify()
            else:
                self._report_sent(encoded, outgoing.key, begun)
        except ConnectionLost as error:
            self._set_broken(error.loss)  # the receiving thread finds the stream broken, and ends the link
            self._stream.break_off()
        return True

    def _send_beginning_now(self, encoded: wire.Encoded) -> list[memoryview] | None:
        """As the stream's `write_now`, with what may be copied here. The sending thread wakes up meanwhile for the rest
        of a large message, and the peer takes memory for it."""
        parts = _memory_of(_pieces(encoded))
        later = rest_of(parts, COPY_NOW_BYTES_MAX)
        rest = self._stream.write_now(first_of(parts, COPY_NOW_BYTES_MAX) if later else parts)
        return None if rest is None else rest + later

    def _send_shared_now(self, encoded: wire.Encoded) -> list[memoryview] | None:
        """As the stream's `write_now`, with the payload in shared memory."""
        slot = self._write_slot(encoded)
        if slot is None:
            return None
        rest = self._stream.write_now(_memory_of(encoded.opening))
        if rest is None:
            self._shared.release(slot)
            wire.set_slot(encoded.head, None)
        return rest

    def _write_slot(self, encoded: wire.Encoded) -> int | None:
        """Copy the payload into a free slot, if there is one, and set its number in the head."""
        slot = self._shared.write(encoded.tensors, encoded.payload_bytes)
        if slot is not None:
            wire.set_slot(encoded.head, slot)
        return slot

    # The receiving thread; the link ends with it

    def _run_receiver(self) -> None:
        try:
            for pieces in self._read():
                for memory in _memory_of(pieces):
                    self._stream.read(memory)
            with self._changed:
                self.left = True
                self.loss = self.loss or CLOSED
                self._protocol.on_goodbye()
                self._changed.notify()
        except BaseException as error:
            self.drop(_logged_loss(error))
        self._sender.join()
        self._end()

    def _end(self) -> None:
        try:
            self._stream.close()
            self._shared.close()
        finally:
            self._on_end(self)
            self.ended.set()

    def _read_payload(self, head: wire.Head, sizes: list[int]) -> Generator[Iterable[Tensor], None, Tensor]:
        if head.slot is not None:
            return self._shared.read(head.slot, head.payload_bytes)
        payload = self._pool.take(head.payload_bytes)
        yield [payload]
        return payload

    def _on_acknowledgement(self, count: int) -> None:
        with self._changed:
            waited = not self._protocol.may_send_message
            self._protocol.on_acknowledgement(count)
            if waited and self._protocol.may_send_message:
                self._changed.notify()

    def _on_slot(self, head: wire.Head) -> None:
        self._shared.map(wire.read_slot(head))

    # The sending thread

    def _run_sender(self) -> None:
        try:
            while (step := self._next_step()) is not None:
                step()
                del step  # it references a message, which must not live until the next one comes
        except BaseException as error:
            self.drop(_logged_loss(error))

    def _next_step(self) -> Callable[[], None] | None:
        """What to send next; None at the end."""
        with self._changed:
            self._busy = False
            while self.loss is None or self.left:
                if self._rest is not None:
                    self._busy = True
                    return self._send_rest
                step = self._protocol.next_step(time.monotonic())
                if step is not None:
                    self._busy = True
                    send = self._send if isinstance(step, Outgoing) else self._send_control
                    return functools.partial(send, step)  # type: ignore[arg-type]
                if self._protocol.goodbye_sent:
                    return None
                self._changed.wait(self._protocol.seconds_to_heartbeat(time.monotonic()))
            return None

    def _send(self, outgoing: Outgoing) -> None:
        encoded = self._encode(outgoing)
        if encoded is not None:
            begun = time.perf_counter()
            pieces = self._shared_pieces(encoded)
            with self._changed:
                self._protocol.count_message()
            self._acknowledging(encoded.head)
            self._stream.write(map(_memory, pieces))
            self._report_sent(encoded, outgoing.key, begun)

    def _send_control(self, kind: int) -> None:
        self._stream.write([_memory(self._acknowledging(wire.control(kind)))])

    def _send_rest(self) -> None:
        assert self._rest is not None
        rest, encoded, key, begun = self._rest
        self._stream.write(rest)
        self._rest = None
        self._report_sent(encoded, key, begun)

    def _acknowledging(self, head: Tensor) -> Tensor:
        with self._changed:
            wire.set_acknowledged(head, self._protocol.acknowledged_with(time.monotonic()))
        return head

    def _shared_pieces(self, encoded: wire.Encoded) -> Iterable[Tensor]:
        """What has to go through the stream. Without a free slot that is all, after the offer of a new slot if any."""
        nbytes = encoded.payload_bytes
        if not self._shared.accepts(nbytes):
            return _pieces(encoded)
        if self._write_slot(encoded) is not None:
            return encoded.opening
        slot = self._shared.grow(nbytes)
        offers = [] if slot is None else [self._acknowledging(wire.offer(slot))]
        return itertools.chain(offers, _pieces(encoded))


def _pieces(encoded: wire.Encoded) -> Iterable[Tensor]:
    return itertools.chain(encoded.opening, encoded.tensors)


def _memory_of(pieces: Iterable[Tensor]) -> list[memoryview]:
    return [_memory(piece) for piece in pieces]


def _memory(piece: Tensor) -> memoryview:
    return memoryview(piece.numpy())  # type: ignore[arg-type]


def _logged_loss(error: BaseException) -> LinkLoss:
    loss = loss_of(error)
    if loss is None:
        _log.error("internal error, a link is dropped", exc_info=error)
        return LinkLoss(LossReason.LOCAL, f"{type(error).__name__}: {error}")
    return loss
