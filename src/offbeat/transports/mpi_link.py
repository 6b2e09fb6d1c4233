"""One link over MPI, as used by the only thread that calls MPI; that thread is in `mpi_runtime.py`.

Two streams go each way, under different tags: *control messages*, which establish a link and report that it is broken,
and *frames*: a head, the part of the meta that does not fit into it, and the tensors in chunks, each a message of MPI.
Frames of one peer arrive in the order in which they were sent. Nothing here blocks: `work` does what can be done now.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from offbeat.core.events import LossReason, PeerJoined, PeerLost
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Message
from offbeat.core.run_identity import RunIdentity
from offbeat.errors import RunFailed, shortened
from offbeat.transports import wire
from offbeat.transports.link import (
    CLOSED,
    LinkBase,
    LinkLoss,
    LinkOptions,
    difference,
    different_versions,
)
from offbeat.transports.link_protocol import Outgoing
from offbeat.transports.transport import InboxItem

CHUNK_BYTES = 16 << 20
"""The largest frame: far below what MPI can count, and short enough that a slow link does not look silent."""

INCARNATION = 0
"""A rank that leaves a run of mpirun does not come back, so there is only one incarnation."""


class LinkHello(msgspec.Struct, frozen=True, tag="hello"):
    """The first control message of each side. `elapsed_seconds` of the run is set by rank 0 only."""

    version: int
    identity: RunIdentity
    elapsed_seconds: float


class LinkBroken(msgspec.Struct, frozen=True, tag="broken"):
    """The last control message of a side that ends the link without a goodbye."""

    reason: LossReason
    detail: str


ControlMessage = LinkHello | LinkBroken
CONTROL_BYTES_MAX = 64 << 10

_CONTROL: msgspec.json.Decoder[ControlMessage] = msgspec.json.Decoder(ControlMessage)


def encode_control(message: ControlMessage) -> Tensor:
    return torch.frombuffer(bytearray(msgspec.json.encode(message)), dtype=torch.uint8)


def decode_control(raw: Tensor) -> ControlMessage:
    try:
        return _CONTROL.decode(raw.numpy().tobytes())
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise wire.WireError(f"a control message of the peer cannot be decoded: {shortened(error)}") from None


def mismatch(rank: int, own: LinkHello, peer: int, theirs: LinkHello) -> str | None:
    """Why a rank and a peer cannot be linked, as the sentence for the user of this rank; None if they can."""
    if theirs.version != own.version:
        return different_versions(peer, theirs.version, own.version)
    return difference(rank, own.identity, peer, theirs.identity)


class Operation(Protocol):
    """A send or receive in progress. It references its memory."""

    def done(self) -> bool:
        """Whether it is complete; ConnectionLost if it failed."""


class Frame(Protocol):
    """A matched message of MPI, to be received into memory of exactly its size."""

    nbytes: int

    def receive(self, into: Tensor) -> Operation: ...


class Port(Protocol):
    """What a link uses of MPI. ConnectionLost where it fails."""

    def send_frame(self, peer: int, memory: Tensor) -> Operation: ...

    def send_control(self, peer: int, message: ControlMessage) -> None:
        """Send without checking whether it arrives."""

    def abandon(self, peer: int, operations: Iterable[Operation], frames: Iterable[Frame]) -> None:
        """Keep the memory of operations that the link gave up until MPI has released it, and discard the frames."""


class MpiLink(LinkBase):
    """The link to a peer: first awaited, then linked, then over."""

    def __init__(
        self,
        peer: int,
        port: Port,
        options: LinkOptions,
        pool: Pool,
        deliver: Callable[[InboxItem], None],
    ) -> None:
        super().__init__(peer, INCARNATION, options, pool, deliver)
        self.linked = self.over = False
        self._port = port
        self._lock = threading.Lock()
        self._sending: deque[Operation] = deque()
        self._leaving: tuple[wire.Encoded, str | None, float] | None = None
        """The message that is being sent, its key, and when it was begun."""
        self._frames: deque[Frame] = deque()
        self._buffers: deque[Tensor] = deque()
        """Memory for the next frames."""
        self._receiving: deque[Operation] = deque()
        self._reader = self._read()
        self._received_at = time.monotonic()

    # Any thread

    def post(self, message: Message, key: str | None) -> bool:
        """Queue a message, or replace a queued one with the same key; whether it can be sent now."""
        outgoing = Outgoing(key, message)
        with self._lock:
            if not self.linked or self.over:
                return False
            return self._protocol.post(outgoing) and self._protocol.may_send_message

    def acknowledge(self) -> bool:
        """The user received a message of the peer. What is sent next says so; True if a heartbeat is due for it."""
        with self._lock:
            return self._protocol.deliver()

    def finish(self) -> None:
        """Send what is queued, then a goodbye, and end when the peer has answered."""
        with self._lock:
            self._protocol.finish()

    # From here on, only the thread that calls MPI

    def join(self) -> None:
        with self._lock:
            self.linked = True
            self._received_at = time.monotonic()
        self._deliver(functools.partial(PeerJoined, peer=self.peer, incarnation=INCARNATION))

    def reject(self, sentence: str) -> None:
        self.over = True
        self._deliver(RunFailed(sentence))

    def drop(self, loss: LinkLoss, notify: bool = True) -> None:
        """End now; with `notify` the peer gets the reason."""
        if self.over:
            return
        self._end(loss)
        if notify:
            self._port.send_control(self.peer, LinkBroken(*loss))

    def _end(self, loss: LinkLoss) -> None:
        with self._lock:
            self.over = True
            self._protocol.discard()
        self._leaving = None
        self._port.abandon(self.peer, [*self._sending, *self._receiving], self._frames)
        for queue in (self._sending, self._receiving, self._frames, self._buffers):
            queue.clear()
        if self.linked:
            self._deliver(
                functools.partial(
                    PeerLost, peer=self.peer, incarnation=INCARNATION, reason=loss.reason, detail=loss.detail
                )
            )

    def reset_silence(self) -> None:
        """This process was stopped itself: what arrived in the meantime has not been looked at yet."""
        self._received_at = time.monotonic()

    def accept(self, frame: Frame) -> None:
        """A frame of the peer has arrived. One that overtook the peer's hello waits for it."""
        self._received_at = time.monotonic()
        self._frames.append(frame)

    @property
    def sending(self) -> bool:
        return bool(self._sending)

    @property
    def receiving(self) -> bool:
        return bool(self._receiving)

    @property
    def silent(self) -> bool:
        return time.monotonic() - self._received_at > self._options.silence_seconds

    @property
    def idle(self) -> bool:
        """Whether `work` would find nothing to do. Called a thousand times a second, and so without the lock."""
        return self.over or not (
            self.sending or self._frames or self.receiving or self._leaving or not self._protocol.is_quiet
        )

    def work(self) -> bool:
        """Do what can be done; whether anything moved. ConnectionLost and WireError are reasons to drop the link."""
        if not self.linked or self.over:
            return False
        moved = self._receive()
        while self._send():
            moved = True
        if self._protocol.goodbye_received and self._protocol.goodbye_sent and not self._sending:
            self._end(CLOSED)
        return moved

    # Sending

    def _send(self) -> bool:
        """One step: an operation is complete, or begins. A message begins when the one before it is complete."""
        if self._sending:
            if not self._sending[0].done():
                return False
            self._sending.popleft()
            return True
        if self._leaving is not None:
            leaving, self._leaving = self._leaving, None
            self._report_sent(*leaving)
            return True
        return self._begin()

    def _begin(self) -> bool:
        with self._lock:
            step = self._protocol.next_step(time.monotonic())
        if step is None:
            return False
        if isinstance(step, Outgoing):
            self._begin_message(step)
        else:
            self._post([self._acknowledging(wire.control(step))])
        return True

    def _begin_message(self, outgoing: Outgoing) -> None:
        encoded = self._encode(outgoing)
        if encoded is None:
            return
        with self._lock:
            self._protocol.count_message()
        self._leaving = (encoded, outgoing.key, time.perf_counter())
        self._acknowledging(encoded.head)
        self._post(itertools.chain(encoded.opening, _chunks(encoded.tensors)))

    def _acknowledging(self, head: Tensor) -> Tensor:
        with self._lock:
            count = self._protocol.acknowledged_with(time.monotonic())
        wire.set_acknowledged(head, count)
        return head

    def _post(self, pieces: Iterable[Tensor]) -> None:
        for piece in pieces:
            self._sending.append(self._port.send_frame(self.peer, piece))

    # Receiving

    def _receive(self) -> bool:
        moved = False
        while not self._protocol.goodbye_received:
            while self._frames and self._buffers:
                frame = self._frames[0]
                if frame.nbytes != self._buffers[0].numel():
                    raise wire.WireError(f"{frame.nbytes} bytes were received instead of {self._buffers[0].numel()}")
                self._receiving.append(frame.receive(self._buffers.popleft()))
                self._frames.popleft()
            while self._receiving and self._receiving[0].done():
                self._receiving.popleft()
                self._received_at = time.monotonic()
                moved = True
            if self._buffers or self._receiving:
                break
            buffers = next(self._reader, None)
            if buffers is None:
                self._on_goodbye()
            else:
                self._buffers.extend(buffers)
        return moved

    def _on_goodbye(self) -> None:
        with self._lock:
            self._protocol.on_goodbye()

    def _on_acknowledgement(self, count: int) -> None:
        with self._lock:
            self._protocol.on_acknowledgement(count)

    def _read_payload(self, head: wire.Head, sizes: list[int]) -> Generator[Iterable[Tensor], None, Tensor]:
        payload = self._pool.take(head.payload_bytes)
        yield _chunks(payload.split_with_sizes(sizes))
        return payload


def _chunks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Pieces small enough to be transferred well within `silence_seconds`. Both ends cut in the same places."""
    for tensor in tensors:
        for first in range(0, tensor.numel(), CHUNK_BYTES):
            yield tensor[first : first + CHUNK_BYTES]
