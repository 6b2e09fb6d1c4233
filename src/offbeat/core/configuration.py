"""Frozen dataclasses as configuration: conversion to and from plain data, with error sentences for mistakes.

A configuration is a frozen dataclass derived from `Configuration`. The string below each field is its help text, with
its unit; editors, the command line and `help()` show it. A subclass that redefines a field without text inherits it.

A *family* is a set of such classes that are interchangeable (optimizers, schedules, straggler models, strategies). Each
member has a short name, which selects it on the command line and in TOML. Inside the library, variants are types.

Plain data is what TOML and JSON can hold. A member of a family is written as `{name = "sgd", lr = 0.1}`, or just
`"sgd"` with its defaults.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import numbers
import re
import sys
import tomllib
import types
import typing
from abc import ABCMeta
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

from offbeat.errors import ConfigurationError, quoted, unknown

T = TypeVar("T")


def option(default: T, text: str) -> T:
    """A field with its help text, for a class that is not defined in a file, such as one typed at a prompt.

    default: the default of the field, which must be immutable
    text: its help text, with its unit
    """
    if isinstance(default, list | dict):
        raise TypeError("give immutable defaults only")
    return field(default=default, metadata={"help": text})


class _FieldDocs(ABCMeta):
    @property
    def __doc__(cls) -> str | None:  # type: ignore[override]
        """The docstring of a configuration class, with its fields; computed on access, since it parses the source."""
        text: str | None = vars(cls).get("__doc__")
        if not dataclasses.is_dataclass(cls) or "__dataclass_fields__" not in vars(cls):
            return text
        text = inspect.cleandoc(text or cls.__name__)
        if "__match_args__" not in vars(cls):  # still inside `dataclass`, which only checks for a docstring
            return text
        fields = [f"    {item.path}: {item.text}" for item in options(cls)]
        return "\n".join([text, "", "Fields:", *fields]) if fields else text


class Configuration(metaclass=_FieldDocs):
    """The base class of configurations; `help()` of a subclass lists its fields with their texts."""


@functools.cache
def field_texts(module: str) -> dict[str, dict[str, str]]:
    """The strings below fields in the source of a module: qualified class name → field → text.

    Empty if there is no source file.
    """
    path = getattr(sys.modules.get(module), "__file__", None)
    try:
        tree = ast.parse(Path(path or "").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    texts: dict[str, dict[str, str]] = {}
    classes = [(node.name, node) for node in tree.body if isinstance(node, ast.ClassDef)]
    for name, cls in classes:
        for item, below in itertools.pairwise(cls.body):
            match item, below:
                case ast.AnnAssign(target=ast.Name(id=field_name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts.setdefault(name, {})[field_name] = " ".join(text.split())
        classes.extend((f"{name}.{node.name}", node) for node in cls.body if isinstance(node, ast.ClassDef))
    return texts


class Family(Configuration):
    """The base class of families. A direct subclass defines a family; its subclasses with a name are the members."""

    name: ClassVar[str] = ""
    members: ClassVar[dict[str, type[Any]]] = {}
    constants: ClassVar[dict[str, Any]] = {}
    """Names for members with certain values, such as `niagara`."""

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Family in cls.__bases__:
            cls.members, cls.constants = {}, {}
        if name is not None:
            cls.name = name
            cls.members[name] = cls

    @classmethod
    def shorthand(cls, text: str) -> Any:
        """Parse a member written as `adam`, `lognormal:0.5` or `crash:1:30`.

        The name is followed by values of the fields, in their order, each after a colon. The items of a list are
        separated by `+`, as in `partition:1+2:30:10`.
        """
        if text in cls.constants:
            return cls.constants[text]
        name, *values = text.split(":")
        if name not in cls.members:
            raise unknown(noun(cls), name, [*cls.members, *cls.constants])
        fields = list(options(cls.members[name]))
        if len(values) > len(fields):
            order = ":".join(item.path for item in fields) or "none"
            raise ConfigurationError(f"{noun(cls)} {text!r} gives {len(values)} values, but {name} takes {order}")
        table = {
            item.path: value.split("+") if typing.get_origin(item.kind) is tuple else value
            for item, value in zip(fields, values, strict=False)
        }
        return build(cls.members[name], table, name)


def noun(cls: type[Any]) -> str:
    """The name of a class in an error sentence: "straggler model" for StragglerModel."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__).lower()


