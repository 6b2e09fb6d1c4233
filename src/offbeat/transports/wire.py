"""The wire format: a head of fixed size, the part of the meta that does not fit into it, then the tensors in order.

The head comes first because a receiver must know the sizes before it allocates memory, and it has a fixed size because
some transports can only receive into memory that was posted in advance. Most metas fit into the head, so that a message
without tensors is one frame.

    head    4s magic, u8 version, u8 flags, u8 kind, u8 slot, u32 meta bytes, u64 payload bytes, u32 checksum, u64
            number of acknowledged messages of the receiver; then the meta, if it fits; zeros up to HEAD_BYTES.
            Little-endian, as are the tensors.
    meta    msgpack: [key of the message, [its header fields], [[dtype, shape] …], [tensors of each Buffers field]]

Where both ends share memory, the tensors may be in a slot of it, and only head and meta travel; see `shared_memory.py`.

Nothing that a peer sends is trusted: names, types, sizes and their sum are checked before any memory is allocated, and
there is no pickle. What cannot be decoded raises `WireError`, and the transport drops the link. A message of this rank
that cannot be encoded raises `ContractViolation`, since the author of the message can fix it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import struct
import sys
import threading
import typing
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec
import torch
from torch import Tensor

from offbeat.core.compression import saved_bytes
from offbeat.core.configuration import from_plain
from offbeat.core.device_transfer import to_host
from offbeat.core.messages import Buffers, Message
from offbeat.core.wire_size import (
    HEAD_BYTES,
    META_INLINE_BYTES_MAX,
    PLAIN_ENCODER,
    MessageSize,
    cannot_be_sent,
    encoded_configuration,
    mentions_configuration,
    shape_on_wire,
)
from offbeat.errors import ContractViolation, OffbeatError, shortened

WIRE_VERSION = 3
META_BYTES_MAX = 1 << 20
MESSAGE, HEARTBEAT, GOODBYE, SLOT = 0, 1, 2, 4

_MAGIC = b"OFFB"
_HEAD = struct.Struct("<4sBBBBIQIQ")
_COUNT = struct.Struct("<Q")
assert HEAD_BYTES - _HEAD.size == META_INLINE_BYTES_MAX
_CHECKSUM, _IN_SLOT = 1, 2
_FLAGS_OFFSET, _SLOT_OFFSET = 5, 7
_DIMENSIONS_MAX = 8
_CACHED_BYTES_MAX = 512

_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"
)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("tensors are sent little-endian, as they are in memory; this machine is big-endian")


class WireError(OffbeatError):
    """Data of a peer cannot be decoded."""


@dataclass(frozen=True, slots=True)
class Head:
    """A valid head. `meta` is None where it does not fit into the head."""

    kind: int
    meta_bytes: int
    payload_bytes: int
    checksum: int | None
    meta: bytes | None
    acknowledged: int = 0
    """Messages of this rank that the peer has received."""
    slot: int | None = None
    """Number of the slot that holds the payload; None if the payload follows."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A message ready to be sent, as flat bytes. `tensors` is the memory of the message itself, without empty ones.

    `size` counts all of these bytes.
    """

    head: Tensor
    meta: Tensor | None
    tensors: list[Tensor]
    size: MessageSize

    @property
    def payload_bytes(self) -> int:
        return self.size.nbytes - HEAD_BYTES - (0 if self.meta is None else self.meta.numel())

    @property
    def opening(self) -> list[Tensor]:
        """What precedes the payload."""
        return [self.head] if self.meta is None else [self.head, self.meta]


class Slot(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """An offer of shared memory: the number of the slot, the sender's file descriptor, and the size."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=256)]
    file: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]


# Encoding


