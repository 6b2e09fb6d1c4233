"""Checks of configurations for `__post_init__`. Each raises ConfigurationError with one sentence."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
import types
import typing
from typing import Any, Literal

from offbeat.core.configuration import EXPECTED, Family, options
from offbeat.errors import ConfigurationError, FieldError


def check_types(config: Any) -> None:
    """Check that every field has a value of its declared type, recursively.

    A class may have `adopt`, a class method that makes its objects of other things that users have, or None of what it
    does not know: fields of that type are converted.
    """
    for item in options(type(config)):
        value = _adopted(item.kind, getattr(config, item.path))
        object.__setattr__(config, item.path, value)
        if not _fits(item.kind, value):
            raise FieldError(
                type(config).__name__,
                item.path,
                f"must be {_described(item.kind)}, but is {_shown(value)}{_suggestion(item.kind, value)}",
            )
        for inner in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
                check_types(inner)


def _adopted(kind: Any, value: Any) -> Any:
    if value is None or _fits(kind, value):
        return value
    for choice in typing.get_args(kind) or (kind,):
        if hasattr(choice, "adopt") and (adopted := choice.adopt(value)) is not None:
            return adopted
    return value


def check_instance(value: Any, kinds: tuple[type[Any], ...], what: str, example: str) -> None:
    """Check that a value is an instance of one of `kinds`.

    value: the value
    kinds: the classes
    what: the name of the value in the sentence
    example: an expression for a valid value, for the sentence
    """
    if not isinstance(value, kinds):  # a workload that is shown prints its data
        raise ConfigurationError(f"{what} must be an object such as {example}, but is {_shown(value)}")


def _fits(kind: Any, value: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(choice, value) for choice in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return len(kinds) == len(value) and all(map(_fits, kinds, value))
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    return isinstance(value, kind) if isinstance(kind, type) and kind is not Any else True


def _described(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_described(choice) for choice in arguments)
    if origin is tuple:
        return f"a tuple of {_described(arguments[0])}"
    if kind is type(None):
        return "None"
    name = str(getattr(kind, "__name__", kind))
    return EXPECTED.get(kind) or f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def _suggestion(kind: Any, value: Any) -> str:
    """What to type instead: the class of a member given by its name, or the classes to choose from."""
    choices = [choice for choice in typing.get_args(kind) or (kind,) if isinstance(choice, type)]
    for choice in choices:
        if issubclass(choice, Family) and isinstance(value, str) and value in choice.members:
            return f"; type {choice.members[value].__name__}()"
    names = [cls.__name__ for choice in choices for cls in _variants(choice)]
    return f"; choose {', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 and not isinstance(value, type) else ""


def _variants(cls: type[Any]) -> list[type[Any]]:
    """The classes whose objects a field of this type can hold, if it is not a plain one."""
    if issubclass(cls, Family) and not cls.name:
        return list(cls.members.values())
    if inspect.isabstract(cls):
        return cls.__subclasses__()
    return [cls] if dataclasses.is_dataclass(cls) else []


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}; type {value.__name__}()"
    text = repr(value)
    return text if len(text) < 80 else f"a {type(value).__name__}"


def require(condition: bool, sentence: str) -> None:
    """Raise ConfigurationError with this sentence unless the condition holds."""
    if not condition:
        raise ConfigurationError(sentence)


def require_field(config: Any, name: str, condition: bool, problem: str) -> None:
    """Raise FieldError unless the condition holds.

    config: the configuration
    name: the field that the condition is about
    condition: whether its value is valid
    problem: how the sentence continues after the field, such as "must be at most 1, but is 2"
    """
    if not condition:
        raise FieldError(type(config).__name__, name, problem)


def require_positive(config: Any, *names: str) -> None:
    """Check that each named field is greater than 0, or None."""
    for name in names:
        value = getattr(config, name)
        is_valid = value is None or (isinstance(value, numbers.Real) and float(value) > 0)
        require_field(config, name, is_valid, f"must be greater than 0, but is {value!r}")


def require_bandwidth_limit(bytes_per_second: Any) -> None:
    """Check a bandwidth limit in bytes per second: a finite number of 1 or more, or None."""
    number = isinstance(bytes_per_second, numbers.Real) and not isinstance(bytes_per_second, bool)
    require(
        bytes_per_second is None or (number and 1 <= float(bytes_per_second) < float("inf")),
        f"the bandwidth limit of a link, bytes_per_second, must be a number of 1 or more, such as 1e6, but is "
        f"{bytes_per_second!r}",
    )


def require_not_negative(config: Any, *names: str) -> None:
    """Check that each named field is 0 or more, or None."""
    for name in names:
        value = getattr(config, name)
        is_valid = value is None or (isinstance(value, numbers.Real) and float(value) >= 0)
        require_field(config, name, is_valid, f"must be 0 or more, but is {value!r}")
