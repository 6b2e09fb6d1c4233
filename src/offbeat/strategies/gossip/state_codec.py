"""Checkpoint state from the fields of a dataclass: one list of fields, one codec for all parts of a peer."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from torch import Tensor

from offbeat.core.strategy import State


class HasState(Protocol):
    """A part of a node that can be written to a checkpoint."""

    def state(self) -> State: ...

    def restore(self, state: State) -> None: ...


@dataclass(eq=False)
class SavedFields:
    """Base of a dataclass all of whose fields belong to the state of a node.

    Fields may hold tensors, messages, other dataclasses, named tuples, plain data, and containers of these.
    """

    def state(self) -> State:
        """All fields as tensors of their own and plain data."""
        return _fields_to_plain(self)

    def restore(self, state: State) -> None:
        """Set all fields to the values that `state()` returned, converted to their declared types."""
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(self):
            value = msgspec.convert(state[item.name], hints[item.name], str_keys=True, dec_hook=_keep_tensor)
            setattr(self, item.name, value)


def _fields_to_plain(instance: Any) -> State:
    return {item.name: _to_plain(getattr(instance, item.name)) for item in dataclasses.fields(instance)}


def _to_plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _to_plain(item) for key, item in value.items()}
    return _fields_to_plain(value) if dataclasses.is_dataclass(value) else value


def _keep_tensor(expected: type, value: Any) -> Any:
    """Accept a value of a type that msgspec does not know; only tensors occur."""
    return value
