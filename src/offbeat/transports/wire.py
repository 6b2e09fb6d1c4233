"""Messages as bytes: a head of fixed size, what it does not hold of the meta, then the tensors one after the other.

The head comes first because a receiver must know how much to expect before it makes room for it, and it has one size
because some transports can only receive what they have posted. Most metas fit into it, so that a message without
tensors is one frame.

    head    4s magic, u8 version, u8 flags, u8 kind, u8 slot, u32 meta bytes, u64 payload bytes, u32 checksum, u64 how
            many messages of the other side have been taken; then the meta, if it fits; zeros up to HEAD_BYTES.
            Little-endian, as are the tensors.
    meta    msgpack: [key of the message, [its header fields], [[dtype, shape] …], [tensors of each Buffers field]]

Where both ends share memory, the tensors may lie in a slot of it, and only head and meta travel; see `slots.py`.

Nothing that a peer says is believed: names, types, sizes and their sum are checked before there is room for anything,
and there is no pickle. What cannot be read raises `WireError`; the transport then drops the link. A message of our own
that cannot be written raises `ContractViolation`, since the author of the message can mend it.
"""

from __future__ import annotations

import dataclasses
import functools
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
import numpy as np
import torch
from torch import Tensor

from offbeat.core.compression import saved_bytes
from offbeat.core.configuration import Family, from_plain, to_plain
from offbeat.core.messages import Buffers, Message
from offbeat.errors import ContractViolation, OffbeatError

WIRE_VERSION = 2
HEAD_BYTES = 1024
META_BYTES_MAX = 1 << 20
MESSAGE, HEARTBEAT, GOODBYE, TAKEN, SLOT = 0, 1, 2, 3, 4

_MAGIC = b"OFFB"
_HEAD = struct.Struct("<4sBBBBIQIQ")
_COUNT = struct.Struct("<Q")
_INLINE_BYTES_MAX = HEAD_BYTES - _HEAD.size
_CHECKSUM, _IN_SLOT = 1, 2
_FLAGS_AT, _PLACE_AT = 5, 7
_DIMENSIONS_MAX = 8
_CACHED_BYTES_MAX = 512

_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"
)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("tensors travel as they lie in memory, little-endian; this machine is big-endian")


class WireError(OffbeatError):
    """What a peer sent cannot be read."""


@dataclass(frozen=True, slots=True)
class Head:
    """A head that can be what it claims to be. `meta` is there when it came with the head."""

    kind: int
    meta_bytes: int
    payload_bytes: int
    checksum: int | None
    meta: bytes | None
    taken: int = 0
    """How many of our messages the peer has taken."""
    place: int | None = None
    """The slot in which the payload lies; without one it follows."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A message ready to leave: all tensors are flat bytes, `tensors` the message's own memory, empty ones left out.

    `kind` is the name of its type, and `nbytes_uncompressed` what `nbytes` would be if it had not been compressed.
    """

    head: Tensor
    meta: Tensor | None
    tensors: list[Tensor]
    nbytes: int
    kind: str
    nbytes_uncompressed: int

    @property
    def payload_bytes(self) -> int:
        return self.nbytes - HEAD_BYTES - (0 if self.meta is None else self.meta.numel())


