"""A member of a family written as one word: `lognormal:0.5`, `crash:1:30`.

The name comes first; what follows each colon sets the fields in their order. A field that is a list takes `+`
between its items, as in `partition:1+2:30:10`.
"""

from __future__ import annotations

import typing
from typing import Any

from offbeat.configuration import build, noun, options
from offbeat.errors import ConfigurationError, unknown


def from_word(family: type[Any], word: str, constants: dict[str, Any] | None = None) -> Any:
    """The member that a word stands for; `constants` are words that stand for a member with its fields set."""
    constants = constants or {}
    if word in constants:
        return constants[word]
    name, *values = word.split(":")
    if name not in family.members:
        raise unknown(noun(family), name, [*family.members, *constants])
    fields = list(options(family.members[name]))
    if len(values) > len(fields):
        order = ":".join(item.path for item in fields) or "none"
        raise ConfigurationError(f"{noun(family)} {word!r} gives {len(values)} values, but {name} takes {order}")
    table: dict[str, Any] = {}
    for item, value in zip(fields, values, strict=False):
        table[item.path] = value.split("+") if typing.get_origin(item.kind) is tuple else value
    return build(family.members[name], table, name)
