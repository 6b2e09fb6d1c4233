"""Gradients of the real model: load parameters, run micro-batches, return the sum.

One model serves all ranks of a process. If nothing in it depends on the size of a batch (no buffers, no batch norm),
consecutive micro-batches are merged into one call: the sum is the same, up to rounding.
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
"""Limit of merged calls: larger ones are not faster, and need more memory."""


class GradientResult(NamedTuple):
    """`gradient` and `loss` are sums over the samples."""

    gradient: Tensor
    loss: float
    buffers: Buffers
    finite: bool


@dataclass(frozen=True)
class GradientRequest:
    """Which samples to differentiate, in micro-batches of which size. `key` seeds dropout and the like."""

    order: Order
    first: int
    samples: int
    microbatch: int
    key: tuple[int, int]


class GradientComputer:
    """Differentiates and evaluates the model of this process."""

    def __init__(self, workload: Workload, seed: int, *, merge_microbatches: bool = True) -> None:
        """Build the model of a workload; `merge_microbatches` allows one call for several micro-batches."""
        self.workload = workload
        self.flat = FlatModule(workload.initial_model(seed))
        self._loaded: tuple[Tensor, int] | None = None
        self.batch_norm = _has_batch_norm(self.flat.module)
        self._merge_microbatches = merge_microbatches and not self.flat.buffers and not self.batch_norm
        self._has_succeeded = False

    def gradient(self, parameters: Tensor, buffers: Buffers, request: GradientRequest) -> GradientResult:
        """The sum of gradients over the requested samples, in a new tensor."""
        self._load(parameters, buffers)
        self.flat.zero_gradients()
        # Only the default generator: seeding accelerators too would cost more than a small gradient.
        torch.default_generator.manual_seed(zlib.crc32(repr((request.key, request.first)).encode()))
        losses = []
        for first, stop in self._calls(request):
            batch = self.workload.train.drawn(request.order, first, stop)
            total = self._losses(batch).sum()
            total.backward()  # type: ignore[no-untyped-call]
            losses.append(total.detach())
        gradient = self.flat.gradients.clone()
        new_buffers = tuple(buffer.clone() for buffer in self.flat.buffers)
        if new_buffers:
            self._loaded = None  # training has changed them
        loss = sum(map(float, losses))
        statistics = [buffer for buffer in new_buffers if buffer.is_floating_point()]
        finite = math.isfinite(loss) and all(map(is_finite, [gradient, *statistics]))
        return GradientResult(gradient, loss, new_buffers, finite)

    def _losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        batch = on_device(batch, self.flat.parameters.device)
        if self._has_succeeded and len(batch[1]) > 1:
            return self.workload.losses(self.flat.module, batch)
        with self._explain_errors(batch):
            return self.workload.losses(self.flat.module, batch)

    def evaluate(self, parameters: Tensor, buffers: Buffers) -> Measured:
        """Held-out loss and accuracies."""
        self._load(parameters, buffers)
        with self._explain_errors(self.workload.evaluation_examples.between(0, 2)):
            return Measured(*self.workload.evaluate(self.flat.module))

    @contextmanager
    def _explain_errors(self, batch: tuple[Tensor, Tensor]) -> Iterator[None]:
        """Turn an error on the first batch into a `ConfigurationError`: model, loss and data do not fit."""
        try:
            yield
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if len(batch[1]) == 1 and "more than 1 value per channel" in str(error):
                raise ConfigurationError(
                    "the model has batch norm, which needs at least 2 samples at a time, but a micro-batch of 1 was "
                    "asked for; raise microbatch (and batch) to 2 or more"
                ) from None
            if self._has_succeeded:
                raise
            described = [f"{tensor.dtype} of shape {tuple(tensor.shape)}".removeprefix("torch.") for tensor in batch]
            raise ConfigurationError(
                f"the model or the loss failed on its first batch (inputs: {described[0]}; targets: {described[1]}; "
                f"parameters: {str(self.flat.parameters.dtype).removeprefix('torch.')}): {str(error).splitlines()[0]}"
            ) from error
        self._has_succeeded = True

    def _calls(self, request: GradientRequest) -> list[tuple[int, int]]:
        size = request.microbatch
        if self._merge_microbatches:
            size *= max(1, SAMPLES_PER_CALL_MAX // size)
        stop = request.first + request.samples
        cuts = [*range(request.first, stop, size), stop]
        if len(cuts) > 2 and cuts[-1] - cuts[-2] == 1 and not self._merge_microbatches:
            del cuts[-2]  # batch norm fails on a single sample
        return list(itertools.pairwise(cuts))

    def _load(self, parameters: Tensor, buffers: Buffers) -> None:
        requested = (parameters, parameters._version)
        if self._loaded is not None and self._loaded[0] is parameters and self._loaded == requested and not buffers:
            return
        self.flat.load(parameters, buffers)
        self._loaded = requested


def _has_batch_norm(module: nn.Module) -> bool:
    """Batch norm depends on the size of a batch even if it tracks no statistics and has no buffers."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
