"""Rounds whose gradients are computed together, in one call.

A round's gradient is needed when it ends. By then all rounds that are outstanding are known, with parameters and
samples, so the gradients of those that will end next are computed in the same call and wait for their ends. The
gradient of a round that is cut short meanwhile is not used, and computed again for what was done.
"""

from __future__ import annotations

import heapq

from offbeat.engine.batched_gradients import BatchedGradients, RoundInputs
from offbeat.engine.batching import Batching
from offbeat.engine.gradient_accumulator import GradientResult
from offbeat.simulation.process import Process
from offbeat.simulation.round_timing import Computation
from offbeat.simulation.sample_orders import SampleOrders


class RoundGroups:
    """Outstanding rounds, in the order of their ends, by how many samples they have.

    batching: which rounds are computed together, and how many.
    batched: differentiates the model for several rounds.
    orders: which samples belong to the draws of a rank.
    """

    def __init__(self, batching: Batching, batched: BatchedGradients, orders: SampleOrders) -> None:
        self._batching = batching
        self._batched = batched
        self._orders = orders
        self._outstanding: dict[int, list[tuple[float, int, Process, Computation]]] = {}
        """Samples → a heap of (end, sequence number, process, computation). Some have ended, or were replaced."""
        self._sequence = 0

    def begin(self, process: Process, computation: Computation) -> None:
        """A round has begun."""
        if self._accepts(computation.samples):
            self._push(process, computation)

    def gradient(self, process: Process, computation: Computation) -> GradientResult | None:
        """The gradient of a round that ends now; None if it must be computed by itself."""
        samples = computation.samples
        if computation.computed is not None and computation.computed[0] == samples:
            result = computation.computed[1]
            computation.computed = None
            return result
        if not self._accepts(samples):
            return None
        others = self._next(samples)
        if len(others) + 1 < self._batching.group_min:
            for other in others:
                self._push(*other)
            return None
        inputs = [self._inputs(*one) for one in [(process, computation), *others]]
        own, *rest = self._batched.compute(inputs)
        for (_, ahead), result in zip(others, rest, strict=True):
            ahead.computed = samples, result
        return own

    def _accepts(self, samples: int) -> bool:
        return 0 < samples <= self._batching.samples_max

    def _push(self, process: Process, computation: Computation) -> None:
        self._sequence += 1
        heap = self._outstanding.setdefault(computation.samples, [])
        heapq.heappush(heap, (computation.ends, self._sequence, process, computation))

    def _next(self, samples: int) -> list[tuple[Process, Computation]]:
        """Take the rounds of so many samples that end next."""
        heap = self._outstanding.get(samples, [])
        taken: list[tuple[Process, Computation]] = []
        while heap and len(taken) + 1 < self._batching.group_max:
            _, _, process, computation = heapq.heappop(heap)
            if process.computation is computation and computation.samples == samples:
                taken.append((process, computation))
        return taken

    def _inputs(self, process: Process, computation: Computation) -> RoundInputs:
        action = computation.action
        order = self._orders.of(process)
        return RoundInputs(action.parameters, order, action.draw, action.draw + computation.samples)