@dataclass(frozen=True)
class Option:
    """A field of a configuration class, as the command line shows it."""

    path: str
    kind: Any
    default: Any
    owner: type[Any]

    @property
    def text(self) -> str:
        """The help text; empty if there is none."""
        texts = (field_texts(cls.__module__).get(cls.__qualname__, {}) for cls in self.owner.__mro__)
        declared = next((text[self.path] for text in texts if self.path in text), "")
        return str(self.owner.__dataclass_fields__[self.path].metadata.get("help", declared))

    @property
    def flag(self) -> str:
        return "--" + self.path.replace("_", "-")


@functools.cache
def hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def options(cls: type[Any]) -> Iterator[Option]:
    """The fields of a configuration class, in the order of its constructor: keyword-only fields are last."""
    for item in sorted(dataclasses.fields(cls), key=lambda item: bool(item.kw_only)):
        if item.init:
            yield Option(item.name, hints(cast(Any, cls))[item.name], item.default, cls)


def to_plain(value: Any) -> Any:
    """A configuration as plain data: dictionaries, lists, numbers, strings.

    A field that is None is omitted if that is its default, and "none" otherwise, since TOML has no null.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain: dict[str, Any] = {"name": value.name} if isinstance(value, Family) and value.name else {}
        for item in dataclasses.fields(value):
            inner = getattr(value, item.name)
            if item.init and not (inner is None and item.default is None):
                plain[item.name] = "none" if inner is None else to_plain(inner)
        return plain
    if isinstance(value, tuple | list):
        return [to_plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, numbers.Real):  # such as those of NumPy
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise ConfigurationError(
        f"{value!r} cannot be written to a file; use a named configuration instead, or keep it in Python"
    )


def from_plain(kind: Any, plain: Any, where: str) -> Any:
    """Convert plain data to a value of type `kind`.

    kind: a type annotation of a configuration field
    plain: the data
    where: the name of the value in error sentences

    Raises ConfigurationError for data that does not fit.
    """
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _from_union(typing.get_args(kind), plain, where)
    if origin is Literal:
        allowed = [str(choice) for choice in typing.get_args(kind)]
        if plain not in allowed:
            raise unknown(f"value for {where}", _as_text(plain), allowed)
        return plain
    if origin is tuple:
        return _tuple_from(typing.get_args(kind), plain, where)
    if isinstance(kind, type) and issubclass(kind, Family):
        return _member_from(kind, plain, where)
    if dataclasses.is_dataclass(kind):
        if isinstance(plain, str | int | float) and hasattr(kind, "shorthand"):
            return kind.shorthand(_as_text(plain))
        return build(cast(type[Any], kind), _table(plain, where), where)
    return _scalar(kind, plain, where)


def build(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """An instance of a configuration class from plain data for its fields; `where` is its name in error sentences."""
    return make(cls, convert({item.path: item.kind for item in options(cls)}, table, where), where)


def convert(kinds: Mapping[str, Any], table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of fields from plain data.

    kinds: the types of the fields
    table: plain data for some of them
    where: their owner in error sentences

    Raises ConfigurationError for a key that is no field.
    """
    values = {}
    for key, plain in table.items():
        name = key.replace("-", "_")
        if name not in kinds:
            raise unknown(f"key in {where}", key, kinds)
        values[name] = from_plain(kinds[name], plain, f"{where}.{name}")
    return values