class Slot(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Memory that the other side may map: the number of the slot, the file by which to have it, and its size."""

    place: Annotated[int, msgspec.Meta(ge=0, lt=256)]
    file: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]


# Writing


def encode(message: Message, checksum: bool = False) -> Encoded:
    """A message as bytes; its tensors are not copied, unless they are scattered or on another device."""
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
        plan.header.decode(header)  # what a peer could not read is refused here, where the mistake is
        counts = [len(getattr(message, name)) for name in plan.groups]
        meta = _ENCODER.encode((kind.key, msgspec.Raw(header), shapes, counts))
        saved = saved_bytes(message)
    except (TypeError, ValueError, OverflowError, RuntimeError, msgspec.MsgspecError, OffbeatError) as error:
        raise ContractViolation(
            f"the message {kind.__name__} cannot be sent: {error}; header fields are plain data of the declared types, "
            "all else is Tensor or Buffers"
        ) from error
    if len(meta) > META_BYTES_MAX:
        raise ContractViolation(
            f"the header of the message {kind.__name__} takes {len(meta)} bytes, but at most {META_BYTES_MAX} can be "
            "sent; put large data into a Tensor"
        )
    payload_bytes = sum(view.numel() for view in views)
    crc = _checksum(meta, views) if checksum else None
    head = _write_head(MESSAGE, meta, payload_bytes, crc)
    inline = len(meta) <= _INLINE_BYTES_MAX
    rest = None if inline else torch.frombuffer(bytearray(meta), dtype=torch.uint8)
    nbytes = HEAD_BYTES + (0 if inline else len(meta)) + payload_bytes
    return Encoded(head, rest, views, nbytes, kind.__name__, nbytes + saved)


def control(kind: int) -> Tensor:
    """A head that says something by itself: HEARTBEAT, GOODBYE or TAKEN."""
    return _write_head(kind, b"", 0, None)


def tell(head: Tensor, taken: int) -> None:
    """Let a head say how many messages of the other side have been taken so far."""
    _COUNT.pack_into(head.numpy(), _HEAD.size - _COUNT.size, taken)  # type: ignore[arg-type]


def set_slot(head: Tensor, place: int) -> None:
    """Let the head of a message say that its payload lies in a slot, and does not follow."""
    head[_FLAGS_AT] |= _IN_SLOT
    head[_PLACE_AT] = place


def offer(slot: Slot) -> Tensor:
    """A head that says where the other side finds a slot."""
    return _write_head(SLOT, _ENCODER.encode(slot), 0, None)


def _write_head(kind: int, meta: bytes, payload_bytes: int, checksum: int | None) -> Tensor:
    raw = bytearray(HEAD_BYTES)
    flags = 0 if checksum is None else _CHECKSUM
    _HEAD.pack_into(raw, 0, _MAGIC, WIRE_VERSION, flags, kind, 0, len(meta), payload_bytes, checksum or 0, 0)
    if len(meta) <= _INLINE_BYTES_MAX:
        raw[_HEAD.size : _HEAD.size + len(meta)] = meta
    return torch.frombuffer(raw, dtype=torch.uint8)


def _bytes_of(tensor: Tensor) -> tuple[str, int | tuple[int, ...], Tensor]:
    """The dtype's name, the length of a flat tensor or the shape of another, and the memory as bytes."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPE_NAMES:
        what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{what} is not a kind of tensor that can be sent")
    shape: int | tuple[int, ...] = tensor.numel() if tensor.dim() == 1 else tuple(tensor.shape)
    if tensor.dim() > _DIMENSIONS_MAX:
        raise TypeError(f"a tensor has {tensor.dim()} dimensions, at most {_DIMENSIONS_MAX} can be sent")
    flat = tensor.detach()
    if flat.is_complex():
        flat = flat.resolve_conj().resolve_neg()
    flat = flat.cpu().contiguous().as_strided((flat.numel(),), (1,))  # one element may have any stride, and views mind
    return _DTYPE_NAMES[tensor.dtype], shape, flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)


def _checksum(meta: bytes, pieces: list[Tensor]) -> int:
    crc = zlib.crc32(meta)
    for piece in pieces:
        crc = zlib.crc32(cast(Any, piece.numpy()), crc)
    return crc


# Reading


