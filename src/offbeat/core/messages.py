"""What nodes say to each other: a small typed header and flat tensors.

A message is a frozen dataclass. Fields declared as `Tensor` or `Buffers` are its payload; all others are its
header, plain data that msgspec can encode. A strategy defines its own messages in its own file by subclassing
`Message`; the two that end a run are here because every family ends the same way.

A tensor in a message is immutable from the moment it is handed to `Send`.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from offbeat.errors import ContractViolation

Buffers = tuple[Tensor, ...]
"""The module's buffers (batch-norm statistics and the like), flat, one tensor per dtype."""

HEADER_BYTES = 64
"""What a header is taken to weigh where no wire is there to weigh it."""


@dataclass(frozen=True)
class Message:
    """The root of all messages. `kinds` finds a class by its key, module and qualified name, on the receiving side.

    A module that defines two messages of one name is refused. A tensor that is declared in none of `increments`,
    `values` and `roundtrip` always travels exactly as it is.
    """

    kinds: ClassVar[dict[str, type[Message]]] = {}
    key: ClassVar[str] = ""
    """Under which `kinds` has this class; it travels with every message."""
    increments: ClassVar[tuple[str, ...]] = ()
    """Tensors that may be compressed and are added to something: what is lost of one is added to the next."""
    values: ClassVar[tuple[str, ...]] = ()
    """Tensors that may be compressed and take the place of something."""
    roundtrip: ClassVar[tuple[str, ...]] = ()
    """Tensors that went through `Compression.roundtrip`, so that both ends use the same values: coded without loss."""
    residual_key_fields: ClassVar[tuple[str, ...]] = ()
    """Header fields that tell increments apart that are about different entries, such as the number of a fragment."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.key = f"{cls.__module__}.{cls.__qualname__}"
        earlier = Message.kinds.get(cls.key)
        # A class that its module no longer holds was loaded before and is replaced; `__main__` may be a notebook.
        still_there = earlier is not None and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is earlier
        if still_there and cls.__module__ != "__main__":
            raise ContractViolation(
                f"the module {cls.__module__} defines the message {cls.__qualname__} twice; ranks find a message by "
                "its module and name, so give one of the two another name"
            )
        Message.kinds[cls.key] = cls

    @classmethod
    def compressible(cls) -> tuple[str, ...]:
        """The names of the tensors that may be compressed."""
        return (*cls.increments, *cls.values, *cls.roundtrip)

    def tensors(self) -> list[Tensor]:
        """The payload, in the order of the fields."""
        found: list[Tensor] = []
        for name, single in _payload(type(self)):
            if single:
                found.append(getattr(self, name))
            else:
                found.extend(getattr(self, name))
        return found

    def with_tensors(self, tensors: Iterator[Tensor]) -> Message:
        """The same header over other tensors, taken in the order of `tensors()`."""
        changes: dict[str, Any] = {}
        for name, single in _payload(type(self)):
            changes[name] = next(tensors) if single else tuple(next(tensors) for _ in getattr(self, name))
        return dataclasses.replace(self, **changes)

    def copy(self) -> Message:
        """The same message over tensors of its own."""
        return self.with_tensors(tensor.clone() for tensor in self.tensors())

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + sum(tensor.nbytes for tensor in self.tensors())


Kind = TypeVar("Kind", bound=Message)

_PAYLOADS: dict[type[Message], list[tuple[str, bool]]] = {}


def _payload(kind: type[Message]) -> list[tuple[str, bool]]:
    """The fields of a message that hold tensors, and whether they hold just one."""
    if kind not in _PAYLOADS:
        hints = typing.get_type_hints(kind)
        kinds = [(item.name, hints[item.name]) for item in dataclasses.fields(kind)]
        _PAYLOADS[kind] = [(name, hint is Tensor) for name, hint in kinds if hint in (Tensor, Buffers)]
    return _PAYLOADS[kind]


def packed(message: Message) -> dict[str, Any]:
    """A message as tensors and plain data, for a node's state."""
    values = {item.name: getattr(message, item.name) for item in dataclasses.fields(message)}
    tensors = {}
    for name, single in _payload(type(message)):
        held = values.pop(name)
        tensors[name] = held.clone() if single else [tensor.clone() for tensor in held]
    return {"header": values, "tensors": tensors}


def unpacked(kind: type[Kind], state: dict[str, Any]) -> Kind:
    """The message that was packed, also where its tuples have become lists meanwhile."""
    return kind(**{name: _tuples(value) for part in ("header", "tensors") for name, value in state[part].items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Stop(Message):
    """Training is over; here is the result. Answered with `Stopped`."""

    parameters: Tensor
    buffers: Buffers
    version: int


@dataclass(frozen=True)
class Stopped(Message):
    """The sender computes no more; `draws_stop` is where its data position ended."""

    draws_stop: int
    samples: int
