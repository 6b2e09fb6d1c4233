"""Messages between nodes: a small typed header and flat tensors.

A message is a frozen dataclass. Fields declared as `Tensor` or `Buffers` are its payload; all others are its header,
plain data that msgspec can encode. A strategy defines its messages in its own file by subclassing `Message`; the two
that end a run are here, since all strategies with a hub or with peers end in the same way.

A tensor in a message must not change after it was passed to `Send`.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from offbeat.core.loader_states import LoaderState
from offbeat.errors import ContractViolation

Buffers = tuple[Tensor, ...]
"""The buffers of a module (such as batch-norm statistics): one flat tensor per dtype."""


@dataclass(frozen=True)
class Message:
    """The base class of messages. The receiver finds the class in `kinds` by its module and qualified name.

    Two messages of the same name in one module raise ContractViolation. A tensor whose field is in none of
    `increments`, `values` and `roundtrip` is never compressed.
    """

    kinds: ClassVar[dict[str, type[Message]]] = {}
    key: ClassVar[str] = ""
    """The key of this class in `kinds`, sent with every message."""
    increments: ClassVar[tuple[str, ...]] = ()
    """Fields that may be compressed and are added up by the receiver: the error of one is added to the next."""
    values: ClassVar[tuple[str, ...]] = ()
    """Fields that may be compressed and replace a value at the receiver."""
    roundtrip: ClassVar[tuple[str, ...]] = ()
    """Fields that hold results of `Compression.roundtrip`: both ends use the same values, encoded without loss."""
    residual_key_fields: ClassVar[tuple[str, ...]] = ()
    """Header fields that identify which residual an increment belongs to, such as the number of a fragment."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.key = f"{cls.__module__}.{cls.__qualname__}"
        earlier = Message.kinds.get(cls.key)
        # A class that is no longer in its module is from before a reload; `__main__` may be a notebook, run repeatedly.
        is_current = earlier is not None and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is earlier
        if is_current and cls.__module__ != "__main__":
            raise ContractViolation(
                f"the module {cls.__module__} defines the message {cls.__qualname__} twice; ranks find a message by "
                "its module and name, so give one of the two another name"
            )
        Message.kinds[cls.key] = cls

    @classmethod
    def compressible(cls) -> tuple[str, ...]:
        """The names of the fields that may be compressed."""
        return (*cls.increments, *cls.values, *cls.roundtrip)

    def tensors(self) -> list[Tensor]:
        """The payload, in the order of the fields."""
        tensors: list[Tensor] = []
        for name, is_single in payload_fields(type(self)):
            tensors += [getattr(self, name)] if is_single else getattr(self, name)
        return tensors

    def with_tensors(self, tensors: Iterator[Tensor]) -> Message:
        """A message with this header and other tensors, in the order of `tensors()`."""
        changes: dict[str, Any] = {}
        for name, is_single in payload_fields(type(self)):
            changes[name] = next(tensors) if is_single else tuple(next(tensors) for _ in getattr(self, name))
        return dataclasses.replace(self, **changes)

    def copy(self) -> Message:
        """A deep copy."""
        return self.with_tensors(tensor.clone() for tensor in self.tensors())


_PAYLOADS: dict[type[Message], list[tuple[str, bool]]] = {}


def payload_fields(kind: type[Message]) -> list[tuple[str, bool]]:
    """The names of the fields that hold tensors, and whether each holds a single one."""
    if kind not in _PAYLOADS:
        hints = typing.get_type_hints(kind)
        fields = [(item.name, hints[item.name]) for item in dataclasses.fields(kind) if item.init]
        _PAYLOADS[kind] = [(name, hint is Tensor) for name, hint in fields if hint in (Tensor, Buffers)]
    return _PAYLOADS[kind]


@dataclass(frozen=True)
class LoaderMessage(Message):
    """Base class of messages that carry a state of the worker's data loader, and its position; or none."""

    loader: Buffers = field(default=(), kw_only=True)
    loader_draw: int = field(default=0, kw_only=True)

    @property
    def loader_state(self) -> LoaderState | None:
        return LoaderState(self.loader_draw, self.loader[0]) if self.loader else None


def loader_fields(state: LoaderState | None) -> dict[str, Any]:
    """The fields of a `LoaderMessage` that carry a state."""
    return {} if state is None else {"loader": (state.encoded,), "loader_draw": state.draw}


@dataclass(frozen=True)
class Stop(Message):
    """Training has ended, with these parameters. The receiver answers with `Stopped`."""

    parameters: Tensor
    buffers: Buffers
    version: int


@dataclass(frozen=True)
class Stopped(Message):
    """The sender has stopped computing. `draws_stop` is the end of its data position.

    `stays`: its training loop has ended, and it waits for the result of the run.
    """

    draws_stop: int
    samples: int
    stays: bool = False
