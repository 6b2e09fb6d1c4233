"""The size of a message on the wire: what engines count as traffic and limit bandwidth by.

A message is sent as a head of HEAD_BYTES, its meta if that does not fit into the head, and its tensors; see
`transports/wire.py`. The meta is msgpack: the key of the message, its header fields, dtype and shape of each tensor.

Most messages are not encoded for that: an upper bound of the meta is derived once from the declared types of the
fields, and where it fits into the head, the size is a sum over the tensors. A meta that may be too long is encoded
without the tensors, which is faster than a computation in Python.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from torch import Tensor

from offbeat.core.compression import is_encoded, saved_bytes
from offbeat.core.configuration import Family, to_plain
from offbeat.core.messages import Buffers, Message, payload_fields
from offbeat.errors import ContractViolation, OffbeatError

HEAD_BYTES = 1024
"""The size of the head of every message."""
META_INLINE_BYTES_MAX = HEAD_BYTES - 32
"""The longest meta that fits into the head, after its fixed fields."""

_TENSOR_META_BYTES_MAX = 90
"""Dtype and shape of a tensor: a pair, a name of up to 15 characters, and up to 8 dimensions."""
_NUMBER_BYTES_MAX = 9
_PREFIX_BYTES_MAX = 5
"""What precedes a sequence, a dictionary or a text."""

_UNLIMITED = META_INLINE_BYTES_MAX + 1
"""In place of an upper bound: the length has to be computed."""


class MessageSize(NamedTuple):
    """The kind of a message, its bytes on the wire, and what these would be without compression."""

    kind: type[Message]
    nbytes: int
    nbytes_uncompressed: int


def wire_size(message: Message) -> MessageSize:
    """The size of a message; engines call this for every message.

    Raises ContractViolation for a header that cannot be sent, where that is noticed.
    """
    kind = type(message)
    sizing = _SIZINGS.get(kind) or _new_sizing(kind)
    nbytes, meta_bytes_max = HEAD_BYTES, sizing.bytes_max
    for name, is_single in sizing.payload:
        value = getattr(message, name)
        for tensor in (value,) if is_single else value:
            nbytes += tensor.nbytes
            meta_bytes_max += _TENSOR_META_BYTES_MAX
    for name, element_bytes_max in sizing.by_length:
        meta_bytes_max += len(getattr(message, name)) * element_bytes_max
    for name in sizing.configurations:
        configuration = type(getattr(message, name))
        meta_bytes_max += _CONFIGURATIONS.get(configuration) or _new_configuration(configuration)
    if meta_bytes_max > META_INLINE_BYTES_MAX:
        try:
            meta_bytes = sizing.meta_bytes(message)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError, OffbeatError) as error:
            raise cannot_be_sent(kind, error) from error
        if meta_bytes > META_INLINE_BYTES_MAX:
            nbytes += meta_bytes
    for name in sizing.compressible:
        if is_encoded(getattr(message, name)):
            return MessageSize(kind, nbytes, nbytes + saved_bytes(message))
    return MessageSize(kind, nbytes, nbytes)


def cannot_be_sent(kind: type[Message], error: Exception) -> ContractViolation:
    """The error for a message that cannot be encoded."""
    return ContractViolation(
        f"the message {kind.__name__} cannot be sent: {error}; header fields are plain data of the declared types, "
        "all else is Tensor or Buffers"
    )


# What is encoded in the same way here and on the wire


def _number_as_python(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not plain data")


PLAIN_ENCODER = msgspec.msgpack.Encoder(enc_hook=_number_as_python)


def _encoded_bytes(value: Any) -> int:
    return len(PLAIN_ENCODER.encode(value))


@functools.lru_cache(256)
def encoded_configuration(value: Any) -> bytes:
    """A header field that holds a configuration. Cached: the same few are sent again and again."""
    return PLAIN_ENCODER.encode(to_plain(value))


def mentions_configuration(hint: Any) -> bool:
    """Whether a type holds a configuration family, which is sent as plain data."""
    if isinstance(hint, type) and issubclass(hint, Family):
        return True
    return any(mentions_configuration(inner) for inner in typing.get_args(hint))


def shape_on_wire(tensor: Tensor) -> int | tuple[int, ...]:
    """The length of a flat tensor, or the shape of another."""
    return tensor.numel() if tensor.dim() == 1 else tuple(tensor.shape)


# Message types, analysed once


class _Sizing:
    """The fields of a message type, by what limits their length."""

    def __init__(self, kind: type[Message]) -> None:
        self.payload = tuple(payload_fields(kind))
        self.compressible = kind.compressible()
        self.by_length: list[tuple[str, int]] = []
        """Header fields whose length varies, and the most bytes of one element."""
        self.configurations: list[str] = []
        """Header fields that hold a configuration."""
        self._key = kind.key
        self._header: list[str] = []
        groups = sum(not is_single for _, is_single in self.payload)
        self.bytes_max = _encoded_bytes(self._key) + 4 * _PREFIX_BYTES_MAX + groups * _NUMBER_BYTES_MAX
        """An upper bound of the meta without tensors and the fields above."""
        hints = typing.get_type_hints(kind)
        for item in dataclasses.fields(kind):
            hint = hints[item.name]
            if item.init and hint not in (Tensor, Buffers):
                self._add(item.name, hint)

    def _add(self, name: str, hint: Any) -> None:
        self._header.append(name)
        if mentions_configuration(hint):
            self.configurations.append(name)
        elif (bytes_max := _bytes_max(hint)) is not None:
            self.bytes_max += bytes_max
        elif (element_bytes_max := _element_bytes_max(hint)) is not None:
            self.bytes_max += _PREFIX_BYTES_MAX
            self.by_length.append((name, element_bytes_max))
        else:
            self.bytes_max += _UNLIMITED

    def meta_bytes(self, message: Message) -> int:
        """The length of the meta."""
        values = [self._plain(name, getattr(message, name)) for name in self._header]
        tensors = [(str(tensor.dtype).removeprefix("torch."), shape_on_wire(tensor)) for tensor in message.tensors()]
        groups = [len(getattr(message, name)) for name, is_single in self.payload if not is_single]
        return _encoded_bytes((self._key, values, tensors, groups))

    def _plain(self, name: str, value: Any) -> Any:
        return msgspec.Raw(encoded_configuration(value)) if name in self.configurations else value


_SIZINGS: dict[type[Message], _Sizing] = {}


def _new_sizing(kind: type[Message]) -> _Sizing:
    sizing = _SIZINGS[kind] = _Sizing(kind)
    return sizing


_CONFIGURATIONS: dict[type, int] = {}
"""The most bytes of a configuration of a class."""


def _new_configuration(kind: type) -> int:
    nbytes = _CONFIGURATIONS[kind] = _configuration_bytes_max(kind)
    return nbytes


def _configuration_bytes_max(kind: type) -> int:
    if kind is type(None):
        return 1
    if not dataclasses.is_dataclass(kind):
        return _UNLIMITED
    hints = typing.get_type_hints(kind)
    nbytes = _PREFIX_BYTES_MAX + _encoded_bytes(["name", getattr(kind, "name", "")])
    for item in dataclasses.fields(kind):
        bytes_max = _bytes_max(hints[item.name])
        nbytes += _encoded_bytes(item.name) + (_UNLIMITED if bytes_max is None else max(bytes_max, len("none") + 1))
    return nbytes


def _bytes_max(hint: Any) -> int | None:
    """The most bytes of a value of a type; None if there is no limit."""
    if hint in (int, float):
        return _NUMBER_BYTES_MAX
    if hint in (bool, type(None)):
        return 1
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return max(map(_encoded_bytes, arguments))
    if origin in (typing.Union, types.UnionType):
        return _combined(max, map(_bytes_max, arguments))
    if origin is tuple and Ellipsis not in arguments:
        inner = _combined(sum, map(_bytes_max, arguments))
        return None if inner is None else inner + _PREFIX_BYTES_MAX
    return None


def _element_bytes_max(hint: Any) -> int | None:
    """The most bytes of one element of a sequence, text or dictionary type; None if there is no limit."""
    if hint in (str, bytes):
        return 4
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, set, frozenset) or (origin is tuple and Ellipsis in arguments):
        return _bytes_max(arguments[0])
    return _combined(sum, map(_bytes_max, arguments)) if origin is dict else None


def _combined(how: Any, limits: Iterable[int | None]) -> int | None:
    known = list(limits)
    return None if None in known else how(known)