def encode(message: Message, checksum: bool = False) -> Encoded:
    """A message as bytes; tensors are copied only if they are not contiguous or not on the CPU."""
    kind = type(message)
    try:
        plan = _plan(kind)
        views, shapes = [], []
        for tensor in plan.payload_of(message):
            name, shape, view = _bytes_of(tensor)
            shapes.append((name, shape))
            if view.numel():
                views.append(view)
        header = plan.write(message)
        plan.header.decode(header)  # what the peer could not decode is rejected here, where the mistake is
        counts = [len(getattr(message, name)) for name in plan.groups]
        meta = PLAIN_ENCODER.encode((kind.key, msgspec.Raw(header), shapes, counts))
        saved = saved_bytes(message)
    except (TypeError, ValueError, OverflowError, RuntimeError, msgspec.MsgspecError, OffbeatError) as error:
        raise cannot_be_sent(kind, error) from error
    if len(meta) > META_BYTES_MAX:
        raise ContractViolation(
            f"the header of the message {kind.__name__} takes {len(meta)} bytes, but at most {META_BYTES_MAX} can be "
            "sent; put large data into a Tensor"
        )
    payload_bytes = sum(view.numel() for view in views)
    crc = _checksum(meta, views) if checksum else None
    head = _write_head(MESSAGE, meta, payload_bytes, crc)
    inline = len(meta) <= META_INLINE_BYTES_MAX
    rest = None if inline else torch.frombuffer(bytearray(meta), dtype=torch.uint8)
    nbytes = HEAD_BYTES + (0 if inline else len(meta)) + payload_bytes
    return Encoded(head, rest, views, MessageSize(kind, nbytes, nbytes + saved))


def control(kind: int) -> Tensor:
    """A head without meta and payload: HEARTBEAT or GOODBYE."""
    return _write_head(kind, b"", 0, None)


def set_acknowledged(head: Tensor, count: int) -> None:
    """Set the number of messages of the peer that have been received so far."""
    _COUNT.pack_into(head.numpy(), _HEAD.size - _COUNT.size, count)  # type: ignore[arg-type]


def set_slot(head: Tensor, number: int | None) -> None:
    """Declare that the payload of a message is in a slot, and does not follow; None: it follows."""
    flags = int(head[_FLAGS_OFFSET])
    head[_FLAGS_OFFSET] = flags & ~_IN_SLOT if number is None else flags | _IN_SLOT
    head[_SLOT_OFFSET] = number or 0


def offer(slot: Slot) -> Tensor:
    """A head that offers a slot to the peer."""
    return _write_head(SLOT, PLAIN_ENCODER.encode(slot), 0, None)


def _write_head(kind: int, meta: bytes, payload_bytes: int, checksum: int | None) -> Tensor:
    raw = bytearray(HEAD_BYTES)
    flags = 0 if checksum is None else _CHECKSUM
    _HEAD.pack_into(raw, 0, _MAGIC, WIRE_VERSION, flags, kind, 0, len(meta), payload_bytes, checksum or 0, 0)
    if len(meta) <= META_INLINE_BYTES_MAX:
        raw[_HEAD.size : _HEAD.size + len(meta)] = meta
    return torch.frombuffer(raw, dtype=torch.uint8)


