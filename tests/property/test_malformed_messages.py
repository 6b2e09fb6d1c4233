"""Whatever bytes a peer sends, before and after it has shown the token: they are decoded, or refused in a sentence."""

from __future__ import annotations

import dataclasses
import functools
import hmac
import socket
import struct
import typing
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st
from malformed import DEEP, DIGITS, EDITS, Change, Edit, changed, changes, edited, malformed, refused_in_a_sentence
from test_wire_size import KINDS, values
from torch import Tensor

import offbeat as ob
from offbeat.core.compression import decode
from offbeat.core.events import LossReason
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Message
from offbeat.core.run_identity import RunIdentity
from offbeat.core.wire_size import HEAD_BYTES, wire_size
from offbeat.errors import ConfigurationError, ContractViolation
from offbeat.strategies.hub.hub_worker import Gradient
from offbeat.transports import mpi_link, wire
from offbeat.transports.address import Address
from offbeat.transports.authentication import PREFACE, NotAuthenticated, Steps, listener_steps
from offbeat.transports.byte_stream import ByteStream, broken
from offbeat.transports.link import LinkBase, LinkOptions
from offbeat.transports.link_protocol import Outgoing
from offbeat.transports.listener import _PendingConnection
from offbeat.transports.rendezvous import (
    _DECODERS,
    REQUEST_BYTES_MAX,
    Assignment,
    CallRequest,
    ControlConnection,
    Endpoint,
    LinkAccepted,
    LinkConfirmed,
    LinkRequest,
    Rejected,
    Rejection,
    RelayAccepted,
    RelayRequest,
    Unreachable,
    connect,
)
from offbeat.transports.shared_memory import SlotTable
from offbeat.transports.tls import Credentials, Tls
from offbeat.transports.transport import MESSAGE_BYTES_MAX


class Nested:
    """msgpack that is nested too deeply."""

    def __init__(self, level: bytes) -> None:
        self.level = level

    def __repr__(self) -> str:
        return f"Nested({self.level!r})"


def packed(tree: Any) -> bytes | None:
    """As msgpack; None for what msgpack cannot hold."""
    try:
        return msgspec.msgpack.encode(tree, enc_hook=lambda nested: msgspec.Raw(nested.level * DEEP + b"\xc0"))
    except (OverflowError, UnicodeEncodeError):
        return None


DEEP_VALUES = st.sampled_from([Nested(b"\x91"), Nested(b"\x81\xa0")])

WIRE_CHANGES = changes(st.integers(-3, 9) | st.sampled_from(["float32", "bool", "qint8", "Stop"]) | DEEP_VALUES) | (
    changes()
)


@functools.cache
def messages_of(key: str) -> st.SearchStrategy[Message]:
    kind = KINDS[key]
    hints = typing.get_type_hints(kind)
    fields = {item.name: values(hints[item.name], 1) for item in dataclasses.fields(kind)}
    return st.builds(kind, **fields)


MESSAGES = st.sampled_from(sorted(KINDS)).flatmap(messages_of)
"""Valid messages of every kind in the package."""


def as_bytes(message: Message, checksum: bool = False) -> bytes:
    encoded = wire.encode(message, checksum)
    return b"".join(piece.numpy().tobytes() for piece in (*encoded.opening, *encoded.tensors))


class MemoryLink(LinkBase):
    """A link that receives bytes from memory, and has sent two messages that are not acknowledged yet."""

    def __init__(self, received: bytes) -> None:
        self.delivered: list[Any] = []
        super().__init__(1, 0, LinkOptions(), Pool(), self.delivered.append)
        self.left = memoryview(received)
        for _ in range(2):
            self._protocol.post(Outgoing(None, typing.cast(Message, None)))
            self._protocol.next_message()
            self._protocol.count_message()

    def receive(self) -> None:
        """Read until the bytes are used up, or a goodbye; WireError where they cannot be read."""
        for pieces in self._read():
            for piece in pieces:
                if piece.numel() > len(self.left):
                    return
                memoryview(piece.numpy())[:] = self.left[: piece.numel()]  # type: ignore[arg-type]
                self.left = self.left[piece.numel() :]

    def _read_payload(self, head: wire.Head, sizes: list[int]) -> Generator[Iterable[Tensor], None, Tensor]:
        assert sum(sizes) == head.payload_bytes <= MESSAGE_BYTES_MAX
        if head.slot is not None:
            raise wire.WireError("a message refers to a slot, but no memory is shared on this link")
        # What is not there yet is waited for, and costs nothing but address space until it arrives.
        payload = torch.empty(min(head.payload_bytes, len(self.left) + 1), dtype=torch.uint8)
        yield [payload]
        return payload

    def _on_acknowledgement(self, count: int) -> None:
        self._protocol.on_acknowledgement(count)

    def _on_slot(self, head: wire.Head) -> None:
        wire.read_slot(head)