def read_head(raw: Tensor, message_bytes_max: int) -> Head:
    """A head from HEAD_BYTES bytes, which may be used again at once; WireError if it cannot be one."""
    if raw.dtype is not torch.uint8 or raw.numel() != HEAD_BYTES:
        raise WireError(f"a head has {HEAD_BYTES} bytes, but {raw.nbytes} came")
    data = raw.numpy().tobytes()
    magic, version, flags, kind, place, meta_bytes, payload_bytes, crc, taken = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise WireError("what came is not a message of offbeat")
    if version != WIRE_VERSION:
        raise WireError(
            f"the peer speaks version {version} of the wire, but this is version {WIRE_VERSION}; install the same "
            "offbeat everywhere"
        )
    if flags & ~(_CHECKSUM | _IN_SLOT) or (place and not flags & _IN_SLOT) or (crc and not flags & _CHECKSUM):
        raise WireError("a head has bits set that mean nothing")
    if meta_bytes > META_BYTES_MAX or payload_bytes > message_bytes_max:
        raise WireError(
            f"a message announces {meta_bytes} + {payload_bytes} bytes, but at most {META_BYTES_MAX} + "
            f"{message_bytes_max} are taken"
        )
    inline = data[_HEAD.size : _HEAD.size + meta_bytes] if meta_bytes <= _INLINE_BYTES_MAX else None
    if kind == MESSAGE:
        checksum, slot = crc if flags & _CHECKSUM else None, place if flags & _IN_SLOT else None
        return Head(kind, meta_bytes, payload_bytes, checksum, inline, taken, slot)
    if kind == SLOT and inline and not (payload_bytes or flags):
        return Head(kind, meta_bytes, 0, None, inline, taken)
    if kind not in (HEARTBEAT, GOODBYE, TAKEN) or meta_bytes or payload_bytes or flags:
        raise WireError(f"a head of kind {kind} with {meta_bytes} + {payload_bytes} bytes means nothing")
    return Head(kind, 0, 0, None, b"", taken)


def read_slot(head: Head) -> Slot:
    """The slot that such a head offers."""
    try:
        return _SLOT.decode(head.meta or b"")
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"a slot is offered, but cannot be read: {error}") from None


def tensor_sizes(head: Head, meta: bytes) -> list[int]:
    """The bytes of each tensor that follows, as they stand in `Encoded.tensors`: empty ones do not travel."""
    return [nbytes for _, _, nbytes in _read_meta(head, meta)[1] if nbytes]


def decode(head: Head, meta: bytes, payload: Tensor) -> Message:
    """The message. Its tensors are views of `payload`; one that lies across the boundaries of its dtype is a copy."""
    read, tensors = _read_meta(head, meta)
    if payload.dtype is not torch.uint8 or payload.dim() != 1 or payload.numel() != head.payload_bytes:
        raise WireError(f"{payload.nbytes} bytes came, but {head.payload_bytes} were announced")
    if head.checksum is not None and head.checksum != _checksum(meta, [payload]):
        raise WireError(f"the checksum of a message {read.kind} is wrong: it was damaged on its way")
    plan = _plan_of_peer(read.kind)
    try:
        return plan.build(plan.read(read.header), _tensors_in(payload, tensors), read.counts)
    except WireError:
        raise
    except Exception as error:  # a peer's data goes into constructors that may not have expected it
        raise WireError(f"a message {read.kind} cannot be read: {error}") from error


_Length = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_Shape = Annotated[tuple[_Length, ...], msgspec.Meta(max_length=_DIMENSIONS_MAX)]


