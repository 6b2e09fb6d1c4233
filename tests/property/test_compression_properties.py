"""Whatever the vector: how far off it comes back, that nothing is lost for good, and that coding it again is exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

import offbeat as ob
from offbeat.core.compression import decode, is_encoded
from offbeat.core.memory_pool import Pool

COMPRESSIONS = st.one_of(
    st.just(ob.compression.BFloat16()),
    st.builds(ob.compression.Int8, chunk=st.integers(1, 40)),
    st.builds(ob.compression.TopK, share=st.floats(0.01, 1.0)),
)
LARGE = float(np.float32(1e32))


def of(dtype: type[np.floating], width: int) -> st.SearchStrategy[Tensor]:
    elements = st.floats(-LARGE, LARGE, width=width)  # type: ignore[call-overload]
    return arrays.arrays(dtype, st.integers(1, 200), elements=elements).map(torch.from_numpy)


VECTORS = st.one_of(of(np.float32, 32), of(np.float64, 64))


def back(compression: ob.compression.Compression, values: Tensor) -> Tensor:
    blob = compression.encode(values, Pool())
    return decode(blob, Pool()) if is_encoded(blob) else blob


@given(COMPRESSIONS, VECTORS)
@settings(max_examples=300, deadline=None)
def test_encoding_a_decoded_vector_is_exact(compression: ob.compression.Compression, values: Tensor) -> None:
    once = back(compression, values)
    assert torch.equal(back(compression, once), once)
    assert torch.equal(compression.roundtrip(values, Pool()), once)


@given(COMPRESSIONS, VECTORS)
@settings(max_examples=200, deadline=None)
def test_dtype_and_length_are_restored(compression: ob.compression.Compression, values: Tensor) -> None:
    once = back(compression, values)
    assert (once.dtype, once.shape) == (values.dtype, values.shape)


@given(VECTORS, st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_int8_has_an_error_of_at_most_half_a_step_of_its_chunk(values: Tensor, chunk: int) -> None:
    once = back(ob.compression.Int8(chunk=chunk), values)
    for mine, theirs in zip(values.split(chunk), once.split(chunk), strict=True):
        assert (mine - theirs).abs().max() <= 0.5001 * mine.abs().max() / 127 + 1e-28


@given(VECTORS)
@settings(max_examples=200, deadline=None)
def test_bf16_has_a_relative_error_of_at_most_a_256th(values: Tensor) -> None:
    assert ((back(ob.compression.BFloat16(), values) - values).abs() <= values.abs() / 255 + 1e-40).all()


@given(VECTORS, st.floats(0.01, 1.0))
@settings(max_examples=200, deadline=None)
def test_top_k_omits_no_element_larger_than_those_it_sends(values: Tensor, share: float) -> None:
    once = back(ob.compression.TopK(share), values)
    sent = once != 0
    if not is_encoded(ob.compression.TopK(share).encode(values, Pool())):
        return
    assert int(sent.sum()) <= max(1, round(share * len(values)))
    left = values[~sent].abs()
    if sent.any() and len(left):
        assert left.max().float() <= values[sent].abs().min().float()


@given(COMPRESSIONS, st.lists(arrays.arrays(np.float64, 40, elements=st.floats(-1e6, 1e6)), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_with_feedback_the_sum_of_increments_arrives(
    compression: ob.compression.Compression, increments: list[object]
) -> None:
    residual, pool = torch.zeros(40, dtype=torch.float64), Pool()
    sent = torch.zeros(40, dtype=torch.float64)
    for increment in increments:
        values = torch.from_numpy(np.asarray(increment))
        blob = compression.encode(values, pool, residual if compression.keeps_residual else None)
        sent += decode(blob, pool) if is_encoded(blob) else blob
    total = torch.from_numpy(np.sum(increments, axis=0))
    if compression.keeps_residual:
        assert (sent + residual).tolist() == pytest.approx(total.tolist(), abs=1e-6)
