"""The size of a message that both engines count is that of its encoding, whatever its fields hold."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import pkgutil
import typing
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import offbeat
import offbeat as ob
from offbeat.core.actions import Budget, Samples, Seconds
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Buffers, Message
from offbeat.core.wire_size import HEAD_BYTES, META_INLINE_BYTES_MAX, wire_size
from offbeat.errors import ContractViolation
from offbeat.transports import wire

for module in pkgutil.walk_packages(offbeat.__path__, "offbeat."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
KINDS = {key: kind for key, kind in Message.kinds.items() if key.startswith("offbeat.")}

INTEGERS = st.integers(-(2**63), 2**64 - 1) | st.integers(-300, 300)
BUDGETS = st.builds(Samples, st.integers(1, 2**62)) | st.builds(
    Seconds, st.floats(0.001, 1e300), st.none() | st.integers(1, 2**62)
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.uint8, torch.complex128, torch.float8_e4m3fnuz, torch.bool]))
    shape = draw(st.lists(st.integers(0, 300), min_size=1, max_size=1) | st.lists(st.integers(0, 2), max_size=8))
    return torch.empty(shape, dtype=dtype)


def values(hint: Any, repeats: int) -> st.SearchStrategy[Any]:
    """Any value of a type; sequences and texts are short ones, repeated so many times."""
    arguments = typing.get_args(hint)
    if hint is Tensor:
        return tensors()
    if hint == Buffers:
        return st.lists(tensors(), max_size=4).map(lambda drawn: tuple(drawn * min(repeats, 5)))
    if hint in (int, float, bool, str):
        text = st.text(max_size=4).map(lambda drawn: drawn * repeats)
        return {int: INTEGERS, float: st.floats() | INTEGERS.filter(bool), bool: st.booleans(), str: text}[hint]
    if typing.get_origin(hint) is list or Ellipsis in arguments:
        items = st.lists(values(arguments[0], repeats), max_size=4)
        return items.map(lambda drawn: (typing.get_origin(hint) or tuple)(drawn * repeats))
    if typing.get_origin(hint) is tuple:
        return st.tuples(*(values(inner, repeats) for inner in arguments))
    if hint is Budget:
        return BUDGETS
    return st.one_of(*(st.none() if inner is type(None) else values(inner, repeats) for inner in arguments))


@pytest.mark.parametrize("key", sorted(KINDS))
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_the_size_of_a_message_is_that_of_its_encoding(key: str, data: st.DataObject) -> None:
    kind, repeats = KINDS[key], data.draw(st.sampled_from([1, 7, 90]))
    hints = typing.get_type_hints(kind)
    names = [item.name for item in dataclasses.fields(kind)]
    message = kind(**{name: data.draw(values(hints[name], repeats), label=name) for name in names})
    assert wire_size(message) == wire.encode(message).size


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


@dataclass(frozen=True)
class Nested:
    number: int
    text: str


@dataclass(frozen=True)
class AnyHeader(Message):
    """Its declared type limits nothing."""

    header: Any
    body: Tensor


@dataclass(frozen=True)
class OddHeader(Message):
    """Types of which the package has no message."""

    choice: Literal["a", "longer"]
    colour: Colour
    nested: Nested
    raw: bytes
    by_name: dict[str, int]
    by_number: dict[int, float]
    unique: frozenset[int]
    maybe: tuple[int, ...] | None
    pair: tuple[bool, int | None]
    budgets: tuple[Budget, ...]
    budget: Budget | None
    strategy: ob.Strategy | None = None


PLAIN = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text(max_size=70000) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40) | st.integers(0, 9), inner),
    max_leaves=40,
)


@given(PLAIN, tensors())
@settings(max_examples=100, deadline=None)
@example(list(range(65536)), torch.empty(3))
@example(np.float32(0.5), torch.empty(()))
@example([np.int64(2**40), True], torch.empty(0))
def test_a_header_of_any_plain_data_has_the_size_of_its_encoding(header: Any, body: Tensor) -> None:
    message = AnyHeader(header, body)
    assert wire_size(message) == wire.encode(message).size


@given(st.data(), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_headers_of_unusual_types_have_the_size_of_their_encoding(data: st.DataObject, items: int) -> None:
    draw = data.draw
    message = OddHeader(
        draw(st.sampled_from(["a", "longer"])),
        draw(st.sampled_from(Colour)),
        draw(st.builds(Nested, INTEGERS, st.text(max_size=items))),
        draw(st.binary(max_size=items)),
        draw(st.dictionaries(st.text(max_size=9), INTEGERS, max_size=items)),
        draw(st.dictionaries(INTEGERS, st.floats(), max_size=9)),
        draw(st.frozensets(INTEGERS, max_size=items)),
        draw(st.none() | st.lists(INTEGERS, max_size=items).map(tuple)),
        draw(st.tuples(st.booleans(), st.none() | INTEGERS)),
        draw(st.lists(BUDGETS, max_size=4).map(tuple)),
        draw(st.none() | BUDGETS),
        draw(st.sampled_from([None, ob.AsyncTimed(), ob.FixedMinibatch(optimizer=ob.SGD(lr=0.5))])),
    )
    assert wire_size(message) == wire.encode(message).size


def test_a_meta_that_exactly_fits_into_the_head_adds_nothing() -> None:
    sizes = [wire_size(AnyHeader("x" * length, torch.empty(0))).nbytes for length in range(META_INLINE_BYTES_MAX)]
    fitting = sizes.count(HEAD_BYTES)
    assert sizes[:fitting] == [HEAD_BYTES] * fitting
    assert sizes[fitting] == HEAD_BYTES + META_INLINE_BYTES_MAX + 1


def test_a_compressed_tensor_counts_with_and_without_compression() -> None:
    vector = torch.arange(1000, dtype=torch.float32)
    kind = KINDS["offbeat.strategies.hub.hub_worker.Gradient"]
    plain, coded = (
        kind(body, (), 1, 0.0, 0, (0, 1), 1.0, True) for body in (vector, ob.compression.Int8().encode(vector, Pool()))
    )
    assert wire_size(coded) == wire.encode(coded).size
    assert wire_size(coded).nbytes < wire_size(coded).nbytes_uncompressed == wire_size(plain).nbytes


def test_a_header_that_cannot_be_sent_is_refused_with_the_sentence_of_its_encoding() -> None:
    message = AnyHeader(object(), torch.empty(0))
    with pytest.raises(ContractViolation) as sized:
        wire_size(message)
    with pytest.raises(ContractViolation) as encoded:
        wire.encode(message)
    assert str(sized.value) == str(encoded.value)
    assert "the message AnyHeader cannot be sent: object is not plain data" in str(sized.value)
