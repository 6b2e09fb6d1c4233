"""The gradient of one round: micro-batches are added one by one, the sum is the result.

The simulator, `offbeat train` and `offbeat.join` accumulate gradients with this class, so what random numbers a round
starts with and which results count as finite is the same in virtual time and live.
"""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.core.flat import FlatModule, is_finite
from offbeat.core.memory_pool import COPY_BYTES_MIN, Pool
from offbeat.core.messages import Buffers


class GradientResult(NamedTuple):
    """`gradient` and `loss` are sums over the samples; `buffers` are copies."""

    gradient: Tensor
    loss: float
    buffers: Buffers
    finite: bool


class GradientAccumulator:
    """Accumulates the gradient of one round at a time in the gradients of a module.

    Where these are bfloat16 or float16, micro-batches are added up in float32, and so is the result.

    flat: the module.
    pool: memory for results. With it, a large result is the memory that it was accumulated in, and the next round
        accumulates in other memory; without, or if it is small, it is a copy.
    """

    def __init__(self, flat: FlatModule, pool: Pool | None = None) -> None:
        self._flat = flat
        self._pool = pool
        dtype = flat.layout.master_dtype
        self._sum = None if dtype == flat.layout.dtype else torch.zeros_like(flat.gradients, dtype=dtype)
        """The gradients of all micro-batches but the last; None: they are added up in those of the module."""
        self._losses: list[Tensor] = []
        self._seed = 0

    def begin(self, seed: int, rank: int, draw: int) -> None:
        """Begin a round: zero the gradients and seed torch's default generator.

        Dropout and the like then depend on the samples of the round, and not on which rounds came before it.

        seed: the seed of the run.
        rank: the rank whose round it is.
        draw: the first data position of the round.
        """
        self._flat.zero_gradients()
        if self._sum is not None:
            self._sum.zero_()
        self._losses = []
        # Only the default generator: seeding accelerators too would cost more than a small gradient.
        self._seed = zlib.crc32(repr(((seed, rank), draw)).encode())
        torch.default_generator.manual_seed(self._seed)

    def add(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch; `loss` is the sum of its losses."""
        self._flat.bind_gradients()  # a training loop may have called zero_grad, which unbinds them
        if self._sum is not None and self._losses:
            self._sum.add_(self._flat.gradients)
            self._flat.gradients.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        self._losses.append(loss.detach())

    def has_drawn_randomness(self) -> bool:
        """Whether the round has taken random numbers from torch's default generator."""
        fresh = torch.Generator().manual_seed(self._seed)
        return not torch.equal(torch.default_generator.get_state(), fresh.get_state())

    def end(self) -> GradientResult:
        """End the round."""
        gradient, buffers = self._take_sum(), copied_buffers(self._flat)
        loss = sum(map(float, self._losses), start=0.0)
        return GradientResult(gradient, loss, buffers, is_result_finite(gradient, loss, buffers))

    def _take_sum(self) -> Tensor:
        """The sum, in memory that the next round does not change."""
        total = self._flat.gradients if self._sum is None else self._sum.add_(self._flat.gradients)
        if self._pool is None or total.nbytes < COPY_BYTES_MIN:
            return total.clone()
        memory = self._pool.like(total)
        if self._sum is None:
            return self._flat.replace_gradients(memory)
        self._sum = memory
        return total


def copied_buffers(flat: FlatModule) -> Buffers:
    """Copies of the buffers of a module."""
    return tuple(buffer.clone() for buffer in flat.buffers)


def is_result_finite(vector: Tensor, loss: float | None, buffers: Buffers) -> bool:
    """Whether a round may be used: all of its result is finite.

    vector: the sum of gradients, or the step.
    loss: the sum of the losses; None if unknown.
    buffers: the buffers after the round; integers are always finite.
    """
    statistics = (buffer for buffer in buffers if buffer.is_floating_point())
    return (loss is None or math.isfinite(loss)) and all(map(is_finite, (vector, *statistics)))
