"""Frozen dataclasses as configuration: to plain data and back, with sentences for mistakes.

A configuration is a frozen dataclass derived from `Configuration`. Below each field stands a string with its text: what
it is, and its unit. Editors look for it there, and so do the command line and `help()`. A subclass that declares a
field anew inherits the text.

A *family* is a set of such classes that stand for one another (optimizers, schedules, straggler models, strategies);
its members carry the short name by which the command line and TOML select them. Inside the library variants are types;
names exist only here, at the outer edge.

Plain data is what TOML and JSON hold. A member of a family is written as `{name = "sgd", lr = 0.1}`, or as
just `"sgd"` where its defaults will do.
"""

from __future__ import annotations

import ast
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

from offbeat.errors import ConfigurationError, unknown

T = TypeVar("T")


def option(default: T, text: str) -> T:
    """A field with its text, for a class whose source is not in a file, as one that is typed at a prompt.

    default: the default of the field, which must be immutable
    text: what it is, with its unit
    """
    if isinstance(default, list | dict):
        raise TypeError("give immutable defaults only")
    return field(default=default, metadata={"help": text})


class _ListsFields(ABCMeta):
    @property
    def __doc__(cls) -> str | None:  # type: ignore[override]
        """The docstring of a configuration class with its fields, made when it is read: no source is parsed before."""
        text: str | None = vars(cls).get("__doc__")
        if not dataclasses.is_dataclass(cls) or "__dataclass_fields__" not in vars(cls):
            return text
        text = inspect.cleandoc(text or cls.__name__)
        if "__match_args__" not in vars(cls):  # `dataclass` is still at work, and only asks whether there is one
            return text
        fields = [f"    {item.path}: {item.text}" for item in options(cls)]
        return "\n".join([text, "", "Fields:", *fields]) if fields else text


class Configuration(metaclass=_ListsFields):
    """The root of configurations: `help()` of a class lists its fields with their texts."""


@functools.cache
def field_texts(module: str) -> dict[str, dict[str, str]]:
    """The strings below the fields of the classes of a module, from its source: qualified name → field → text.

    Empty where there is no source file.
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
    """The root of a family. Its direct subclass opens the register; named subclasses enter it."""

    name: ClassVar[str] = ""
    members: ClassVar[dict[str, type[Any]]] = {}
    constants: ClassVar[dict[str, Any]] = {}
    """Words that stand for a member with its fields set, such as `niagara`."""

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Family in cls.__bases__:
            cls.members, cls.constants = {}, {}
        if name is not None:
            cls.name = name
            cls.members[name] = cls

    @classmethod
    def shorthand(cls, text: str) -> Any:
        """A member written as one word: `adam`, `lognormal:0.5`, `crash:1:30`.

        The name comes first; what follows each colon sets the fields in their order. A field that is a list takes
        `+` between its items, as in `partition:1+2:30:10`.
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
        table: dict[str, Any] = {}
        for item, value in zip(fields, values, strict=False):
            table[item.path] = value.split("+") if typing.get_origin(item.kind) is tuple else value
        return build(cls.members[name], table, name)


def noun(cls: type[Any]) -> str:
    """What a sentence calls an object of this class: "straggler model" for StragglerModel."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__).lower()


@dataclass(frozen=True)
class Option:
    """One field of a configuration as the command line shows it."""

    path: str
    kind: Any
    default: Any
    owner: type[Any]

    @property
    def text(self) -> str:
        """What it is, with its unit; empty where that is written nowhere."""
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
    """The fields of a configuration class, in the order in which Python takes them: by keyword alone comes last."""
    for item in sorted(dataclasses.fields(cls), key=lambda item: bool(item.kw_only)):
        if item.init:
            yield Option(item.name, hints(cast(Any, cls))[item.name], item.default, cls)


def to_plain(value: Any) -> Any:
    """A configuration as plain data: dictionaries, lists, numbers, strings.

    A field that is None is left out where that is its default, and is "none" elsewhere, since TOML has no null.
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
    if isinstance(value, numbers.Real):  # NumPy's, for instance
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise ConfigurationError(
        f"{value!r} cannot be written to a file; use a named configuration in its place, or keep it in Python"
    )


