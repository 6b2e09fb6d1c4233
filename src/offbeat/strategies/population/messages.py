"""What a population says besides what all learners say (`strategies/progress.py`).

hub → member   Lend       send me all that you are made of: somebody does so badly that it should take your place
member → hub   Lent       parameters, optimizer state, and whose settings they were made with
hub → member   Takeover   go on as that one
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offbeat.messages import Buffers, Message


@dataclass(frozen=True)
class Lend(Message):
    """Asked of the best. It goes on as it was."""


@dataclass(frozen=True)
class Lent(Message):
    """`state` are the tensors of the optimizer's state, and `shape` all else of it, as JSON with places for them."""

    parameters: Tensor
    buffers: Buffers
    state: Buffers
    shape: str
    settings: int


@dataclass(frozen=True)
class Takeover(Message):
    """As `Lent`. What the receiver sends from now on says that it has taken over so many times."""

    parameters: Tensor
    buffers: Buffers
    state: Buffers
    shape: str
    settings: int
    takeovers: int
    version: int


_PLACE = "tensor"


def flattened(state: Any) -> tuple[Buffers, str]:
    """A nested state of tensors and plain data as tensors and a text that says where they belong."""
    tensors: list[Tensor] = []

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return {_PLACE: len(tensors) - 1}
        if isinstance(value, dict):
            return {"dict": [[key, walk(inner)] for key, inner in value.items()]}
        if isinstance(value, list | tuple):
            return {"list": [walk(inner) for inner in value]}
        return value

    shape = json.dumps(walk(state))
    return tuple(tensors), shape


def nested(tensors: Sequence[Tensor], shape: str) -> Any:
    """What `flattened` took apart."""

    def walk(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if _PLACE in value:
            return tensors[value[_PLACE]]
        if "dict" in value:
            return {key: walk(inner) for key, inner in value["dict"]}
        return [walk(inner) for inner in value["list"]]

    return walk(json.loads(shape))
