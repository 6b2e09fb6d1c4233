"""The gradients that wait for the next update.

Where an update waits for everybody they are held and summed in the order of ranks, so that the result does not
depend on who was first. Otherwise each is added as it arrives, and nothing is held.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offbeat.events import MessageArrived
from offbeat.flat import renewed_buffers
from offbeat.messages import Buffers
from offbeat.records.schema import Contribution
from offbeat.strategies.hub.messages import Gradient
from offbeat.strategies.hub.pacing import Effort


class Collected:
    def __init__(self, in_rank_order: bool, memory: Tensor) -> None:
        """`memory` is where the sum is made; whoever lends it leaves it alone until `mean` has been used."""
        self._in_rank_order = in_rank_order
        self._memory = memory
        self._held: list[tuple[int, float, Tensor]] = []
        self._total: Tensor | None = None
        self._buffers: list[tuple[int, Buffers, int]] = []
        self.contributions: list[Contribution] = []
        self.efforts: dict[int, Effort] = {}
        """rank → what it did since the last update"""
        self.messages = 0

    def add(self, rank: int, event: MessageArrived, message: Gradient, staleness: int, weight: float) -> None:
        """Collect a gradient: `g = Σ weight · G / Σ samples`."""
        if self._in_rank_order:
            kept = event.keep()
            assert isinstance(kept, Gradient)
            self._held.append((rank, weight, kept.gradient))
        else:
            self._add(message.gradient, weight)
        if message.buffers:
            self._buffers.append((rank, tuple(buffer.clone() for buffer in message.buffers), message.samples))
        self.contributions.append(Contribution(rank, *message.draws, staleness))
        self.note(rank, Effort(message.samples, message.seconds))

    def _add(self, gradient: Tensor, weight: float) -> None:
        if self._total is None:
            self._total = torch.mul(gradient, weight, out=self._memory)
        else:
            self._total.add_(gradient, alpha=weight)

    def note(self, rank: int, effort: Effort) -> None:
        """Count a message, whether or not there was anything to add."""
        before = self.efforts.get(rank, Effort(0, 0.0))
        self.efforts[rank] = Effort(before.samples + effort.samples, before.seconds + effort.seconds)
        self.messages += 1

    @property
    def samples(self) -> int:
        return sum(contribution.stop - contribution.first for contribution in self.contributions)

    def mean(self) -> Tensor:
        """The weighted sum over the number of samples. Ends the collection."""
        for _, weight, gradient in sorted(self._held, key=lambda held: held[0]):
            self._add(gradient, weight)
        if self._in_rank_order:
            self.contributions.sort(key=lambda contribution: contribution.rank)
            self._buffers.sort(key=lambda entry: entry[0])
        assert self._total is not None
        return self._total.div_(self.samples)

    def merged_buffers(self, before: Buffers) -> Buffers:
        """Averaged by samples, where any came."""
        return renewed_buffers(before, [(buffers, samples) for _, buffers, samples in self._buffers])

    def state(self) -> dict[str, Any]:
        return {
            "held": [[rank, weight, gradient.clone()] for rank, weight, gradient in self._held],
            "total": None if self._total is None else self._total.clone(),
            "buffers": [[rank, [b.clone() for b in buffers], samples] for rank, buffers, samples in self._buffers],
            "contributions": [[c.rank, c.first, c.stop, c.staleness] for c in self.contributions],
            "efforts": {str(rank): [effort.samples, effort.seconds] for rank, effort in self.efforts.items()},
            "messages": self.messages,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._held = [(rank, weight, gradient) for rank, weight, gradient in state["held"]]
        self._total = state["total"]
        self._buffers = [(rank, tuple(buffers), samples) for rank, buffers, samples in state["buffers"]]
        self.contributions = [Contribution(*entry) for entry in state["contributions"]]
        self.efforts = {int(rank): Effort(*effort) for rank, effort in state["efforts"].items()}
        self.messages = state["messages"]