def from_plain(kind: Any, plain: Any, where: str) -> Any:
    """Plain data as a value of type `kind`; `where` is how the user knows the place, for the message."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _from_union(typing.get_args(kind), plain, where)
    if origin is Literal:
        allowed = [str(choice) for choice in typing.get_args(kind)]
        if plain not in allowed:
            raise unknown(f"value for {where}", str(plain), allowed)
        return plain
    if origin is tuple:
        return _tuple_from(typing.get_args(kind), plain, where)
    if isinstance(kind, type) and issubclass(kind, Family):
        return _member_from(kind, plain, where)
    if dataclasses.is_dataclass(kind):
        if isinstance(plain, str | int | float) and hasattr(kind, "shorthand"):
            return kind.shorthand(str(plain))
        return build(cast(type[Any], kind), _table(plain, where), where)
    return _scalar(kind, plain, where)


def build(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """An instance of a configuration class from a table of its fields."""
    known = {item.path: item.kind for item in options(cls)}
    values = {}
    for key, plain in table.items():
        name = key.replace("-", "_")
        if name not in known:
            raise unknown(f"key in {where}", key, known)
        values[name] = from_plain(known[name], plain, f"{where}.{name}")
    return make(cls, values, where)


def make(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """An instance of a configuration class from values that have their types already."""
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
        structured = [kind for kind in kinds if kind not in scalars]
        if scalars and (isinstance(plain, int | float) or _is_number(plain)):
            return _scalar(float if float in scalars else scalars[0], plain, where)
        kinds = structured
    return from_plain(kinds[0], plain, where)


def _is_number(plain: Any) -> bool:
    try:
        float(plain)
    except (TypeError, ValueError):
        return False
    return True


def _tuple_from(kinds: Sequence[Any], plain: Any, where: str) -> tuple[Any, ...]:
    if isinstance(plain, str):
        plain = [part for part in plain.replace(",", " ").split() if part]
    if not isinstance(plain, list | tuple):
        plain = [plain]
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(from_plain(kinds[0], item, f"{where}[{i}]") for i, item in enumerate(plain))
    if len(plain) != len(kinds):
        raise ConfigurationError(f"{where} takes {len(kinds)} values, but {len(plain)} were given")
    return tuple(from_plain(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(zip(kinds, plain, strict=True)))


def _member_from(family: type[Any], plain: Any, where: str) -> Any:
    if isinstance(plain, str | int | float):
        return family.shorthand(str(plain))
    table = dict(_table(plain, where))
    name = table.pop("name", None)
    if name is None:
        if family.name:
            return build(family, table, where)
        raise ConfigurationError(f"{where} needs a name; known: {', '.join(sorted(family.members))}")
    if name not in family.members:
        raise unknown(f"{noun(family)} for {where}", str(name), family.members)
    return build(family.members[name], table, where)


def _table(plain: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(plain, Mapping):
        raise ConfigurationError(f"{where} is a table of keys and values, but {plain!r} was given")
    return plain


EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


def _scalar(kind: Any, plain: Any, where: str) -> Any:
    complaint = ConfigurationError(f"{where} is {EXPECTED.get(kind, noun(kind))}, but {plain!r} was given")
    if kind is bool:
        truth = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if isinstance(plain, bool):
            return plain
        if isinstance(plain, str) and plain.lower() in truth:
            return truth[plain.lower()]
        raise complaint
    if kind in (int, float):
        if isinstance(plain, bool):
            raise complaint
        try:
            number = float(plain)
        except (TypeError, ValueError):
            raise complaint from None
        if math.isnan(number) or (kind is int and number != int(number) if math.isfinite(number) else kind is int):
            raise complaint
        return int(plain if isinstance(plain, int) else number) if kind is int else number
    if kind is str and isinstance(plain, str):
        return plain
    raise complaint


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """The table in a TOML file, or a sentence that says why there is none; `what` is what the file should hold."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise ConfigurationError(f"the {what} file {path} cannot be read: {reason}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"the {what} file {path} is not UTF-8 text, which TOML must be") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"the {what} file {path} is not TOML: {error}") from None
