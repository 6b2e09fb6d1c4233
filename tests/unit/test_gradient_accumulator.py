"""Rounds that are accumulated one after the other, with results that the next one leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat.core.flat import FlatModule
from offbeat.core.memory_pool import COPY_BYTES_MIN, Pool
from offbeat.engine.gradient_accumulator import GradientAccumulator

LARGE = COPY_BYTES_MIN // 4


@pytest.mark.parametrize("width", [8, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_does_not_change_with_the_next_round(width: int, dtype: torch.dtype) -> None:
    pool, flat = Pool(), FlatModule(nn.Linear(width, 1, bias=False, dtype=dtype))
    accumulator = GradientAccumulator(flat, pool)
    results = []
    for number in range(1, 5):
        accumulator.begin(0, 1, number)
        for _ in range(2):
            accumulator.add(flat.module(torch.full((1, width), float(number), dtype=dtype)).sum())
        results.append(accumulator.end().gradient)
    for number, gradient in enumerate(results, 1):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, torch.full((width,), 2.0 * number))


def test_a_large_result_is_not_copied_and_its_memory_is_used_again() -> None:
    pool, flat = Pool(), FlatModule(nn.Linear(LARGE, 1, bias=False))
    accumulator = GradientAccumulator(flat, pool)
    for number in range(6):
        accumulator.begin(0, 1, number)
        accumulator.add(flat.module(torch.ones(1, LARGE)).sum())
        where = flat.gradients.data_ptr()
        gradient = accumulator.end().gradient
        assert gradient.data_ptr() == where
        assert flat.gradients.data_ptr() != where
        del gradient
    assert pool.allocated <= 2
