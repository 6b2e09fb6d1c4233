"""The parameters that a peer trains, their A²CiD² momentum, and buffers. All arithmetic is in place.

With A²CiD² a peer has a second copy x̃ of its parameters x. Stored is `acid_offset` = x̃ − x, which an optimizer step
leaves unchanged, since it is applied to both copies. Mixing for a time in which the offset decays by a factor q is

    x += ½(1−q)·offset;  offset *= q

and an exchange with difference d is x −= ½d, offset −= (α̃−½)d. Mixing conserves x + ½·offset, the mean of both copies.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.core.buffer_merge import BufferMerge, RunningStatistics, is_averaged
from offbeat.core.compression import Compression
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Buffers
from offbeat.strategies.node_state import Stateful

ALPHA = 0.5
"""α: the share of the difference that each end applies to its parameters."""


class ExchangeResult(NamedTuple):
    """What the responder of an exchange sends back."""

    difference: Tensor
    buffers: Buffers
    """The responder's buffers from before the exchange."""
    distance: float
    """Squared Euclidean distance of the two peers before the exchange."""


class Replica(Stateful):
    """Parameters, A²CiD² offset and buffers of one peer; restored in place, since the optimizer refers to them."""

    caches = ("_pool",)

    parameters: Tensor
    acid_offset: Tensor | None
    buffers: Buffers

    def __init__(
        self,
        parameters: Tensor,
        buffers: Buffers,
        *,
        accelerated: bool,
        statistics: tuple[RunningStatistics, ...] = (),
        compression: Compression | None = None,
    ) -> None:
        self.parameters = parameters.clone()
        self.acid_offset = torch.zeros_like(parameters) if accelerated else None
        self.buffers = tuple(buffer.clone() for buffer in buffers)
        self._buffer_merge = BufferMerge(statistics)
        self._compression = compression
        self._pool = Pool()

    def reset(self, parameters: Tensor, buffers: Buffers) -> None:
        """Set parameters and buffers, without momentum."""
        self.parameters.copy_(parameters)
        if self.acid_offset is not None:
            self.acid_offset.zero_()
        self.buffers = tuple(buffer.clone() for buffer in buffers)

    def mix(self, decay: float) -> None:
        """Move both copies towards each other, until their offset is `decay` times what it was."""
        if self.acid_offset is not None and decay < 1.0:
            self.parameters.add_(self.acid_offset, alpha=0.5 * (1.0 - decay))
            self.acid_offset.mul_(decay)

    def snapshot(self) -> tuple[Tensor, Buffers]:
        """Copies of parameters and buffers, to be sent."""
        return self._pool.copy(self.parameters), tuple(buffer.clone() for buffer in self.buffers)

    def mean_of_copies(self) -> tuple[Tensor, Buffers]:
        """A snapshot with the mean of both copies, which averaging conserves: the parameters of global averages."""
        parameters, buffers = self.snapshot()
        if self.acid_offset is not None:
            parameters.add_(self.acid_offset, alpha=0.5)
        return parameters, buffers

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite, so that they may be averaged with those of others."""
        return bool(torch.isfinite(self.parameters).all()) and all(map(_is_finite, self.buffers))

    def respond(self, theirs: Tensor, their_buffers: Buffers, alpha_tilde: float) -> ExchangeResult | None:
        """Apply this end's share of the difference to an offer; None, and no change, if a value is not finite."""
        difference = torch.sub(theirs, self.parameters, out=self._pool.like(self.parameters))
        distance = float(torch.linalg.vector_norm(difference)) ** 2
        if not math.isfinite(distance) or not all(map(_is_finite, (*their_buffers, *self.buffers))):
            return None
        if self._compression is not None:
            difference = self._compression.roundtrip(difference, self._pool)
        mine = tuple(buffer.clone() for buffer in self.buffers)
        self._apply(difference, their_buffers, ALPHA, alpha_tilde - ALPHA)
        return ExchangeResult(difference, mine, distance)

    def complete(self, difference: Tensor, buffers: Buffers, alpha_tilde: float) -> None:
        """Apply the initiator's share of an answer to the current values; `buffers` are the responder's."""
        self._apply(difference, buffers, -ALPHA, ALPHA - alpha_tilde)

    def _apply(self, difference: Tensor, buffers: Buffers, share: float, offset_share: float) -> None:
        self.parameters.add_(difference, alpha=share)
        if self.acid_offset is not None:
            self.acid_offset.add_(difference, alpha=offset_share)
        for mine, theirs in zip(self.buffers, buffers, strict=True):
            if is_averaged(mine):
                # Never by a difference, which may be out of date: a variance could become negative.
                mine.lerp_(theirs, ALPHA)
            else:
                torch.maximum(mine, theirs, out=mine)

    def add_buffer_changes(self, before: Buffers, after: Buffers) -> None:
        """Add what a computation has added to its buffers `before`; exchanges may have changed them meanwhile."""
        self.buffers = self._buffer_merge.rebase(before, after, self.buffers)


def _is_finite(buffer: Tensor) -> bool:
    return not is_averaged(buffer) or bool(torch.isfinite(buffer).all())
