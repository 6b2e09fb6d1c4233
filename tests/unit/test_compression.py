"""Compressions on their own: decoded values, sizes, and refused input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat as ob
from offbeat.core.compression import decode, is_encoded, saved_bytes
from offbeat.core.compression.encoded_tensor import ENCODED_HEADER_BYTES
from offbeat.core.compression.top_k import SAMPLE
from offbeat.core.configuration import from_plain, to_plain
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Stop
from offbeat.core.wire_size import HEAD_BYTES, wire_size
from offbeat.errors import ContractViolation
from offbeat.strategies.hub.hub_worker import Gradient, Parameters

ALL = [
    ob.compression.BFloat16(),
    ob.compression.Int8(),
    ob.compression.Int8(chunk=3),
    ob.compression.TopK(share=0.1),
    ob.compression.TopK(share=0.4),
]
DTYPES = [torch.float32, torch.float64]


def vector(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bytes_of(numel: int) -> Tensor:
    return torch.full((numel,), 7, dtype=torch.uint8)


def gradient(values: Tensor) -> Gradient:
    return Gradient(values, (values[:2],), samples=1, loss=0.0, version=0, draws=(0, 1), seconds=0.0, finite=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [20, 511, 512, 513, 100_003])
def test_int8_has_an_error_of_at_most_half_a_step(numel: int, dtype: torch.dtype) -> None:
    values, pool = vector(numel, dtype), Pool()
    blob = ob.compression.Int8(chunk=512).encode(values, pool)
    back = decode(blob, pool)
    assert blob.numel() == ENCODED_HEADER_BYTES + -(-numel // 512) * dtype.itemsize + numel
    assert back.dtype is dtype
    for mine, theirs in zip(values.split(512), back.split(512), strict=True):
        assert (mine - theirs).abs().max() <= 0.50001 * mine.abs().max() / 127


@pytest.mark.parametrize("dtype", DTYPES)
def test_bf16_is_what_torch_rounds_to_at_half_the_bytes(dtype: torch.dtype) -> None:
    values, pool = vector(1001, dtype), Pool()
    blob = ob.compression.BFloat16().encode(values, pool)
    assert torch.equal(decode(blob, pool), values.bfloat16().to(dtype))
    assert blob.numel() == ENCODED_HEADER_BYTES + 2 * 1001


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [20, 1000, 3 * SAMPLE + 5])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3])
def test_top_k_sends_exactly_the_largest(numel: int, share: float, dtype: torch.dtype) -> None:
    values, pool = vector(numel, dtype), Pool()
    count = max(1, round(share * numel))
    blob = ob.compression.TopK(share).encode(values, pool)
    expected, places = torch.zeros_like(values), values.abs().topk(count).indices
    expected[places] = values[places].float().to(dtype)
    assert torch.equal(decode(blob, pool), expected)
    assert blob.numel() == ENCODED_HEADER_BYTES + 8 * count


def test_of_equal_elements_top_k_sends_the_first() -> None:
    pool = Pool()
    back = decode(ob.compression.TopK(0.1).encode(torch.ones(20), pool), pool)
    assert back.tolist() == [1.0, 1.0, *[0.0] * 18]


def test_a_misleading_sample_is_noticed() -> None:
    """What a strided sample sees is large, and everything else small, or the other way round."""
    numel, pool = 5 * SAMPLE, Pool()
    for seen, unseen in ((100.0, 1.0), (1.0, 100.0)):
        values = unseen * vector(numel)
        values[::5] = seen * vector(len(values[::5]), seed=1)
        back = decode(ob.compression.TopK(0.01).encode(values, pool), pool)
        assert set(back.nonzero().flatten().tolist()) == set(values.abs().topk(round(0.01 * numel)).indices.tolist())


def test_top_k_sends_all_nonzero_elements_if_these_are_fewer_than_k() -> None:
    numel, pool = 3 * SAMPLE, Pool()
    values = torch.zeros(numel)
    values[[5, 77, numel - 1]] = torch.tensor([1e-30, -2.0, 3.0])
    blob = ob.compression.TopK(0.01).encode(values, pool)
    assert blob.numel() == ENCODED_HEADER_BYTES + 3 * 8
    assert torch.equal(decode(blob, pool), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compression", ALL, ids=str)
def test_the_error_is_in_the_residual_and_is_sent_with_the_next(
    compression: ob.compression.Compression, dtype: torch.dtype
) -> None:
    pool, residual = Pool(), torch.zeros(1234, dtype=dtype)
    given = sent = torch.zeros(1234, dtype=dtype)
    for seed in range(5):
        values = vector(1234, dtype, seed)
        given = given + values
        sent = sent + decode(compression.encode(values, pool, residual), pool)
        if compression.keeps_residual:
            torch.testing.assert_close(sent + residual, given)
    assert compression.keeps_residual == bool(residual.any())


@pytest.mark.parametrize("compression", ALL, ids=str)
def test_encoding_is_deterministic_and_does_not_change_the_vector(compression: ob.compression.Compression) -> None:
    values = vector(3 * SAMPLE + 1)
    before = values.clone()
    first, again = compression.encode(values, Pool()), compression.encode(values.clone(), Pool())
    assert torch.equal(first, again)
    assert torch.equal(values, before)


@pytest.mark.parametrize("compression", ALL, ids=str)
@pytest.mark.parametrize("worst", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_elements_that_are_not_finite_or_too_large_are_not_encoded(
    compression: ob.compression.Compression, worst: float
) -> None:
    values, residual = vector(1000), torch.ones(1000)
    values[500] = worst
    assert compression.encode(values, Pool(), residual) is values
    assert torch.equal(residual, torch.ones(1000))


@pytest.mark.parametrize("compression", ALL, ids=str)
@pytest.mark.parametrize(
    "values", [torch.empty(0), torch.arange(500), torch.ones(400, dtype=torch.float16), torch.ones(6)], ids=str
)
def test_vectors_that_are_empty_or_of_another_dtype_or_would_not_shrink_are_not_encoded(
    compression: ob.compression.Compression, values: Tensor
) -> None:
    assert compression.encode(values, Pool()) is values


@pytest.mark.parametrize("compression", ALL, ids=str)
def test_zeros_stay_zeros(compression: ob.compression.Compression) -> None:
    pool = Pool()
    assert not decode(compression.encode(torch.zeros(1000), pool), pool).any()


@pytest.mark.parametrize("compression", ALL, ids=str)
def test_a_blob_may_have_any_alignment(compression: ob.compression.Compression) -> None:
    pool = Pool()
    blob = compression.encode(vector(1000), pool)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), blob])[3:]
    assert torch.equal(decode(shifted, pool), decode(blob, pool))


@pytest.mark.parametrize("compression", ALL, ids=str)
def test_a_truncated_blob_is_refused(compression: ob.compression.Compression) -> None:
    blob = compression.encode(vector(1000), Pool())
    for damaged in (blob[:-1], blob[:10], torch.cat([blob, blob])):
        with pytest.raises(ob.ContractViolation, match="arrived"):
            decode(damaged, Pool())


def test_bytes_of_an_unknown_compression_are_refused() -> None:
    blob = ob.compression.Int8().encode(vector(100), Pool())
    with pytest.raises(ob.ContractViolation, match="not known on this rank"):
        decode(torch.cat([torch.full((1,), 65, dtype=torch.uint8), blob[1:]]), Pool())
    blob = blob.clone()
    blob[8] = 3
    with pytest.raises(ob.ContractViolation, match="4 or 8"):
        decode(blob, Pool())


def test_indices_that_are_out_of_range_or_order_are_refused() -> None:
    for places in ([3, 1], [-1, 2], [0, 100], [4, 4]):
        blob = ob.compression.TopK(0.02).encode(vector(100), Pool()).clone()
        blob[ENCODED_HEADER_BYTES : ENCODED_HEADER_BYTES + 8] = torch.tensor(places, dtype=torch.int32).view(
            torch.uint8
        )
        with pytest.raises(ob.ContractViolation, match="not in order"):
            decode(blob, Pool())


def test_memory_is_reused() -> None:
    pool, values = Pool(), vector(400_000)
    for compression in (ob.compression.BFloat16(), ob.compression.Int8(), ob.compression.TopK(0.1)):
        for _ in range(3):
            decode(compression.encode(values, pool), pool)
    assert pool.allocated == 4  # a blob of each, and a vector


def test_the_saved_bytes_of_a_message_are_counted() -> None:
    values = vector(1000)
    plain = gradient(values)
    assert saved_bytes(plain) == 0
    blob = ob.compression.Int8().encode(values, Pool())
    coded = gradient(values).with_tensors(iter([blob, values[:2]]))
    assert is_encoded(blob)
    assert wire_size(coded).nbytes == HEAD_BYTES + blob.nbytes + 8
    assert wire_size(coded).nbytes + saved_bytes(coded) == wire_size(plain).nbytes == HEAD_BYTES + 4000 + 8
    stop = Stop(torch.zeros(30, dtype=torch.uint8), (), 0)
    assert saved_bytes(stop) == 0


@pytest.mark.parametrize("junk", [bytes_of(0), bytes_of(30), bytes_of(60)[::2], bytes_of(64).reshape(8, 8)])
def test_bytes_that_are_no_blob_save_nothing_and_are_refused_when_decoded(junk: Tensor) -> None:
    message = gradient(vector(10)).with_tensors(iter([junk, vector(2)]))
    assert saved_bytes(message) == 0
    with pytest.raises(ContractViolation):
        decode(junk, Pool())


def test_only_declared_fields_may_be_compressed() -> None:
    assert (Gradient.increments, Gradient.values) == (("gradient",), ())
    assert (Parameters.increments, Parameters.values) == ((), ("parameters",))
    assert Stop.compressible() == ()


# As configurations


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("bf16", ob.compression.BFloat16()),
        ("int8", ob.compression.Int8()),
        ("int8:256", ob.compression.Int8(chunk=256)),
        ("top-k:0.05", ob.compression.TopK(share=0.05)),
        ("top-k:0.05:no", ob.compression.TopK(share=0.05, feedback=False)),
        ({"name": "top-k", "share": 0.05}, ob.compression.TopK(share=0.05)),
        ("none", None),
    ],
)
def test_a_compression_can_be_a_word_or_a_table(text: Any, meant: ob.compression.Compression | None) -> None:
    strategy = from_plain(ob.Strategy, {"name": "fmb", "compression": text}, "strategy")
    assert strategy == ob.FixedMinibatch(compression=meant)
    assert from_plain(ob.Strategy, to_plain(strategy), "strategy") == strategy


def test_the_field_is_keyword_only() -> None:
    assert ob.FixedMinibatch(8) == ob.FixedMinibatch(microbatch=8)
    assert ob.AsyncFixed(compression=ob.compression.Int8()).hub(workers=2).compression == ob.compression.Int8()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ob.compression.Int8(chunk=0),
        lambda: ob.compression.Int8(chunk=1 << 30),
        lambda: ob.compression.Int8(chunk=2.5),  # type: ignore[arg-type]
        lambda: ob.compression.TopK(share=0.0),
        lambda: ob.compression.TopK(share=1.5),
        lambda: ob.compression.TopK(share=float("nan")),
        lambda: ob.FixedMinibatch(compression="int8"),  # type: ignore[arg-type]
        lambda: ob.Gossip(compression=ob.compression.Int8),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_work_are_refused(make: Any) -> None:
    with pytest.raises(ob.ConfigurationError, match="must be"):
        make()