def _bytes_of(tensor: Tensor) -> tuple[str, int | tuple[int, ...], Tensor]:
    """Name of the dtype, the length of a flat tensor or the shape of another, and the memory as bytes."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPE_NAMES:
        name = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} is not a kind of tensor that can be sent")
    if tensor.dim() > _DIMENSIONS_MAX:
        raise TypeError(f"a tensor has {tensor.dim()} dimensions, at most {_DIMENSIONS_MAX} can be sent")
    flat = tensor.detach()
    if flat.is_complex():
        flat = flat.resolve_conj().resolve_neg()
    # A tensor of one element may have any stride, which `view` would reject.
    flat = to_host(flat).contiguous().as_strided((flat.numel(),), (1,))
    view = flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)
    return _DTYPE_NAMES[tensor.dtype], shape_on_wire(tensor), view


def _checksum(meta: bytes, pieces: list[Tensor]) -> int:
    crc = zlib.crc32(meta)
    for piece in pieces:
        crc = zlib.crc32(cast(Any, piece.numpy()), crc)
    return crc


# Decoding


def read_head(raw: Tensor, message_bytes_max: int) -> Head:
    """Decode HEAD_BYTES bytes, which may be overwritten afterwards; raises WireError."""
    if raw.dtype is not torch.uint8 or raw.numel() != HEAD_BYTES:
        raise WireError(f"a head has {HEAD_BYTES} bytes, but {raw.nbytes} were received")
    data = raw.numpy().tobytes()
    magic, version, flags, kind, slot, meta_bytes, payload_bytes, crc, acknowledged = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise WireError("the received data is not a message of offbeat")
    if version != WIRE_VERSION:
        raise WireError(
            f"the peer uses version {version} of the wire format, but this rank version {WIRE_VERSION}; install the "
            "same offbeat everywhere"
        )
    if flags & ~(_CHECKSUM | _IN_SLOT) or (slot and not flags & _IN_SLOT) or (crc and not flags & _CHECKSUM):
        raise WireError("a head has undefined bits set")
    if meta_bytes > META_BYTES_MAX or payload_bytes > message_bytes_max:
        raise WireError(
            f"a message announces {meta_bytes} + {payload_bytes} bytes, but at most {META_BYTES_MAX} + "
            f"{message_bytes_max} are accepted"
        )
    inline = data[_HEAD.size : _HEAD.size + meta_bytes] if meta_bytes <= META_INLINE_BYTES_MAX else None
    if kind == MESSAGE:
        checksum = crc if flags & _CHECKSUM else None
        payload_slot = slot if flags & _IN_SLOT else None
        return Head(kind, meta_bytes, payload_bytes, checksum, inline, acknowledged, payload_slot)
    if kind == SLOT and inline and not (payload_bytes or flags):
        return Head(kind, meta_bytes, 0, None, inline, acknowledged)
    if kind not in (HEARTBEAT, GOODBYE) or meta_bytes or payload_bytes or flags:
        raise WireError(f"a head of kind {kind} with {meta_bytes} + {payload_bytes} bytes is not defined")
    return Head(kind, 0, 0, None, b"", acknowledged)


def read_slot(head: Head) -> Slot:
    """The offer of a head of kind SLOT."""
    try:
        return _SLOT.decode(head.meta or b"")
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"the offer of a slot cannot be decoded: {shortened(error)}") from None


_Announced = tuple[torch.dtype, int | tuple[int, ...], int]
"""Dtype, shape and bytes of an announced tensor."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A message without its payload. `raw` is its meta as received."""

    head: Head
    raw: bytes
    plan: _Plan
    header: msgspec.Raw
    tensors: list[_Announced]
    counts: list[int]

    @property
    def tensor_sizes(self) -> list[int]:
        """Bytes of each tensor that follows, as in `Encoded.tensors`: empty ones are not sent."""
        return [nbytes for _, _, nbytes in self.tensors if nbytes]


def decode(announced: Announcement, payload: Tensor) -> Message:
    """The message. Its tensors are views of `payload`, or copies where they are not aligned to their dtype."""
    head, plan, kind = announced.head, announced.plan, announced.plan.kind.key
    if payload.dtype is not torch.uint8 or payload.dim() != 1 or payload.numel() != head.payload_bytes:
        raise WireError(f"{payload.nbytes} bytes were received, but {head.payload_bytes} were announced")
    if head.checksum is not None and head.checksum != _checksum(announced.raw, [payload]):
        raise WireError(f"the checksum of a message {kind} is wrong: it was damaged in transit")
    try:
        return plan.build(plan.read(announced.header), _tensors_in(payload, announced.tensors), announced.counts)
    except WireError:
        raise
    except Exception as error:  # the constructor of a message may fail on a peer's data
        raise WireError(f"a message {kind} cannot be decoded: {error}") from error


_Length = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_Shape = Annotated[tuple[_Length, ...], msgspec.Meta(max_length=_DIMENSIONS_MAX)]


