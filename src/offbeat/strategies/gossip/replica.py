"""The parameters that a peer trains, their A²CiD² momentum, and buffers. All arithmetic is in place.

With A²CiD² a peer has a second copy x̃ of its parameters x. Stored is the offset x̃ − x, which an optimizer step leaves
unchanged, since it is applied to both copies. Mixing for a time in which the offset decays by a factor q is

    x += ½(1−q)·offset;  offset *= q

and an exchange with difference d is x −= ½d, offset −= (α̃−½)d. Mixing conserves x + ½·offset, the mean of both copies.

Mixing costs no pass over memory. With a vector p, a vector o and two numbers, x = p + due·o and offset = scale·o, so
that mixing changes the numbers alone; `due` is applied when x itself is asked for, once per gradient. An exchange that
ends in between is p −= (½ − due·(α̃−½)/scale)·d, o −= (α̃−½)/scale·d.
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
SCALE_MIN = 1e-3
"""A smaller scale is multiplied into the offset, before divisions by it lose precision."""


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

    _parameters: Tensor
    """p; the parameters are p + due·o."""
    _offset: Tensor | None
    """o; the offset is scale·o. None without A²CiD²."""
    _scale: float = 1.0
    _due: float = 0.0
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
        self._parameters = parameters.clone()
        self._offset = torch.zeros_like(parameters) if accelerated else None
        self.buffers = tuple(buffer.clone() for buffer in buffers)
        self._buffer_merge = BufferMerge(statistics)
        self._compression = compression
        self._pool = Pool()

    def reset(self, parameters: Tensor, buffers: Buffers) -> None:
        """Set parameters and buffers, without momentum."""
        self._parameters.copy_(parameters)
        self._scale, self._due = 1.0, 0.0
        if self._offset is not None:
            self._offset.zero_()
        self.buffers = tuple(buffer.clone() for buffer in buffers)

    @property
    def is_accelerated(self) -> bool:
        """Whether there is an offset."""
        return self._offset is not None

    @property
    def storage(self) -> Tensor:
        """The memory of the parameters, for its shape and type."""
        return self._parameters

    @property
    def parameters(self) -> Tensor:
        """x, in that memory."""
        self.settle()
        return self._parameters

    @property
    def acid_offset(self) -> Tensor | None:
        """x̃ − x, in memory that may be changed; None without A²CiD²."""
        self.settle()
        self._rescale()
        return self._offset

    def observed(self) -> Tensor:
        """x, without a change to this replica: the same to the last bit, however often it is looked at."""
        if not self._due or self._offset is None:
            return self._parameters
        return torch.add(self._parameters, self._offset, alpha=self._due)

    def observed_offset(self) -> Tensor | None:
        """A copy of x̃ − x; None without A²CiD²."""
        return None if self._offset is None else self._offset * self._scale

    def mix(self, decay: float) -> None:
        """Move both copies towards each other, until their offset is `decay` times what it was."""
        if self._offset is None or decay >= 1.0:
            return
        self._due += 0.5 * (1.0 - decay) * self._scale
        self._scale *= decay
        if self._scale < SCALE_MIN:
            self.settle()
            self._rescale()

    def settle(self) -> None:
        """Apply the mixing that is due to the memory that the optimizer changes."""
        if self._due and self._offset is not None:
            self._parameters.add_(self._offset, alpha=self._due)
            self._due = 0.0

    def _rescale(self) -> None:
        """Multiply the offset by its scale, once no mixing is due that refers to it."""
        if self._offset is not None and self._scale != 1.0:
            self._offset.mul_(self._scale)
            self._scale = 1.0

    def snapshot(self) -> tuple[Tensor, Buffers]:
        """Copies of parameters and buffers, to be sent."""
        return self._copy(self._due), tuple(buffer.clone() for buffer in self.buffers)

    def mean_of_copies(self) -> tuple[Tensor, Buffers]:
        """A snapshot with the mean of both copies, which averaging conserves: the parameters of global averages."""
        return self._copy(self._due + 0.5 * self._scale), tuple(buffer.clone() for buffer in self.buffers)

    def _copy(self, share: float) -> Tensor:
        """p + share·o."""
        if self._offset is None or not share:
            return self._pool.copy(self._parameters)
        return torch.add(self._parameters, self._offset, alpha=share, out=self._pool.like(self._parameters))

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
        if self._offset is not None:
            scaled = offset_share / self._scale
            self._offset.add_(difference, alpha=scaled)
            share -= self._due * scaled  # what is due brings so much of the difference with it
        self._parameters.add_(difference, alpha=share)
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
