"""What a peer trains: parameters, their momentum of averaging, and buffers. All arithmetic is in place.

With A²CiD² a peer has a second copy x̃ of its parameters x. Kept is not x̃ but `acid_offset` = x̃ − x; all becomes
simple: an optimizer's step, being applied to both alike, leaves it as it is; mixing over a time that shrinks it by q is

    x += ½(1−q)·lead;  lead *= q

and an exchange with difference d is x −= ½d, lead −= (α̃−½)d. What mixing conserves is x + ½·lead, the mean of both.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.core.compression import Compression
from offbeat.core.flat import is_averaged
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Buffers

SHARE = 0.5
"""α: how much of the difference each end takes."""


class ExchangeResult(NamedTuple):
    """What the end that answers has found, and hands on."""

    difference: Tensor
    buffers: Buffers
    distance: float


class Replica:
    def __init__(
        self, parameters: Tensor, buffers: Buffers, *, accelerated: bool, compression: Compression | None = None
    ) -> None:
        self.parameters = parameters.clone()
        self.acid_offset = torch.zeros_like(parameters) if accelerated else None
        self.buffers = tuple(buffer.clone() for buffer in buffers)
        self._compression = compression
        self._copies = Pool()

    def reset(self, parameters: Tensor, buffers: Buffers) -> None:
        """Begin from these values."""
        self.parameters.copy_(parameters)
        if self.acid_offset is not None:
            self.acid_offset.zero_()
        self.buffers = tuple(buffer.clone() for buffer in buffers)

    def mix(self, kept: float) -> None:
        """Let parameters and their second copy approach each other, so that `kept` of what lies between is left."""
        if self.acid_offset is not None and kept < 1.0:
            self.parameters.add_(self.acid_offset, alpha=0.5 * (1.0 - kept))
            self.acid_offset.mul_(kept)

    def snapshot(self) -> tuple[Tensor, Buffers]:
        """Values that can be sent."""
        return self._copies.copy(self.parameters), tuple(buffer.clone() for buffer in self.buffers)

    def mean_point(self) -> tuple[Tensor, Buffers]:
        """The mean of both copies, which is what averaging conserves and what counts in the end; it can be sent."""
        parameters, buffers = self.snapshot()
        if self.acid_offset is not None:
            parameters.add_(self.acid_offset, alpha=0.5)
        return parameters, buffers

    @property
    def finite(self) -> bool:
        """Whether its values may go to others."""
        return bool(torch.isfinite(self.parameters).all()) and all(map(_finite, self.buffers))

    def meet(self, theirs: Tensor, their_buffers: Buffers, alpha_tilde: float) -> ExchangeResult | None:
        """Take this end's share of the difference to a peer; None, and nothing is changed, where it is not finite."""
        difference = torch.sub(theirs, self.parameters, out=self._copies.like(self.parameters))
        distance = float(torch.linalg.vector_norm(difference)) ** 2
        if not math.isfinite(distance) or not all(map(_finite, (*their_buffers, *self.buffers))):
            return None
        if self._compression is not None:
            difference = self._compression.roundtrip(difference, self._copies)
        mine = tuple(buffer.clone() for buffer in self.buffers)
        self._take(difference, their_buffers, SHARE, alpha_tilde - SHARE)
        return ExchangeResult(difference, mine, distance)

    def settle(self, difference: Tensor, buffers: Buffers, alpha_tilde: float) -> None:
        """Take the share of the end that began, to whatever it has become since; `buffers` are the other's."""
        self._take(difference, buffers, -SHARE, SHARE - alpha_tilde)

    def _take(self, difference: Tensor, buffers: Buffers, share: float, lead_share: float) -> None:
        self.parameters.add_(difference, alpha=share)
        if self.acid_offset is not None:
            self.acid_offset.add_(difference, alpha=lead_share)
        for mine, theirs in zip(self.buffers, buffers, strict=True):
            if is_averaged(mine):
                # Never by a difference, which may be old by now: a variance could become negative.
                mine.lerp_(theirs, SHARE)
            else:
                torch.maximum(mine, theirs, out=mine)

    def absorb(self, before: Buffers, after: Buffers) -> None:
        """Let buffers change as a computation has changed them, whatever exchanges did to them meanwhile.

        They fall no lower than either has them, since among them are variances.
        """
        for mine, old, new in zip(self.buffers, before, after, strict=True):
            if is_averaged(mine) and not mine.is_complex():
                lowest = torch.minimum(mine, new)
                torch.maximum(mine.add_(new).sub_(old), lowest, out=mine)
            elif is_averaged(mine):
                mine.add_(new).sub_(old)
            else:
                torch.maximum(mine, new, out=mine)


def _finite(buffer: Tensor) -> bool:
    return not is_averaged(buffer) or bool(torch.isfinite(buffer).all())
