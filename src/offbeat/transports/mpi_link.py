"""One link over MPI, as the one thread sees it that makes all calls of MPI; that is in `mpi_thread.py`.

Two streams go each way, told apart by their tags: *words*, which begin a link and say that it is broken, and *frames*:
a head, what it does not hold of the meta, and the tensors in chunks, each a message of MPI. Frames of one peer come in
the order in which they left. Nothing here ever waits: `work` does what can be done now.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Message
from offbeat.errors import ContractViolation
from offbeat.transports import wire
from offbeat.transports.link import CLOSED, WINDOW
from offbeat.transports.transport import Arrived, Departed, Incoming, Joined, Lost, Refused

CHUNK_BYTES = 16 << 20
"""The largest frame: far below what MPI can count, and soon over, so that something is heard of a slow link."""

INCARNATION = 0
"""Whoever leaves a run of mpirun does not come back, so there is never another one."""


class LinkHello(msgspec.Struct, frozen=True, tag="hello"):
    """The first word of each side. `elapsed_seconds` is how long the run has lasted, where rank 0 says it."""

    version: int
    fingerprint: str
    elapsed_seconds: float


class LinkBroken(msgspec.Struct, frozen=True, tag="broken"):
    """The last word of a side that gives up the link without a goodbye."""

    why: str


ControlMessage = LinkHello | LinkBroken
CONTROL_BYTES_MAX = 64 << 10

_WORDS: msgspec.json.Decoder[ControlMessage] = msgspec.json.Decoder(ControlMessage)


def encode_control(word: ControlMessage) -> Tensor:
    return torch.frombuffer(bytearray(msgspec.json.encode(word)), dtype=torch.uint8)


def decode_control(raw: Tensor) -> ControlMessage:
    try:
        return _WORDS.decode(raw.numpy().tobytes())
    except (msgspec.MsgspecError, ValueError) as error:
        raise wire.WireError(f"a word of the peer cannot be read: {error}") from None


def refusal(rank: int, own: LinkHello, peer: int, theirs: LinkHello) -> str | None:
    """Why this rank and a peer cannot be linked, for whoever reads it here; None if they can."""
    if theirs.version != own.version:
        return (
            f"rank {peer} speaks version {theirs.version} of the wire, but this process version {own.version}; install "
            "the same offbeat everywhere"
        )
    if theirs.fingerprint == own.fingerprint:
        return None
    (low, expected), (high, other) = sorted([(rank, own.fingerprint), (peer, theirs.fingerprint)])
    return (
        f"rank {high} has a different model: its fingerprint is {other}, that of rank {low} is {expected}; every rank "
        "must build the same model"
    )


class Operation(Protocol):
    """A send or receive that is under way. It holds on to its memory."""

    def done(self) -> bool:
        """Whether it is over; ConnectionError if it failed."""


class Frame(Protocol):
    """Something that has come, and now wants memory of exactly its size."""

    nbytes: int

    def receive(self, into: Tensor) -> Operation: ...


class Port(Protocol):
    """What a link may ask of MPI. ConnectionError where it fails."""

    def send_frame(self, peer: int, memory: Tensor) -> Operation: ...

    def send_control(self, peer: int, word: ControlMessage) -> None:
        """Let it leave by itself; nobody asks whether it arrived."""

    def abandon(self, peer: int, operations: Iterable[Operation], frames: Iterable[Frame]) -> None:
        """Nobody waits for these any more, but their memory stays until MPI has let go of it."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How a transport treats all of its links."""

    silence_seconds: float
    message_bytes_max: int
    checksum: bool