class _Meta(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    kind: str
    header: msgspec.Raw
    tensors: list[tuple[str, _Length | _Shape]]
    counts: list[_Length]


_META = msgspec.msgpack.Decoder(_Meta)
_SLOT = msgspec.msgpack.Decoder(Slot)


def read_meta(head: Head, meta: bytes) -> Announcement:
    """Decode a meta; raises WireError unless its tensors take the bytes that the head announces."""
    if head.kind != MESSAGE or len(meta) != head.meta_bytes:
        raise WireError(f"{len(meta)} bytes of meta were received, but {head.meta_bytes} were announced")
    try:
        read = _META.decode(meta)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
        raise WireError(f"the header of a message cannot be decoded: {shortened(error)}") from None
    plan = _plan_of_peer(read.kind)
    tensors: list[_Announced] = []
    total = 0
    for name, shape in read.tensors:
        dtype = _DTYPES.get(name)
        if dtype is None:
            raise WireError(f"a message {read.kind} holds a tensor of an unknown dtype")
        nbytes = (shape if isinstance(shape, int) else math.prod(shape)) * dtype.itemsize
        total += nbytes
        tensors.append((dtype, shape, nbytes))
    if total != head.payload_bytes:
        raise WireError(f"the tensors of a message {read.kind} take {total} bytes, not {head.payload_bytes}")
    if len(read.counts) != len(plan.groups) or plan.singles + sum(read.counts) != len(tensors):
        raise WireError(f"a message {read.kind} has {len(tensors)} tensors, which does not match its fields")
    return Announcement(head, meta, plan, read.header, tensors, read.counts)


def _tensors_in(payload: Tensor, announced: list[_Announced]) -> list[Tensor]:
    tensors = []
    parts = payload.split_with_sizes([nbytes for _, _, nbytes in announced])
    for (dtype, shape, nbytes), part in zip(announced, parts, strict=True):
        if nbytes == 0:
            tensors.append(torch.empty(shape, dtype=dtype))
            continue
        if dtype is torch.bool and part.max() > 1:
            raise WireError("a tensor of type bool holds values other than 0 and 1")
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        typed = part if dtype is torch.uint8 else part.view(dtype)
        tensors.append(typed if isinstance(shape, int) else typed.view(shape))
    return tensors


def _plan_of_peer(key: str) -> _Plan:
    kind = Message.kinds.get(key)
    if kind is None:
        raise WireError(f"there is no message called {key[:80]!r} here; every rank must run the same strategy")
    try:
        return _plan(kind)
    except (TypeError, NameError) as error:
        raise WireError(f"a message {key} cannot be decoded: {error}") from None


# The layout of a message type


class _Plan:
    """Fields of a message type, analysed once."""

    def __init__(self, kind: type[Message]) -> None:
        hints = typing.get_type_hints(kind)
        fields = [(item.name, hints[item.name]) for item in dataclasses.fields(kind) if item.init]
        self.kind = kind
        self.payload = [(name, hint is Tensor) for name, hint in fields if hint in (Tensor, Buffers)]
        self.singles = sum(single for _, single in self.payload)
        self.groups = [name for name, single in self.payload if not single]
        plain = [(name, hint) for name, hint in fields if hint not in (Tensor, Buffers)]
        self.names = [name for name, _ in plain]
        self.families = [(i, name, hint) for i, (name, hint) in enumerate(plain) if mentions_configuration(hint)]
        types = tuple(msgspec.Raw if mentions_configuration(hint) else hint for _, hint in plain)
        self.header: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(tuple[types])  # type: ignore[valid-type]
        self.readers: dict[int, Callable[[bytes], Any]] = {
            i: functools.lru_cache(64)(functools.partial(_read_family, hint, name)) for i, name, hint in self.families
        }

    def payload_of(self, message: Message) -> list[Tensor]:
        tensors: list[Tensor] = []
        for name, is_single in self.payload:
            value = getattr(message, name)
            tensors.extend([value] if is_single else value)
        return tensors

    def write(self, message: Message) -> bytes:
        values = [getattr(message, name) for name in self.names]
        for i, _, _ in self.families:
            values[i] = msgspec.Raw(encoded_configuration(values[i]))
        return PLAIN_ENCODER.encode(values)

    def read(self, header: msgspec.Raw) -> list[Any]:
        values = list(self.header.decode(header))
        for i, name, hint in self.families:
            raw = bytes(values[i])
            read = self.readers[i] if len(raw) <= _CACHED_BYTES_MAX else functools.partial(_read_family, hint, name)
            values[i] = read(raw)
        return values

    def build(self, values: list[Any], tensors: list[Tensor], counts: list[int]) -> Message:
        fields = dict(zip(self.names, values, strict=True))
        next_tensors, next_counts = iter(tensors), iter(counts)
        for name, is_single in self.payload:
            if is_single:
                fields[name] = next(next_tensors)
            else:
                fields[name] = tuple(itertools.islice(next_tensors, next(next_counts)))
        return self.kind(**fields)


_PLANS: dict[type[Message], _Plan] = {}
_PLANNING = threading.Lock()


def _plan(kind: type[Message]) -> _Plan:
    plan = _PLANS.get(kind)
    if plan is None:
        with _PLANNING:  # two threads that make the decoder of one type at once crash the process
            plan = _PLANS[kind] = _PLANS.get(kind) or _Plan(kind)
    return plan


def _read_family(hint: Any, name: str, raw: bytes) -> Any:
    return from_plain(hint, msgspec.msgpack.decode(raw), name)