def make(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """An instance of a configuration class from values that are converted already."""
    try:
        return cls(**values)
    except TypeError as error:
        missing = [o.path for o in options(cls) if o.default is dataclasses.MISSING and o.path not in values]
        raise ConfigurationError(f"{where} needs {' and '.join(missing) or error}") from None


def _from_union(kinds: Sequence[Any], plain: Any, where: str) -> Any:
    if type(None) in kinds:
        if plain is None or (isinstance(plain, str) and plain.lower() == "none"):
            return None
        kinds = [kind for kind in kinds if kind is not type(None)]
    if len(kinds) > 1:
        scalars = [kind for kind in kinds if kind in (int, float, bool)]
        if scalars:
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                float(plain)
                return _scalar(float if float in scalars else scalars[0], plain, where)
        kinds = [kind for kind in kinds if kind not in scalars]
    return from_plain(kinds[0], plain, where)


def _tuple_from(kinds: Sequence[Any], plain: Any, where: str) -> tuple[Any, ...]:
    if isinstance(plain, str):
        plain = [part for part in plain.replace(",", " ").split() if part]
    if not isinstance(plain, list | tuple):
        plain = [plain]
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = [kinds[0]] * len(plain)
    if len(plain) != len(kinds):
        raise ConfigurationError(f"{where} takes {len(kinds)} values, but {len(plain)} were given")
    return tuple(from_plain(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(zip(kinds, plain, strict=True)))


def _member_from(family: type[Any], plain: Any, where: str) -> Any:
    if isinstance(plain, str | int | float):
        return family.shorthand(_as_text(plain))
    table = dict(_table(plain, where))
    name = table.pop("name", None)
    if name is None:
        if family.name:
            return build(family, table, where)
        raise ConfigurationError(f"{where} needs a name; known: {', '.join(sorted(family.members))}")
    if not isinstance(name, str) or name not in family.members:
        raise unknown(f"{noun(family)} for {where}", _as_text(name), family.members)
    return build(family.members[name], table, where)


def _as_text(plain: Any) -> str:
    """Plain data as a word, to be compared with names."""
    return plain if isinstance(plain, str) else quoted(plain)


def _table(plain: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(plain, Mapping):
        raise ConfigurationError(f"{where} is a table of keys and values, but {quoted(plain)} was given")
    return plain


EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
"""Scalar types in error sentences."""

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _scalar(kind: Any, plain: Any, where: str) -> Any:
    # msgspec.convert takes neither "1e4" for an integer nor "yes", and its errors name types, not what to write.
    if kind in (bool, str) and isinstance(plain, kind):
        return plain
    if kind is bool and isinstance(plain, str) and plain.lower() in _BOOLEANS:
        return _BOOLEANS[plain.lower()]
    if kind in (int, float) and not isinstance(plain, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(plain)
            if kind is float and not math.isnan(number):
                return number
            if kind is int and number == int(number):
                return int(plain if isinstance(plain, int) else number)
    raise ConfigurationError(f"{where} is {EXPECTED.get(kind, noun(kind))}, but {quoted(plain)} was given")


def is_file(path: Path) -> bool:
    """Whether there is a file; False as well for a text that cannot be a path."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a null character
        return False


def read_text(path: str | Path, what: str, utf8_hint: str) -> str:
    """The text of a file; raises ConfigurationError if it cannot be read.

    path: the file
    what: what it is, in the error sentence
    utf8_hint: how the sentence continues after "is not UTF-8 text"
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise ConfigurationError(f"the {what} {path} cannot be read: {reason}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"the {what} {path} is not UTF-8 text{utf8_hint}") from None
    except ValueError:
        raise ConfigurationError(f"the {what} {str(path)!r} cannot be read: its name holds a null character") from None


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """The table in a TOML file; `what` says in error sentences what kind of file it is.

    Raises ConfigurationError if the file cannot be read or parsed.
    """
    try:
        return tomllib.loads(read_text(path, f"{what} file", ", which TOML must be"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"the {what} file {path} is not TOML: {error}") from None
    except ValueError:  # what Python says of an integer that is too long would not help
        raise ConfigurationError(f"the {what} file {path} holds a number of thousands of digits; shorten it") from None
    except RecursionError:
        raise ConfigurationError(f"the {what} file {path} is nested too deeply; use fewer levels of brackets") from None
