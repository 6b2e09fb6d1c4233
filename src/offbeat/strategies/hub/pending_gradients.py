"""The gradients that a hub has collected for its next update: their weighted mean, and the rate that it is applied at.

direction   Σ v_i G_i / Σ v_i b_i      G_i: sum over b_i samples, v_i: weight by staleness, see `damping.py`
rate        lr · Σ v_i b_i / Σ b_i

They are added up in the dtype of the master values, which may be wider than theirs.

Where a training loop weighs its samples, by tokens for example, b_i is the sum of these weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.core.events import MessageArrived
from offbeat.core.messages import Buffers
from offbeat.records.schema import Contribution
from offbeat.strategies.hub.hub_worker import Gradient
from offbeat.strategies.hub.work_sizing import Effort
from offbeat.strategies.message_kinds import kept
from offbeat.strategies.node_state import Stateful


class PendingGradients(Stateful):
    """The gradients of the next update.

    With `in_rank_order` they are held and summed in the order of ranks, so that the sum does not depend on the order of
    arrival. Otherwise each is added to the sum when it arrives; the first one is held, since it may be the only one,
    whose mean is made in one pass.
    """

    caches = ("_memory",)

    _held: list[tuple[int, float, Tensor]]
    """rank, weight, gradient"""
    _sum: Tensor | None = None
    _divisor: float = 0.0
    """Σ v b"""
    _undamped: float = 0.0
    """Σ b"""
    _loss: float = 0.0
    _buffers: list[tuple[int, Buffers, int]]
    """rank, what it has added to the buffers, samples"""
    contributions: list[Contribution]
    efforts: dict[int, Effort]
    """rank → samples and seconds since the last update"""
    messages: int = 0

    def __init__(self, in_rank_order: bool, memory: Tensor) -> None:
        """The sum is written to `memory`, which must not be used otherwise until the update is made."""
        self._in_rank_order = in_rank_order
        self._memory = memory
        self._held, self._buffers, self.contributions, self.efforts = [], [], [], {}

    def add(self, rank: int, event: MessageArrived, message: Gradient, staleness: int, weight: float) -> None:
        """Collect a gradient with its weight by staleness."""
        self._divisor += weight * message.divisor
        self._undamped += message.divisor
        self._loss += message.loss
        if self._in_rank_order or self._is_empty:
            self._held.append((rank, weight, kept(event, Gradient).gradient))
        else:
            self._add_held()
            self._add(message.gradient, weight)
        if message.buffers:
            self._buffers.append((rank, tuple(buffer.clone() for buffer in message.buffers), message.samples))
        self.contributions.append(Contribution(rank, *message.draws, staleness))
        self.count(rank, Effort(message.samples, message.seconds))

    @property
    def _is_empty(self) -> bool:
        return self._sum is None and not self._held

    def _add_held(self) -> None:
        """Add the gradients that are held, in the order of ranks."""
        held, self._held = sorted(self._held, key=lambda one: one[0]), []
        for _, weight, gradient in held:
            self._add(gradient, weight)

    def _add(self, gradient: Tensor, weight: float) -> None:
        if self._sum is None:
            self._sum = torch.mul(gradient.to(self._memory.dtype), weight, out=self._memory)
        else:
            self._sum.add_(gradient, alpha=weight)

    def count(self, rank: int, effort: Effort) -> None:
        """Count a message, also one without a gradient to add."""
        before = self.efforts.get(rank)
        if before is not None:
            effort = Effort(before.samples + effort.samples, before.seconds + effort.seconds)
        self.efforts[rank] = effort
        self.messages += 1

    @property
    def samples(self) -> int:
        return sum(contribution.stop - contribution.first for contribution in self.contributions)

    def mean(self) -> Tensor:
        """The weighted mean gradient. Nothing may be added afterwards."""
        if self._in_rank_order:
            self.contributions.sort(key=lambda contribution: contribution.rank)
            self._buffers.sort(key=lambda entry: entry[0])
        if self._sum is None and len(self._held) == 1 and self._held[0][1] == 1.0:
            only = self._held[0][2]
            return torch.div(only.to(self._memory.dtype), self._divisor, out=self._memory)
        self._add_held()
        assert self._sum is not None
        return self._sum.div_(self._divisor)

    @property
    def damping(self) -> float:
        """The factor on the learning rate: the mean weight of the samples.

        It is on the rate and not on the gradient, since adaptive optimizers divide a scaled gradient by its scale.
        """
        return self._divisor / self._undamped

    @property
    def loss(self) -> float:
        """The mean training loss of the samples."""
        return self._loss / self.samples

    @property
    def staleness(self) -> float:
        """The mean staleness of the samples."""
        return sum(part.staleness * (part.stop - part.first) for part in self.contributions) / self.samples

    @property
    def buffers(self) -> list[tuple[Buffers, int]]:
        """What each message adds to the buffers, and its samples."""
        return [(buffers, samples) for _, buffers, samples in self._buffers]
