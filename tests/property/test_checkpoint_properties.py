"""Checkpoints: any nested state comes back the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigurationError
from offbeat.live.state_file import load, save

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    made = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES))).permute(order)
    return made[::2] if made.ndim and draw(st.booleans()) else made


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
states = st.recursive(
    scalars | tensors(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        dense = torch.empty_like(a)  # which is a tensor laid out as this one, without its gaps
        strides_kept = all(x == y for x, y, size in zip(b.stride(), dense.stride(), a.shape, strict=True) if size > 1)
        gaps = a.numel() == 0 or a.stride() != dense.stride()
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) and (strides_kept or gaps)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


@given(states)
def test_any_state_survives_a_file(state: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "checkpoint-0.offbeat"
        save(path, state)
        assert same(state, load(path))


@given(states, st.data())
def test_a_file_that_was_changed_anywhere_is_refused(state: Any, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "checkpoint-0.offbeat"
        save(path, state)
        raw = bytearray(path.read_bytes())
        index = data.draw(st.integers(0, len(raw) - 1))
        raw[index] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
        try:
            load(path)
        except ConfigurationError:
            return
        raise AssertionError("a changed file was read")