# The wire format


@malformed("wire", st.lists(MESSAGES, min_size=1, max_size=2), st.booleans(), EDITS, count=60)
def test_a_damaged_stream_of_messages_ends_its_link_and_nothing_else(
    sent: list[Message], checksum: bool, edits: list[Edit]
) -> None:
    """What a link delivers before the damage are whole messages of known kinds, never more than were sent there."""
    stream = b"".join(as_bytes(message, checksum) for message in sent) + wire.control(wire.GOODBYE).numpy().tobytes()
    link = MemoryLink(edited(stream, edits, other=as_bytes(sent[-1])))
    with refused_in_a_sentence(wire.WireError):
        link.receive()
    for arrived in link.delivered:
        assert type(arrived(at=0.0).message) in KINDS.values()


@malformed("wire", MESSAGES, WIRE_CHANGES, st.booleans(), count=60)
def test_a_message_whose_meta_was_changed_is_read_or_refused_before_its_payload_is_allocated(
    message: Message, edits: list[Change], is_consistent: bool
) -> None:
    """Even where the head agrees with the meta: the tensors take exactly the bytes that the head announces."""
    head, meta, payload = parts_of(message)
    raw = packed(changed(msgspec.msgpack.decode(meta), edits))
    if raw is None:
        return
    size = announced_size(raw) if is_consistent else payload
    with refused_in_a_sentence(wire.WireError):
        announced = wire.read_meta(dataclasses.replace(head, meta_bytes=len(raw), payload_bytes=size), raw)
        assert sum(announced.tensor_sizes) == size
        if size <= 1 << 16:
            wire.decode(announced, torch.zeros(size, dtype=torch.uint8))


def parts_of(message: Message) -> tuple[wire.Head, bytes, int]:
    encoded = wire.encode(message)
    head = wire.read_head(encoded.head, MESSAGE_BYTES_MAX)
    meta = head.meta if encoded.meta is None else encoded.meta.numpy().tobytes()
    assert meta is not None
    return head, meta, head.payload_bytes


def announced_size(meta: bytes) -> int:
    """The size of the tensors in a meta, as far as it can be read; at most what a head can announce."""
    try:
        tensors = msgspec.msgpack.decode(meta)[2]
        sizes = [
            getattr(torch, name).itemsize * (shape if isinstance(shape, int) else torch.Size(shape).numel())
            for name, shape in tensors
        ]
        return max(0, min(sum(sizes), MESSAGE_BYTES_MAX))
    except Exception:  # the test goes on with a size that is wrong
        return 0


HEAD_FIELDS = st.tuples(
    st.sampled_from([b"OFFB", b"OFFB", b"OFFB", b"GET "]),
    st.sampled_from([wire.WIRE_VERSION, wire.WIRE_VERSION, 0, 255]),
    st.sampled_from([0, 0, 1, 2, 3, 4, 255]),
    st.sampled_from([wire.MESSAGE, wire.HEARTBEAT, wire.GOODBYE, wire.SLOT, 3, 255]),
    st.sampled_from([0, 0, 4, 255]),
    st.sampled_from([0, 1, 3, 60, 300, 1 << 20, (1 << 20) + 1, (1 << 32) - 1]),
    st.sampled_from([0, 0, 1, 4096, MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX + 1, (1 << 64) - 1]),
    st.sampled_from([0, 0, 1, (1 << 32) - 1]),
    st.sampled_from([0, 1, 2, 3, (1 << 64) - 1]),
)


@malformed("wire", st.lists(st.tuples(HEAD_FIELDS, st.binary(max_size=40)), min_size=1, max_size=4), count=40)
def test_heads_that_lie_about_sizes_and_acknowledgements_are_refused_or_waited_for(heads: list[Any]) -> None:
    """An announced size allocates nothing beyond the limit of a meta, and a count that cannot be is refused."""
    stream = b"".join(
        (struct.pack("<4sBBBBIQIQ", *fields) + rest).ljust(HEAD_BYTES, b"\0")[:HEAD_BYTES] for fields, rest in heads
    )
    link = MemoryLink(stream)
    with refused_in_a_sentence(wire.WireError):
        link.receive()
    assert 0 <= link._protocol._acked_by_peer <= 2


COMPRESSIONS = [ob.compression.BFloat16(), ob.compression.Int8(), ob.compression.Int8(3), ob.compression.TopK(0.1)]
BLOBS = [one.encode(torch.linspace(-1, 1, 200, dtype=dtype), Pool()) for one in COMPRESSIONS
         for dtype in (torch.float32, torch.float64)]  # fmt: skip


