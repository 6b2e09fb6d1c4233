"""The state of a node as tensors and plain data, derived from the attributes that its class declares.

    class Counter(Stateful):
        _count: int = 0
        _arrived_at: dict[int, float]

Each attribute that is annotated at class level is saved under its name without the underscore, and restored according
to its type. Attributes that follow from the configuration are assigned in `__init__` without such an annotation and do
not change afterwards; those that do change and can be computed again are listed in `caches`. Types that can be saved:
numbers, strings, enums, tensors, random generators, messages and other dataclasses, sample ledgers, members of
configuration families, and lists, tuples, deques, sets and dictionaries of them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections import deque
from enum import Enum
from typing import Any, ClassVar, cast

import msgspec
import numpy as np
from torch import Tensor

from offbeat.core import randomness
from offbeat.core.configuration import Family, from_plain, hints, to_plain
from offbeat.core.sample_ledger import SampleLedger
from offbeat.core.strategy import State


class Stateful:
    """Base class of nodes and their parts that implements `state` and `restore`."""

    caches: ClassVar[tuple[str, ...]] = ()
    """Attributes that change and are not saved: reused memory, and values that a restored object computes again."""
    immutable: ClassVar[tuple[str, ...]] = ()
    """Declared collections whose tensors are never changed: a state refers to them without a copy."""

    def state(self) -> State:
        """A copy of all declared attributes."""
        values = {name: getattr(self, name) for name in declared_attributes(type(self))}
        return {
            name.removeprefix("_"): list(value) if name in self.immutable else _saved(value)
            for name, value in values.items()
        }

    def restore(self, state: State) -> None:
        """Set all declared attributes.

        Tensors, generators, deques, and objects that have `restore`, are changed in place.
        """
        for name, kind in declared_attributes(type(self)).items():
            current: Any = getattr(self, name, None)
            saved = state[name.removeprefix("_")]
            if isinstance(current, list) and current and hasattr(current[0], "restore"):
                for item, saved_item in zip(current, saved, strict=True):
                    item.restore(saved_item)
            elif hasattr(current, "restore"):
                current.restore(saved)
            elif isinstance(current, Tensor) and saved is not None:
                current.copy_(saved)
            elif isinstance(current, np.random.Generator):
                randomness.restore(current, saved)
            elif isinstance(current, deque):
                current.clear()
                current.extend(_restored(typing.get_args(kind)[0], item) for item in saved)
            else:
                setattr(self, name, _restored(kind, saved))


def declared_attributes(cls: type[Any]) -> dict[str, Any]:
    """The attributes that a class and its bases declare, with their types."""
    return {name: kind for name, kind in hints(cast(Any, cls)).items() if typing.get_origin(kind) is not ClassVar}


def _saved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.random.Generator):
        return randomness.state_of(value)
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "restore"):
        return value.state()
    if isinstance(value, SampleLedger):
        return _saved(value.ranges)
    if isinstance(value, Family):
        return to_plain(value)
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if dataclasses.is_dataclass(value):
        return {item.name: _saved(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _saved(item) for key, item in value.items()}
        return [[_saved(key), _saved(item)] for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return [_saved(item) for item in sorted(value)]
    return [_saved(item) for item in value] if isinstance(value, list | tuple | deque) else value


def _restored(kind: Any, saved: Any) -> Any:
    """The value of type `kind` that `_saved` has turned into plain data."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if saved is None:
        return None
    if origin in (typing.Union, types.UnionType):
        return _restored(next(choice for choice in arguments if choice is not type(None)), saved)
    if origin is dict:
        pairs = saved.items() if isinstance(saved, dict) else saved
        return {_restored(arguments[0], key): _restored(arguments[1], item) for key, item in pairs}
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(map(_restored, arguments, saved))
    if origin in (tuple, list, set, frozenset):
        return origin(_restored(arguments[0], item) for item in saved)
    if kind is SampleLedger:
        return SampleLedger((first, stop) for first, stop in saved)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(saved)
    if isinstance(kind, type) and issubclass(kind, Family):
        return from_plain(kind, saved, kind.__name__)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return msgspec.convert(saved, kind)
    if dataclasses.is_dataclass(kind):
        kinds = hints(cast(Any, kind))
        return kind(**{name: _restored(kinds[name], item) for name, item in saved.items()})  # type: ignore[operator]
    return saved
