"""Any message comes out as it went in; no bytes whatever do harm."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.core.actions import Samples, Seconds
from offbeat.core.messages import Message, Stop, Stopped
from offbeat.core.wire_size import HEAD_BYTES
from offbeat.strategies.hub.hub_worker import Gradient, Parameters, Welcome
from offbeat.transports import wire

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
COUNTS = st.integers(0, 2**63 - 1)
RANGES = st.tuples(COUNTS, COUNTS)
NUMBERS = st.floats(allow_nan=False)
BUDGETS = st.builds(Samples, st.integers(1, 2**40)) | st.builds(
    Seconds, st.floats(0.001, 1e6), st.none() | st.integers(1, 2**40)
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits in any dtype, flat or not, contiguous or every second element of something larger."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.just([draw(st.integers(0, 9))]) | st.lists(st.integers(0, 3), max_size=4))
    scattered = draw(st.booleans())
    size = math.prod(shape) * (2 if scattered else 1)
    raw = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    typed = flat > 127 if dtype is torch.bool else flat.view(dtype)
    return typed.reshape([*shape, 2])[..., 0] if scattered else typed.reshape(shape)


BUFFERS = st.lists(tensors(), max_size=3).map(tuple)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Stop, tensors(), BUFFERS, COUNTS),
    st.builds(Stopped, COUNTS, COUNTS),
    st.builds(Parameters, tensors(), BUFFERS, COUNTS, BUDGETS),
    st.builds(Welcome, tensors(), BUFFERS, COUNTS, BUDGETS, COUNTS, st.lists(RANGES, max_size=80).map(tuple)),
    st.builds(Gradient, tensors(), BUFFERS, COUNTS, NUMBERS, COUNTS, RANGES, NUMBERS, st.booleans()),
)


def header_of(message: Message) -> dict[str, Any]:
    fields = {item.name: getattr(message, item.name) for item in dataclasses.fields(message)}
    return {name: value for name, value in fields.items() if name not in ("parameters", "gradient", "buffers")}


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def frames(message: Message, checksum: bool) -> tuple[Tensor, bytes, Tensor]:
    encoded = wire.encode(message, checksum)
    payload = torch.cat([torch.empty(0, dtype=torch.uint8), *encoded.tensors])
    head = wire.read_head(encoded.head, 1 << 34)
    meta = head.meta if encoded.meta is None else encoded.meta.numpy().tobytes()
    assert meta is not None
    return encoded.head, meta, payload


@given(MESSAGES, st.booleans())
@settings(deadline=None)
def test_any_message_survives_encoding(message: Message, checksum: bool) -> None:
    raw, meta, payload = frames(message, checksum)
    read = wire.decode(wire.read_meta(wire.read_head(raw, 1 << 34), meta), payload)
    assert type(read) is type(message)
    assert header_of(read) == header_of(message)
    for came, went in zip(read.tensors(), message.tensors(), strict=True):
        assert (came.dtype, came.shape) == (went.dtype, went.shape)
        assert came.is_contiguous()
        assert torch.equal(bits(came), bits(went))


@given(st.binary(max_size=HEAD_BYTES), st.booleans())
@settings(max_examples=300, deadline=None)
def test_random_heads_are_read_or_refused(junk: bytes, begins_well: bool) -> None:
    raw = (b"OFFB\x01" + junk if begins_well else junk)[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0")
    with contextlib.suppress(wire.WireError):
        head = wire.read_head(torch.frombuffer(bytearray(raw), dtype=torch.uint8), 1000)
        assert head.payload_bytes <= 1000
        assert head.meta_bytes <= wire.META_BYTES_MAX
        if head.kind == wire.MESSAGE and head.meta is not None:
            announced = wire.read_meta(head, head.meta)
            assert sum(announced.tensor_sizes) == head.payload_bytes
            wire.decode(announced, torch.zeros(head.payload_bytes, dtype=torch.uint8))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(["Stop", "Stopped", "Parameters", "Welcome", "Gradient", "Message", ""])
LIKE_A_META = st.tuples(
    NAMES | PLAIN,
    st.lists(PLAIN, max_size=6) | PLAIN,
    st.lists(st.tuples(st.sampled_from(["float32", "bool", "int64", "qint8"]) | PLAIN, st.integers(-1, 9) | PLAIN))
    | PLAIN,
    st.lists(st.integers(-1, 3) | PLAIN, max_size=2) | PLAIN,
)
METAS = st.binary(max_size=300) | (LIKE_A_META | PLAIN).map(msgspec.msgpack.encode)


@given(METAS, st.integers(0, 64))
@settings(max_examples=200, deadline=None)
def test_random_metas_are_read_or_refused(meta: bytes, payload_bytes: int) -> None:
    head = wire.Head(wire.MESSAGE, len(meta), payload_bytes, None, meta)
    with contextlib.suppress(wire.WireError):
        announced = wire.read_meta(head, meta)
        assert sum(announced.tensor_sizes) == payload_bytes
        wire.decode(announced, torch.ones(payload_bytes, dtype=torch.uint8))


@given(MESSAGES, st.data())
@settings(max_examples=300, deadline=None)
def test_a_message_with_one_byte_changed_is_read_or_refused(message: Message, data: st.DataObject) -> None:
    _, meta, payload = frames(message, checksum=False)
    changed = bytearray(meta)
    changed[data.draw(st.integers(0, len(meta) - 1))] = data.draw(st.integers(0, 255))
    head = wire.Head(wire.MESSAGE, len(meta), payload.numel(), None, bytes(changed))
    with contextlib.suppress(wire.WireError):
        announced = wire.read_meta(head, bytes(changed))
        assert sum(announced.tensor_sizes) == payload.numel()
        wire.decode(announced, payload)


@given(MESSAGES, st.data())
@settings(deadline=None)
def test_a_checksum_finds_any_byte_that_changed(message: Message, data: st.DataObject) -> None:
    raw, meta, payload = frames(message, checksum=True)
    position = data.draw(st.integers(0, len(meta) + payload.numel() - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    changed = bytearray(meta)
    if position < len(meta):
        changed[position] ^= bit
    else:
        payload[position - len(meta)] ^= bit
    head = wire.read_head(raw, 1 << 34)
    try:
        wire.decode(wire.read_meta(head, bytes(changed)), payload)
    except wire.WireError:
        return
    raise AssertionError("damage was not noticed")
