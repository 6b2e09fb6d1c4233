"""Gradients of the real model: load values, run micro-batches, hand out the sum.

One model serves all ranks of a process. Where nothing in it depends on how a batch is cut (no buffers, so no
batch statistics), consecutive micro-batches may be run in one call: the sum is the same, up to rounding.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.examples import Order
from offbeat.core.flat import FlatModule, is_finite
from offbeat.core.messages import Buffers
from offbeat.core.workload import Measured, Workload, on_device
from offbeat.errors import ConfigurationError

SAMPLES_PER_CALL_MAX = 1024
"""A call of more samples than this is no faster, and needs memory."""


class GradientResult(NamedTuple):
    """`gradient` and `loss` are sums over the samples."""

    gradient: Tensor
    loss: float
    buffers: Buffers
    finite: bool


@dataclass(frozen=True)
class GradientRequest:
    """Which samples to differentiate, cut how. `key` names the random stream of dropout and the like."""

    order: Order
    first: int
    samples: int
    microbatch: int
    key: tuple[int, int]


class GradientComputer:
    """The model of this process, and how to differentiate and evaluate it."""

    def __init__(self, workload: Workload, seed: int, *, joins: bool = True) -> None:
        """Without `joins`, every micro-batch is a call of its own, also where that makes no difference to the sum."""
        self.workload = workload
        self.flat = FlatModule(workload.initial_model(seed))
        self._loaded: tuple[Tensor, int] | None = None
        self.batch_norm = _has_batch_norm(self.flat.module)
        self._joins_microbatches = joins and not self.flat.buffers and not self.batch_norm
        self._works = False

    def gradient(self, parameters: Tensor, buffers: Buffers, batches: GradientRequest) -> GradientResult:
        """The sum of gradients over the batches, in a tensor of its own."""
        self._load(parameters, buffers)
        self.flat.zero_gradients()
        # The default generator alone: seeding accelerators as well would cost more than a small gradient.
        torch.default_generator.manual_seed(zlib.crc32(repr((batches.key, batches.first)).encode()))
        losses = []
        for first, stop in self._calls(batches):
            batch = self.workload.train.drawn(batches.order, first, stop)
            total = self._losses(batch).sum()
            total.backward()  # type: ignore[no-untyped-call]
            losses.append(total.detach())
        gradient = self.flat.gradients.clone()
        new_buffers = tuple(buffer.clone() for buffer in self.flat.buffers)
        if new_buffers:
            self._loaded = None  # training has moved them
        loss = sum(map(float, losses))
        statistics = [buffer for buffer in new_buffers if buffer.is_floating_point()]
        finite = math.isfinite(loss) and all(map(is_finite, [gradient, *statistics]))
        return GradientResult(gradient, loss, new_buffers, finite)

    def _losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        batch = on_device(batch, self.flat.parameters.device)
        if self._works and len(batch[1]) > 1:
            return self.workload.losses(self.flat.module, batch)
        with self._explained(batch):
            return self.workload.losses(self.flat.module, batch)

    def evaluate(self, parameters: Tensor, buffers: Buffers) -> Measured:
        """Held-out loss and accuracies."""
        self._load(parameters, buffers)
        with self._explained(self.workload.evaluation_examples.between(0, 2)):
            return Measured(*self.workload.evaluate(self.flat.module))

    @contextmanager
    def _explained(self, batch: tuple[Tensor, Tensor]) -> Iterator[None]:
        """What fails on the very first batch is a model, a loss and data that do not fit, and is told as such."""
        try:
            yield
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if len(batch[1]) == 1 and "more than 1 value per channel" in str(error):
                raise ConfigurationError(
                    "the model has batch norm, which needs at least 2 samples at a time, but a micro-batch of 1 was "
                    "asked for; raise microbatch (and batch) to 2 or more"
                ) from None
            if self._works:
                raise
            kinds = [f"{tensor.dtype} of shape {tuple(tensor.shape)}".removeprefix("torch.") for tensor in batch]
            raise ConfigurationError(
                f"the model or the loss failed on its first batch (inputs: {kinds[0]}; targets: {kinds[1]}; "
                f"parameters: {str(self.flat.parameters.dtype).removeprefix('torch.')}): {str(error).splitlines()[0]}"
            ) from error
        self._works = True

    def _calls(self, batches: GradientRequest) -> list[tuple[int, int]]:
        size = batches.microbatch
        if self._joins_microbatches:
            size *= max(1, SAMPLES_PER_CALL_MAX // size)
        stop = batches.first + batches.samples
        cuts = [*range(batches.first, stop, size), stop]
        if len(cuts) > 2 and cuts[-1] - cuts[-2] == 1 and not self._joins_microbatches:
            del cuts[-2]  # batch norm has no statistics of a single sample
        return list(itertools.pairwise(cuts))

    def _load(self, parameters: Tensor, buffers: Buffers) -> None:
        wanted = (parameters, parameters._version)
        if self._loaded is not None and self._loaded[0] is parameters and self._loaded == wanted and not buffers:
            return
        self.flat.load(parameters, buffers)
        self._loaded = wanted


def _has_batch_norm(module: nn.Module) -> bool:
    """Batch norm that keeps no statistics has no buffers, and still depends on how a batch is cut."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
