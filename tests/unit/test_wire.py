"""The wire format: what is encoded and decoded, and what is rejected. For random bytes see the property tests."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.core.actions import Budget, Samples, Seconds
from offbeat.core.messages import Buffers, Message, Stop, Stopped
from offbeat.core.wire_size import HEAD_BYTES
from offbeat.errors import ContractViolation
from offbeat.strategies.hub.hub_worker import Gradient, Parameters, Welcome
from offbeat.transports import wire
from offbeat.transports.transport import MESSAGE_BYTES_MAX
from offbeat.transports.wire import (
    GOODBYE,
    HEARTBEAT,
    MESSAGE,
    META_BYTES_MAX,
    SLOT,
    WIRE_VERSION,
    WireError,
)

HEAD = struct.Struct("<4sBBBBIQI")


@dataclass(frozen=True)
class Odd(Message):
    """Fields of every kind, in no particular order."""

    first: Tensor
    budgets: tuple[Budget, ...]
    left: Buffers
    note: str
    maybe: Budget | None
    right: Buffers
    number: float
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Unencodable(Message):
    """A field that cannot be encoded."""

    thing: object


@dataclass(frozen=True)
class Picky(Message):
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ArithmeticError("negative")


KEYS = {kind.__name__: kind.key for kind in (Stop, Stopped, Picky, Parameters)}


def gradient(size: int = 5) -> Gradient:
    buffers = (torch.arange(3.0), torch.tensor([1, 2]))
    return Gradient(torch.randn(size), buffers, 8, 1.5, 3, (8, 16), 0.25, True)


def payload_of(encoded: wire.Encoded) -> Tensor:
    return torch.cat(encoded.tensors) if encoded.tensors else torch.empty(0, dtype=torch.uint8)


def roundtrip(message: Message, checksum: bool = False) -> Message:
    encoded = wire.encode(message, checksum)
    head = wire.read_head(encoded.head, MESSAGE_BYTES_MAX)
    assert (head.meta is None) == (encoded.meta is not None)
    meta = head.meta if encoded.meta is None else bytes(encoded.meta.tolist())
    assert meta is not None
    payload = payload_of(encoded)
    assert wire.read_meta(head, meta).tensor_sizes == [piece.numel() for piece in encoded.tensors]
    assert encoded.size.nbytes == HEAD_BYTES + (0 if encoded.meta is None else len(meta)) + payload.numel()
    return wire.decode(wire.read_meta(head, meta), payload)


def same(one: Message, other: Message) -> bool:
    headers = [
        {name: value for name, value in vars(message).items() if not _holds_tensors(value)} for message in (one, other)
    ]
    pairs = list(zip(one.tensors(), other.tensors(), strict=True))
    return (
        type(one) is type(other)
        and headers[0] == headers[1]
        and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    )


def _holds_tensors(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value))


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize(
    "message",
    [
        gradient(),
        gradient(0),
        Parameters(torch.ones(4), (), 1, Seconds(0.5, samples_max=64)),
        Welcome(torch.ones(4), (), 1, Samples(32), 96, ((0, 32), (64, 96))),
        Welcome(torch.ones(4), (), 1, Samples(32), 96, tuple((i, i + 1) for i in range(0, 2000, 2))),
        Stop(torch.ones(3, dtype=torch.float64), (torch.tensor([True, False]),), 9),
        Stopped(100, 100),
        Odd(torch.tensor(3.0), (Samples(2), Seconds(1)), (torch.ones(2, 3),), "è", None, (), float("inf"), ((1, 2),)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_decoded_message_equals_the_encoded_one(message: Message, checksum: bool) -> None:
    assert same(roundtrip(message, checksum), message)


def test_a_long_header_follows_the_head() -> None:
    long = Odd(torch.ones(1), (), (), "x" * 5000, None, (), 0.0, ())
    assert wire.encode(long).meta is not None
    assert same(roundtrip(long), long)


def test_neither_encoding_nor_decoding_copies_tensors() -> None:
    message = gradient()
    encoded = wire.encode(message)
    assert encoded.tensors[0].data_ptr() == message.gradient.data_ptr()
    head = wire.read_head(encoded.head, MESSAGE_BYTES_MAX)
    payload = payload_of(encoded)
    read = wire.decode(wire.read_meta(head, head.meta or b""), payload)
    assert read.tensors()[0].data_ptr() == payload.data_ptr()
    assert read.tensors()[1].data_ptr() == payload.data_ptr() + 20


def test_strided_tensors_and_those_with_a_gradient_are_sent_by_value() -> None:
    strided = torch.arange(20.0).reshape(4, 5).t()[1]
    with_gradient = torch.ones(3, requires_grad=True)
    read = roundtrip(Stop(strided, (with_gradient, torch.ones(2, dtype=torch.complex64).conj()), 0))
    assert read.tensors()[0].tolist() == [1.0, 6.0, 11.0, 16.0]
    assert not read.tensors()[1].requires_grad


def test_an_unaligned_tensor_is_copied() -> None:
    message = Stop(torch.tensor([True, False, True]), (torch.tensor([1.5, 2.5]), torch.tensor([7])), 0)
    assert same(roundtrip(message), message)


def test_numpy_scalars_are_sent_as_numbers() -> None:
    sent = gradient().__class__(torch.ones(1), (), np.int64(3), np.float32(0.5), 1, (0, 3), np.float64(2), np.bool_(1))
    read = roundtrip(sent)
    assert isinstance(read, Gradient)
    assert (read.samples, read.loss, read.seconds, read.finite) == (3, 0.5, 2.0, True)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (Stopped("many", 1), "Expected `int`"),  # type: ignore[arg-type]
        (Stopped(1 << 70, 1), "Stopped"),
        (Stop([1.0], (), 1), "list is not a kind of tensor"),  # type: ignore[arg-type]
        (Stop(torch.ones(1), None, 1), "Stop"),  # type: ignore[arg-type]
        (Stop(torch.ones([1] * 9), (), 1), "9 dimensions"),
        (Stop(torch.empty(1, dtype=torch.bits8), (), 1), "bits8"),
        (Stop(torch.empty(1, device="meta"), (), 1), "Stop"),
        (Stop(torch.eye(2).to_sparse(), (), 1), "Stop"),
        (Unencodable(object()), "Unencodable"),
        (Odd(torch.ones(1), (), (), "x" * META_BYTES_MAX, None, (), 0.0, ()), "takes"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_message_that_cannot_be_encoded_is_rejected_at_its_sender(message: Message, sentence: str) -> None:
    with pytest.raises(ContractViolation, match=sentence) as caught:
        wire.encode(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [HEARTBEAT, GOODBYE])
def test_control_heads_have_a_kind_and_nothing_else(kind: int) -> None:
    head = wire.read_head(wire.control(kind), 0)
    assert (head.kind, head.meta_bytes, head.payload_bytes, head.meta) == (kind, 0, 0, b"")
    with pytest.raises(WireError):
        wire.read_meta(head, b"")


def raw_head(
    magic: bytes = b"OFFB",
    version: int = WIRE_VERSION,
    flags: int = 0,
    kind: int = MESSAGE,
    slot: int = 0,
    meta: int = 4,
    payload: int = 0,
    checksum: int = 0,
) -> Tensor:
    raw = HEAD.pack(magic, version, flags, kind, slot, meta, payload, checksum)
    return torch.frombuffer(bytearray(raw.ljust(HEAD_BYTES, b"\0")), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (torch.zeros(HEAD_BYTES, dtype=torch.uint8), "not a message of offbeat"),
        (torch.zeros(10, dtype=torch.uint8), "10 were received"),
        (raw_head(version=1), "version 1"),
        (raw_head(flags=4), "bits"),
        (raw_head(slot=1), "bits"),
        (raw_head(checksum=1), "bits"),
        (raw_head(kind=9), "kind 9"),
        (raw_head(kind=HEARTBEAT), "kind 1"),
        (raw_head(kind=HEARTBEAT, flags=2, meta=0), "kind 1"),
        (raw_head(kind=SLOT, meta=0), "kind 4"),
        (raw_head(kind=SLOT, flags=2), "kind 4"),
        (raw_head(kind=SLOT, payload=1), "kind 4"),
        (raw_head(kind=SLOT, meta=HEAD_BYTES), "kind 4"),
        (raw_head(kind=GOODBYE, meta=0, payload=1), "kind 2"),
        (raw_head(meta=META_BYTES_MAX + 1), "announces"),
        (raw_head(payload=1001), "at most 1048576 \\+ 1000"),
        (raw_head(payload=(1 << 64) - 1), "announces"),
    ],
)
def test_an_invalid_head_is_rejected(raw: Tensor, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        wire.read_head(raw, 1000)


@pytest.mark.parametrize(
    "meta",
    [
        [],
        ["Stopped"],
        ["Unknown", [], [], []],
        [7, [1, 2], [], []],
        ["Stopped", [1], [], []],
        ["Stopped", [1, 2, 3], [], []],
        ["Stopped", [1, "2"], [], []],
        ["Stopped", [1, 2], [], [], []],
        ["Stopped", [1, 2], [["float32", 0]], []],
        ["Stop", [1], [["float32", 2]], []],
        ["Stop", [1], [["float32", 2]], [1]],
        ["Stop", [1], [["float32", 2]], [-1]],
        ["Stop", [1], [["float32", 2], ["float32", -2], ["float32", 2]], [2]],
        ["Stop", [1], [["float31", 2]], [0]],
        ["Stop", [1], [["load", 2]], [0]],
        ["Stop", [1], [["float32", 3]], [0]],
        ["Stop", [1], [["float32", 2.0]], [0]],
        ["Stop", [1], [["float32", 1 << 60]], [0]],
        ["Stop", [1], [["float32", [2, 1, 1, 1, 1, 1, 1, 1, 1]]], [0]],
        ["Stop", [1], [["float32", [1 << 40, 1 << 40]]], [0]],
        ["Stop", [1], [["float32", 2], ["float32", [0, 1 << 48, 1 << 48]]], [1]],
        ["Stop", [1], [["bool", 8]], [0]],
        ["Picky", [-1], [["float32", 2]], []],
        ["Parameters", [1, "niagara"], [["float32", 2]], [0]],
        ["Parameters", [1, {"name": "samples", "count": -1}], [["float32", 2]], [0]],
        ["Parameters", [1, {"name": "samples", "count": "1e999"}], [["float32", 2]], [0]],
        ["Parameters", [1, {"name": ["samples"]}], [["float32", 2]], [0]],
        ["Parameters", [1, {3: "samples"}], [["float32", 2]], [0]],
        ["Parameters", [1, None], [["float32", 2]], [0]],
    ],
    ids=repr,
)
def test_an_invalid_meta_is_rejected(meta: list[object]) -> None:
    packed = msgspec.msgpack.encode([KEYS.get(item, item) if isinstance(item, str) else item for item in meta])
    head = wire.Head(MESSAGE, len(packed), 8, None, packed)
    with pytest.raises(WireError):
        wire.decode(wire.read_meta(head, packed), torch.full((8,), 255, dtype=torch.uint8))


def test_damage_is_detected_with_checksums() -> None:
    encoded = wire.encode(gradient(), checksum=True)
    head = wire.read_head(encoded.head, MESSAGE_BYTES_MAX)
    payload = payload_of(encoded)
    payload[3] ^= 1
    with pytest.raises(WireError, match="damaged"):
        wire.decode(wire.read_meta(head, head.meta or b""), payload)


def test_sizes_must_be_those_that_were_announced() -> None:
    encoded = wire.encode(gradient())
    head = wire.read_head(encoded.head, MESSAGE_BYTES_MAX)
    meta = head.meta or b""
    payload = payload_of(encoded)
    for wrong in (payload[:-1], payload.to(torch.int16), payload.reshape(2, -1)):
        with pytest.raises(WireError):
            wire.decode(wire.read_meta(head, meta), wrong)
    with pytest.raises(WireError):
        wire.decode(wire.read_meta(head, meta[:-1]), payload)


def test_a_head_names_the_slot_of_its_payload() -> None:
    encoded = wire.encode(gradient(), checksum=True)
    assert encoded.payload_bytes == payload_of(encoded).numel()
    assert wire.read_head(encoded.head, MESSAGE_BYTES_MAX).slot is None
    before = encoded.head.clone()
    wire.set_slot(encoded.head, 3)
    head = wire.read_head(encoded.head, MESSAGE_BYTES_MAX)
    assert (head.slot, head.payload_bytes) == (3, encoded.payload_bytes)
    assert isinstance(wire.decode(wire.read_meta(head, head.meta or b""), payload_of(encoded)), Gradient)
    wire.set_slot(encoded.head, None)
    assert torch.equal(encoded.head, before)


def test_a_slot_is_offered_in_a_head_of_its_own() -> None:
    slot = wire.Slot(4, 17, 1 << 20)
    head = wire.read_head(wire.offer(slot), 0)
    assert (head.kind, head.payload_bytes, head.slot) == (SLOT, 0, None)
    assert wire.read_slot(head) == slot


@pytest.mark.parametrize(
    "offered", [[], [1, 2], [256, 3, 4096], [0, -1, 4096], [0, 3, 0], [0, 3, 1 << 60], [0, 3, 4096, 1], ["0", 3, 4096]]
)
def test_an_invalid_offer_of_a_slot_is_rejected(offered: list[object]) -> None:
    packed = msgspec.msgpack.encode(offered)
    with pytest.raises(WireError, match="the offer of a slot cannot be decoded"):
        wire.read_slot(wire.Head(SLOT, len(packed), 0, None, packed))
