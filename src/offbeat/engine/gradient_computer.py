"""Gradients of a workload's model: load parameters, run micro-batches, return the sum.

One model serves all ranks of a process. If nothing in it depends on how a round is divided (no buffers, no batch norm,
no random numbers), consecutive micro-batches are merged into one call: the sum is the same, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from offbeat.core.examples import Order
from offbeat.core.flat import FlatModule
from offbeat.core.messages import Buffers
from offbeat.core.workload import Measured, Workload
from offbeat.engine.gradient_accumulator import GradientAccumulator, GradientResult
from offbeat.engine.microbatches import next_microbatch
from offbeat.engine.workload_losses import WorkloadLosses

SAMPLES_PER_CALL_MAX = 1024
"""Limit of merged calls: larger ones are not faster, and need more memory."""


@dataclass(frozen=True)
class GradientRequest:
    """Which samples to differentiate, in micro-batches of which size. `key`, seed and rank, seeds dropout."""

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
        self._losses = WorkloadLosses(workload, self.flat.module)
        self._accumulator = GradientAccumulator(self.flat)
        self._loaded: tuple[Tensor, int] | None = None
        self._merge_microbatches = merge_microbatches and not self.flat.buffers and not self.batch_norm
        self._is_first = True

    @property
    def batch_norm(self) -> bool:
        """Whether the model has batch norm."""
        return self._losses.batch_norm

    def gradient(self, parameters: Tensor, buffers: Buffers, request: GradientRequest) -> GradientResult:
        """The sum of gradients over the requested samples, in a new tensor."""
        result = self._gradient(parameters, buffers, request)
        if self._merge_microbatches and self._is_first:
            self._is_first = False
            if self._accumulator.has_drawn_randomness():
                self._merge_microbatches = False
                return self._gradient(parameters, buffers, request)
        return result

    def _gradient(self, parameters: Tensor, buffers: Buffers, request: GradientRequest) -> GradientResult:
        self._load(parameters, buffers)
        self._accumulator.begin(*request.key, request.first)
        for first, stop in self._calls(request):
            batch = self.workload.train.drawn(request.order, first, stop)
            self._accumulator.add(self._losses.of(batch).sum())
        if self.flat.buffers:
            self._loaded = None  # training has changed them
        return self._accumulator.end()

    def evaluate(self, parameters: Tensor, buffers: Buffers, *, is_score: bool = False) -> Measured:
        """Loss and accuracies on the test data, or for a score on the validation data."""
        self._load(parameters, buffers)
        return self._losses.evaluate(is_score=is_score)

    def _calls(self, request: GradientRequest) -> Iterator[tuple[int, int]]:
        """The first draw of each call and that after its last."""
        size, done = request.microbatch, 0
        if self._merge_microbatches:
            size *= max(1, SAMPLES_PER_CALL_MAX // size)
        while samples := next_microbatch(done, size, request.samples):
            first = request.first + done
            yield first, first + samples
            done += samples

    def _load(self, parameters: Tensor, buffers: Buffers) -> None:
        requested = (parameters, parameters._version)
        if self._loaded is not None and self._loaded[0] is parameters and self._loaded == requested and not buffers:
            return
        self.flat.load(parameters, buffers)
        self._loaded = requested