class _Meta(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    kind: str
    header: msgspec.Raw
    tensors: list[tuple[str, _Length | _Shape]]
    counts: list[_Length]


_ENCODER = msgspec.msgpack.Encoder()
_META = msgspec.msgpack.Decoder(_Meta)
_SLOT = msgspec.msgpack.Decoder(Slot)

_Announced = tuple[torch.dtype, int | tuple[int, ...], int]
"""The dtype, shape and bytes of a tensor that is to come."""


def _read_meta(head: Head, meta: bytes) -> tuple[_Meta, list[_Announced]]:
    if head.kind != MESSAGE or len(meta) != head.meta_bytes:
        raise WireError(f"{len(meta)} bytes of meta came, but {head.meta_bytes} were announced")
    try:
        read = _META.decode(meta)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
        raise WireError(f"the header of a message cannot be read: {error}") from None
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
        raise WireError(f"a message {read.kind} came with {len(tensors)} tensors, which is not how it is made")
    return read, tensors


def _tensors_in(payload: Tensor, announced: list[_Announced]) -> list[Tensor]:
    tensors = []
    first = 0
    for dtype, shape, nbytes in announced:
        if nbytes == 0:
            tensors.append(torch.empty(shape, dtype=dtype))
            continue
        part = payload[first : first + nbytes]
        if dtype is torch.bool and part.max() > 1:
            raise WireError("a tensor of truth values holds something else")
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        typed = part if dtype is torch.uint8 else part.view(dtype)
        tensors.append(typed if isinstance(shape, int) else typed.view(shape))
        first += nbytes
    return tensors


def _plan_of_peer(key: str) -> _Plan:
    kind = Message.kinds.get(key)
    if kind is None:
        raise WireError(f"there is no message called {key[:80]!r} here; every rank must run the same strategy")
    try:
        return _plan(kind)
    except (TypeError, NameError) as error:
        raise WireError(f"a message {key} cannot be read: {error}") from None


# How a kind of message is made


class _Plan:
    """What there is to know about a kind of message, found out once."""

    def __init__(self, kind: type[Message]) -> None:
        hints = typing.get_type_hints(kind)
        fields = [(item.name, hints[item.name]) for item in dataclasses.fields(kind) if item.init]
        self.kind = kind
        self.payload = [(name, hint is Tensor) for name, hint in fields if hint in (Tensor, Buffers)]
        self.singles = sum(single for _, single in self.payload)
        self.groups = [name for name, single in self.payload if not single]
        plain = [(name, hint) for name, hint in fields if hint not in (Tensor, Buffers)]
        self.names = [name for name, _ in plain]
        self.families = [(i, name, hint) for i, (name, hint) in enumerate(plain) if _mentions_family(hint)]
        types = tuple(msgspec.Raw if _mentions_family(hint) else hint for _, hint in plain)
        self.header: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(tuple[types])  # type: ignore[valid-type]
        self.readers: dict[int, Callable[[bytes], Any]] = {
            i: functools.lru_cache(64)(functools.partial(_read_family, hint, name)) for i, name, hint in self.families
        }

    def payload_of(self, message: Message) -> list[Tensor]:
        found: list[Tensor] = []
        for name, single in self.payload:
            if single:
                found.append(getattr(message, name))
            else:
                found.extend(getattr(message, name))
        return found

    def write(self, message: Message) -> bytes:
        values = [getattr(message, name) for name in self.names]
        for i, _, _ in self.families:
            values[i] = msgspec.Raw(_written_family(values[i]))
        try:
            return _ENCODER.encode(values)
        except TypeError:
            return _TOLERANT_ENCODER.encode(values)

    def read(self, header: msgspec.Raw) -> list[Any]:
        values = list(self.header.decode(header))
        for i, name, hint in self.families:
            raw = bytes(values[i])
            read = self.readers[i] if len(raw) <= _CACHED_BYTES_MAX else functools.partial(_read_family, hint, name)
            values[i] = read(raw)
        return values

    def build(self, values: list[Any], tensors: list[Tensor], counts: list[int]) -> Message:
        fields = dict(zip(self.names, values, strict=True))
        first, group = 0, 0
        for name, single in self.payload:
            if single:
                fields[name] = tensors[first]
                first += 1
            else:
                fields[name] = tuple(tensors[first : first + counts[group]])
                first += counts[group]
                group += 1
        return self.kind(**fields)


_PLANS: dict[type[Message], _Plan] = {}
_PLANNING = threading.Lock()


def _plan(kind: type[Message]) -> _Plan:
    plan = _PLANS.get(kind)
    if plan is None:
        with _PLANNING:  # decoders of one type that two threads make at once may be half-made
            plan = _PLANS[kind] = _PLANS.get(kind) or _Plan(kind)
    return plan


def _mentions_family(hint: Any) -> bool:
    """Whether `configuration` has to write and read this, since its types have names there."""
    if isinstance(hint, type) and issubclass(hint, Family):
        return True
    return any(_mentions_family(inner) for inner in typing.get_args(hint))


@functools.lru_cache(256)
def _written_family(value: Any) -> bytes:
    """Configurations are frozen, and the same few of them travel again and again."""
    return _ENCODER.encode(to_plain(value))


def _read_family(hint: Any, name: str, raw: bytes) -> Any:
    return from_plain(hint, msgspec.msgpack.decode(raw), name)


def _number_as_python(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not plain data")


_TOLERANT_ENCODER = msgspec.msgpack.Encoder(enc_hook=_number_as_python)
