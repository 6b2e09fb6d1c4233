"""What the ranks of a run must have in common, and a checkpoint with the run that continues it."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from typing import Any

import msgspec

from offbeat.core.flat import Layout
from offbeat.core.strategy import Strategy


class RunIdentity(msgspec.Struct, frozen=True):
    """The model and the strategy of a run, as texts that are the same in every process."""

    model: str
    """The fingerprint of its layout."""
    strategy: str
    """Its class and its fields."""

    @classmethod
    def of(cls, layout: Layout, strategy: Strategy) -> RunIdentity:
        return cls(layout.fingerprint(), _text(strategy))


def _text(value: Any) -> str:
    """A value by its class and fields. Functions are named and objects are never printed, which may show addresses."""
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        number = float(value)  # 1.0 is written as 1, which is equal
        return str(int(number)) if number.is_integer() else repr(number)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key)}: {_text(inner)}' for key, inner in value.items())}}}"
    if hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    fields = [f"{name}={_text(inner)}" for name, inner in _fields(value).items() if inner is not None]
    return f"{type(value).__qualname__}({', '.join(fields)})"


def _fields(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    return dict(getattr(value, "__dict__", {}))