class MpiLink:
    """What there is between this rank and a peer: first awaited, then linked, then over."""

    def __init__(
        self,
        peer: int,
        port: Port,
        options: LinkOptions,
        pool: Pool,
        deliver: Callable[[Incoming | ContractViolation], None],
    ) -> None:
        self.peer = peer
        self.linked = self.over = False
        self._port = port
        self._options = options
        self._pool = pool
        self._deliver = deliver
        self._lock = threading.Lock()
        self._outbox: deque[tuple[str | None, Message]] = deque()
        self._finishing = False
        self._delivered = self._acked = 0
        """Messages of theirs: that were taken here, and of which they know."""
        self._sent = self._acknowledged = 0
        """Messages of ours: that have left, and that the other side has taken."""
        self._leaving: deque[Operation] = deque()
        self._departing: tuple[wire.Encoded, str | None, float] | None = None
        """The message that is leaving, its key, and since when."""
        self._said_goodbye = self._heard_goodbye = False
        self._frames: deque[Frame] = deque()
        self._places: deque[Tensor] = deque()
        """Memory for the frames that are to come next."""
        self._filling: deque[Operation] = deque()
        self._reader = self._read()
        self._heard_at = self._spoke_at = time.monotonic()

    # Any thread

    def post(self, message: Message, key: str | None) -> bool:
        """Queue a message, in the place of one that it supersedes; whether there is something new to do."""
        with self._lock:
            if not self.linked or self.over or self._finishing:
                return False
            if key is not None:
                for place, (queued, _) in enumerate(self._outbox):
                    if queued == key:
                        self._outbox[place] = (key, message)
                        return False
            self._outbox.append((key, message))
            return self._may_leave()

    def take(self) -> bool:
        """A message of theirs was taken. Whatever we send says so; True where a word of its own is due."""
        with self._lock:
            self._delivered += 1
            return self._ack_due()

    def finish(self) -> None:
        """Let what is queued leave, say goodbye, and end when the other side has answered."""
        with self._lock:
            self._finishing = True

    def _may_leave(self) -> bool:
        return self._finishing or self._sent - self._acknowledged < WINDOW

    def _ack_due(self) -> bool:
        return self._delivered - self._acked >= WINDOW

    # From here on, only the thread that makes the calls of MPI

    def join(self) -> None:
        with self._lock:
            self.linked = True
            self._heard_at = self._spoke_at = time.monotonic()
        self._deliver(Joined(self.peer, INCARNATION))

    def refuse(self, why: str) -> None:
        self.over = True
        self._deliver(Refused(self.peer, why))

    def drop(self, why: str, tell: bool = True) -> None:
        """End now, and let the other side know."""
        if self.over:
            return
        self._end(why)
        if tell:
            self._port.send_control(self.peer, LinkBroken(why))

    def _end(self, why: str) -> None:
        with self._lock:
            self.over = True
            self._outbox.clear()
        self._departing = None
        self._port.abandon(self.peer, [*self._leaving, *self._filling], self._frames)
        for kept in (self._leaving, self._filling, self._frames, self._places):
            kept.clear()
        if self.linked:
            self._deliver(Lost(self.peer, INCARNATION, why))

    def excuse(self) -> None:
        """This process stood still itself: what has come in the meantime is still to be looked at."""
        self._heard_at = time.monotonic()

    def accept(self, frame: Frame) -> None:
        """A frame of theirs has come. One that was quicker than their hello waits for it."""
        self._heard_at = time.monotonic()
        self._frames.append(frame)

    @property
    def sending(self) -> bool:
        return bool(self._leaving)

    @property
    def receiving(self) -> bool:
        return bool(self._filling)

    @property
    def silent(self) -> bool:
        return time.monotonic() - self._heard_at > self._options.silence_seconds

    @property
    def idle(self) -> bool:
        """Whether `work` would find nothing to do. Asked a thousand times a second, and so without the lock."""
        return self.over or not (
            self.sending
            or self._outbox
            or self._frames
            or self.receiving
            or self._departing
            or self._finishing
            or self._ack_due()
        )

    def work(self) -> bool:
        """Do what can be done; whether anything moved. ConnectionError and WireError are reasons to drop the link."""
        if not self.linked or self.over:
            return False
        moved = self._receive()
        while self._send():
            moved = True
        if self._heard_goodbye and self._said_goodbye and not self._leaving:
            self._end(CLOSED)
        return moved

    # Sending

    def _send(self) -> bool:
        """One step: something has left, or begins to. A message begins when the one before it has left."""
        if self._leaving:
            if not self._leaving[0].done():
                return False
            self._leaving.popleft()
            return True
        if self._departing is not None:
            encoded, key, begun = self._departing
            self._departing = None
            seconds = time.perf_counter() - begun
            weight = encoded.nbytes, seconds, encoded.kind, encoded.nbytes_uncompressed
            self._deliver(Departed(self.peer, INCARNATION, key, *weight))
            return True
        return self._begin()

    def _begin(self) -> bool:
        if self._said_goodbye:
            return False
        with self._lock:
            queued = self._outbox.popleft() if self._outbox and self._may_leave() else None
            goodbye = queued is None and self._finishing
            word_due = self._ack_due() or time.monotonic() - self._spoke_at > self._options.silence_seconds / 4
        if queued is not None:
            self._begin_message(*queued)
        elif goodbye:
            self._said_goodbye = True
            self._post([self._tell(wire.control(wire.GOODBYE))])
        elif word_due:
            self._post([self._tell(wire.control(wire.HEARTBEAT))])
        else:
            return False
        return True

    def _begin_message(self, key: str | None, message: Message) -> None:
        try:
            encoded = wire.encode(message, self._options.checksum)
        except ContractViolation as error:  # who sent it gets to know, and the link lives on
            self._deliver(error)
            return
        self._sent += 1
        self._departing = (encoded, key, time.perf_counter())
        opening = [encoded.head] if encoded.meta is None else [encoded.head, encoded.meta]
        self._tell(encoded.head)
        self._post(itertools.chain(opening, chunks(encoded.tensors)))

    def _tell(self, head: Tensor) -> Tensor:
        with self._lock:
            self._acked = self._delivered
        wire.tell(head, self._acked)
        return head

    def _post(self, pieces: Iterable[Tensor]) -> None:
        for piece in pieces:
            self._leaving.append(self._port.send_frame(self.peer, piece))
        self._spoke_at = time.monotonic()

    # Receiving

    def _receive(self) -> bool:
        moved = False
        while not self._heard_goodbye:
            while self._frames and self._places:
                frame = self._frames[0]
                if frame.nbytes != self._places[0].numel():
                    raise wire.WireError(f"{frame.nbytes} bytes came in the place of {self._places[0].numel()}")
                self._filling.append(frame.receive(self._places.popleft()))
                self._frames.popleft()
            while self._filling and self._filling[0].done():
                self._filling.popleft()
                self._heard_at = time.monotonic()
                moved = True
            if self._places or self._filling:
                break
            self._places.extend(next(self._reader))
        return moved

    def _read(self) -> Iterator[Iterable[Tensor]]:
        """What is to be received next; it goes on when that is filled."""
        raw = torch.empty(wire.HEAD_BYTES, dtype=torch.uint8)
        while True:
            yield [raw]
            head = wire.read_head(raw, self._options.message_bytes_max)
            if not self._acknowledged <= head.taken <= self._sent:
                raise wire.WireError(f"{head.taken} messages are said to be taken, of {self._sent} that were sent")
            self._acknowledged = head.taken
            if head.kind == wire.MESSAGE:
                yield from self._read_message(head)
            elif head.kind == wire.GOODBYE:
                self._heard_goodbye = True
                with self._lock:  # the other side takes nothing more but our goodbye
                    self._outbox.clear()
                    self._finishing = True
                yield []

    def _read_message(self, head: wire.Head) -> Iterator[Iterable[Tensor]]:
        meta = head.meta
        if meta is None:
            rest = torch.empty(head.meta_bytes, dtype=torch.uint8)
            yield [rest]
            meta = rest.numpy().tobytes()
        sizes = wire.tensor_sizes(head, meta)
        payload = self._pool.take(head.payload_bytes)
        yield chunks(_parts(payload, sizes))
        nbytes = wire.HEAD_BYTES + (head.meta_bytes if head.meta is None else 0) + head.payload_bytes
        self._deliver(Arrived(self.peer, INCARNATION, wire.decode(head, meta, payload), nbytes))


def chunks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Pieces that MPI can count. Both ends cut in the same places."""
    for tensor in tensors:
        for first in range(0, tensor.numel(), CHUNK_BYTES):
            yield tensor[first : first + CHUNK_BYTES]


def _parts(memory: Tensor, sizes: Iterable[int]) -> Iterator[Tensor]:
    first = 0
    for size in sizes:
        yield memory[first : first + size]
        first += size