@malformed(
    "wire",
    st.sampled_from(range(len(BLOBS))),
    EDITS,
    st.integers(0, 400),
    count=60,
    examples=[
        (0, [("set", 16, 0, b"\xff" * 8)], 400),
        (4, [("set", 4, 1, b"\0"), ("set", 4, 1, b"\0"), ("set", 46, 1, b"\0}")], 200),  # an infinite value
    ],
)
def test_a_damaged_compressed_tensor_is_decoded_within_its_limit_or_refused(
    number: int, edits: list[Edit], numel_max: int
) -> None:
    """It has at most the elements that its receiver expects; what it claims to have saved can be summed in records."""
    raw = edited(BLOBS[number].numpy().tobytes(), edits, other=BLOBS[-1].numpy().tobytes())
    blob = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    with refused_in_a_sentence(ContractViolation):
        assert decode(blob, Pool(), numel_max).numel() <= numel_max
    size = wire_size(Gradient(blob, (), 1, 0.0, 0, (0, 1), 1.0, True))
    assert 0 <= size.nbytes_uncompressed < 1 << 40


# The handshake

TOKEN = b"0123456789012345678901"


class MemorySocket:
    """Delivers bytes in pieces of given lengths, and would block after the last."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = iter(lengths)
        self.to_read = b""
        self.written = b""

    def recv(self, count: int) -> bytes:
        count = min(count, next(self._lengths, count))
        if not self.to_read:
            raise BlockingIOError
        piece, self.to_read = self.to_read[:count], self.to_read[count:]
        return piece

    def send(self, data: bytes) -> int:
        self.written += data
        return len(data)


def proof(nonces: bytes) -> bytes:
    return hmac.digest(TOKEN, PREFACE + b"client\n" + nonces + bytes(32), "sha256")


@malformed("handshake", EDITS, st.booleans(), st.lists(st.integers(1, 9), max_size=20), count=40)
def test_a_client_is_admitted_only_with_an_undamaged_proof_in_whatever_pieces_it_comes(
    edits: list[Edit], is_damaged: bool, lengths: list[int]
) -> None:
    connected = MemorySocket(lengths)
    pending = _PendingConnection(typing.cast(socket.socket, connected), "test")
    pending.begin(listener_steps(TOKEN))
    connected.to_read = PREFACE
    assert advanced(pending) is None
    nonces = connected.written[1:33] + bytes(range(32))
    valid = nonces[32:] + proof(nonces)
    connected.to_read = edited(valid, edits, other=PREFACE) if is_damaged else valid
    is_valid = connected.to_read.startswith(valid)
    with refused_in_a_sentence(NotAuthenticated):
        assert advanced(pending) is (True if is_valid else None)
        return
    assert not is_valid


def advanced(pending: _PendingConnection) -> bool | None:
    """None where it waits for more."""
    try:
        return pending.advance()
    except BlockingIOError:
        return None


@malformed("handshake", EDITS, count=20)
def test_a_damaged_preface_is_refused_before_anything_is_sent(edits: list[Edit]) -> None:
    received = edited(PREFACE, edits, other=PREFACE)
    sent: list[bytes] = []
    with refused_in_a_sentence(NotAuthenticated):
        feed(listener_steps(TOKEN), received, sent)
    assert not sent or received.startswith(PREFACE)


def feed(steps: Steps, received: bytes, sent: list[bytes]) -> None:
    wanted = next(steps)
    while True:
        if isinstance(wanted, bytes):
            sent.append(wanted)
            wanted = steps.send(b"")
        elif len(received) < wanted:
            return
        else:
            given, received = received[:wanted], received[wanted:]
            wanted = steps.send(given)


class MemoryStream(ByteStream):
    """Delivers bytes, and then the end of the connection."""

    local_host = peer_host = "127.0.0.1"  # type: ignore[assignment]

    def __init__(self, received: bytes) -> None:
        self.left = memoryview(received)
        self.asked_max = 0

    def _receive(self, into: memoryview, flags: int) -> int:
        self.asked_max = max(self.asked_max, len(into))
        count = min(len(into), len(self.left))
        if not count:
            raise broken()
        into[:count] = self.left[:count]
        self.left = self.left[count:]
        return count

    def write(self, parts: Iterable[memoryview]) -> None:
        raise AssertionError("nothing is answered here")

    def write_now(self, parts: list[memoryview]) -> list[memoryview] | None:
        raise AssertionError("nothing is answered here")


TABLE = SlotTable(1, 3, b"0123456789abcdef")
CONTROLS: list[msgspec.Struct] = [
    CallRequest("register", 1, "me", listener=Endpoint("127.0.0.1", 7700, "name")),
    CallRequest("relayed", None, about=3, relay=2),
    Assignment(1, 3, 2.5, b"opaque"),
    LinkRequest(RunIdentity("model", "strategy"), 0, TABLE),
    LinkAccepted(0, TABLE),
    LinkConfirmed(),
    Endpoint("::1", 1, ""),
    RelayRequest(7),
    RelayAccepted(),
    Rejection("not now", False),
]
PREFIX = struct.Struct("<I")
CONTROL_CHANGES = changes() | changes(DEEP_VALUES)
LENGTHS = st.none() | st.sampled_from([0, 1, REQUEST_BYTES_MAX, REQUEST_BYTES_MAX + 1, (1 << 32) - 1])


def received_as(kind: type[msgspec.Struct], raw: bytes, length: int | None) -> None:
    stream = MemoryStream(PREFIX.pack(len(raw) if length is None else length) + raw)
    with refused_in_a_sentence(Unreachable, Rejected):
        assert isinstance(ControlConnection(stream).recv(kind), kind)
    assert stream.asked_max <= REQUEST_BYTES_MAX


KIND_NUMBERS = st.integers(0, len(_DECODERS) - 1)


@malformed(
    "handshake",
    st.integers(0, len(CONTROLS) - 1),
    KIND_NUMBERS,
    CONTROL_CHANGES,
    count=50,
    examples=[(0, 0, [(0, "add", Nested(b"\x91"))]), (9, 0, [(2, "replace", "")])],
)
def test_a_control_message_with_changed_fields_is_read_or_refused(
    number: int, expected: int, edits: list[Change]
) -> None:
    raw = packed(changed(msgspec.msgpack.decode(msgspec.msgpack.encode(CONTROLS[number])), edits))
    if raw is not None:
        received_as(type(CONTROLS[number]), raw, None)
        received_as(list(_DECODERS)[expected], raw, None)


@malformed("handshake", st.integers(0, len(CONTROLS) - 1), EDITS, LENGTHS, count=50)
def test_a_damaged_control_message_is_read_or_refused_whatever_length_it_announces(
    number: int, edits: list[Edit], length: int | None
) -> None:
    """No more than REQUEST_BYTES_MAX are waited for."""
    received_as(type(CONTROLS[number]), edited(msgspec.msgpack.encode(CONTROLS[number]), edits), length)


HELLO = mpi_link.LinkHello(**{
    item.name: 0 if item.type is int else RunIdentity("m", "s") for item in msgspec.structs.fields(mpi_link.LinkHello)
})  # fmt: skip
MPI_CONTROLS = [msgspec.json.encode(HELLO), msgspec.json.encode(mpi_link.LinkBroken(LossReason.BROKEN, "gone"))]


@malformed("handshake", st.sampled_from([0, 1]), EDITS, count=30)
def test_a_damaged_control_message_over_mpi_is_read_or_refused(number: int, edits: list[Edit]) -> None:
    raw = bytearray(edited(MPI_CONTROLS[number], edits, other=MPI_CONTROLS[0]))
    with refused_in_a_sentence(wire.WireError):
        mpi_link.decode_control(torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8))


@malformed(
    "handshake",
    st.text(max_size=12) | EDITS.map(lambda edits: edited(b"[::1]:7700", edits).decode(errors="replace")),
    count=30,
    examples=[("localhost:" + "9" * DIGITS,)],
)
def test_a_text_is_an_address_or_is_refused(text: str) -> None:
    with refused_in_a_sentence(ConfigurationError):
        assert 0 <= Address.parse(text).port <= 65535


NO_HOSTS = ["", "a\0b", "x" * 70, ".".join("x" * 60 for _ in range(9)), "\ud800", "a..b"]


def endpoints() -> Iterator[st.SearchStrategy[tuple[str, int]]]:
    yield st.tuples(st.just("127.0.0.1"), st.integers(65536, 2**64 - 1) | st.integers(-(2**63), -1))
    yield st.tuples(st.sampled_from(NO_HOSTS[1:]), st.integers(1, 65535))


@malformed("handshake", st.one_of(*endpoints()), count=20, examples=[(("127.0.0.1", 70000),), (("x" * 70, 1),)])
def test_an_endpoint_that_cannot_be_is_unreachable(place: tuple[str, int]) -> None:
    """Rank 0 passes on what a member registers; a name or a port that no system call accepts is only unreachable."""
    with refused_in_a_sentence(Unreachable):
        connect(Address(*place), Credentials(TOKEN, Tls(mode="off")), limit_seconds=1.0)
        raise AssertionError("a connection to a place that cannot be")
