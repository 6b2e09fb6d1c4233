"""Only the largest elements, each with its place.

The k-th largest of millions is slow to find. A strided sample says about where it lies, one comparison finds all that
are above, a few more than k, and of these the largest k are taken. Only where the sample misleads, and these are fewer
than k, the long way is gone. So exactly the k largest are sent, or all that are not 0, where these are fewer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from offbeat.core.compression.compression import BLOCK, Compression, check_size, decoded_like
from offbeat.core.compression.encoded_tensor import ENCODED_HEADER_BYTES, EncodedHeader, new_blob
from offbeat.core.memory_pool import Pool
from offbeat.core.validation import check_types, require
from offbeat.errors import ContractViolation

SAMPLE = 1 << 17
"""About so many elements are looked at to find the threshold; of a shorter vector, all."""
DEVIATIONS = 4
"""So many standard deviations more of the sample than the share are let through, so that hardly ever too few are."""

_Array = npt.NDArray[np.floating]
_Places = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TopK(Compression, name="top-k"):
    """The largest share of the elements of an increment, as int32 and float32; what is not sent waits in the residual.

    Values travel as they are: of a parameter, nothing may be left out.
    """

    codes_values: ClassVar[bool] = False

    share: float = 0.01
    """part of the elements that is sent, at most 1"""
    feedback: bool = True
    """add what was not sent of an increment to the next"""

    def __post_init__(self) -> None:
        check_types(self)
        require(0 < self.share <= 1, f"TopK.share must be greater than 0 and at most 1, but is {self.share!r}")

    @property
    def keeps_residual(self) -> bool:
        return self.feedback

    def _count(self, vector: Tensor) -> int:
        return max(1, round(self.share * vector.numel()))

    def _body_bytes(self, vector: Tensor) -> int:
        return 8 * self._count(vector)

    def _encode(self, vector: Tensor, pool: Pool, residual: Tensor | None) -> Tensor:
        count = self._count(vector)
        new, kept = vector.numpy(), None if residual is None else residual.numpy()
        threshold, exact = _threshold(new, kept, count)
        total = new if kept is None else kept
        places = _above(total, threshold, add=None if kept is None else new)
        if len(places) < count and not exact:
            places = _above(total, max(_kth_largest(np.abs(total), count), _least(total)), add=None)
        places = _largest(total, places, count)
        values = total[places].astype(np.float32)
        if kept is not None:
            kept[places] -= values
        blob = new_blob(self.name, vector, 0, self._body_bytes(vector), pool)[: ENCODED_HEADER_BYTES + 8 * len(places)]
        numbers = blob[ENCODED_HEADER_BYTES:].numpy()
        numbers[: 4 * len(places)] = places.view(np.uint8)
        numbers[4 * len(places) :] = values.view(np.uint8)
        return blob

    @classmethod
    def _decode(cls, header: EncodedHeader, body: Tensor, pool: Pool) -> Tensor:
        count = body.numel() // 8
        check_size(header, body, 8 * min(count, header.numel))
        numbers = body.numpy()
        places, values = numbers[: 4 * count].view(np.int32), numbers[4 * count :].view(np.float32)
        if count and not ((places[1:] > places[:-1]).all() and places[0] >= 0 and places[-1] < header.numel):
            raise ContractViolation("a tensor that top-k has compressed came with places that are not in order")
        vector = decoded_like(header, pool).zero_()
        vector.numpy()[places] = values
        return vector


def _threshold(new: _Array, kept: _Array | None, count: int) -> tuple[float, bool]:
    """About the `count`-th largest magnitude of the sum, rather a bit less; and whether no lower one need be tried."""
    stride = max(1, len(new) // SAMPLE)
    stride |= stride > 1  # odd, so that it does not keep step with rows of a matrix
    sample = new[::stride].copy() if kept is None else new[::stride] + kept[::stride]
    wanted = count / stride
    if stride > 1:
        wanted += DEVIATIONS * math.sqrt(wanted)
    found = _kth_largest(np.abs(sample, out=sample), min(len(sample), max(1, math.ceil(wanted))))
    return max(found, _least(new)), stride == 1 or found < _least(new)


def _least(values: _Array) -> float:
    """A threshold that everything but 0 is above."""
    return float(np.finfo(values.dtype).smallest_subnormal)


def _kth_largest(magnitudes: _Array, k: int) -> float:
    place = len(magnitudes) - k
    magnitudes.partition(place)
    return float(magnitudes[place])


def _above(total: _Array, threshold: float, add: _Array | None) -> _Places:
    """Where the magnitude is at least the threshold, in order; `add` is added to `total` in the same breath."""
    size = min(len(total), BLOCK)
    magnitudes, above = np.empty(size, total.dtype), np.empty(size, np.bool_)
    limit = total.dtype.type(threshold)
    found: list[_Places] = []
    for first in range(0, len(total), BLOCK):
        block = total[first : first + BLOCK]
        if add is not None:
            block += add[first : first + BLOCK]
        np.abs(block, out=magnitudes[: len(block)])
        np.greater_equal(magnitudes[: len(block)], limit, out=above[: len(block)])
        found.append((np.flatnonzero(above[: len(block)]) + first).astype(np.int32))
    return np.concatenate(found)


def _largest(total: _Array, places: _Places, count: int) -> _Places:
    """The `count` of these places with the largest magnitudes, or all; of equal ones, the first."""
    if len(places) <= count:
        return places
    magnitudes = np.abs(total[places])
    least = _kth_largest(magnitudes.copy(), count)
    keep = magnitudes > least
    keep[np.flatnonzero(magnitudes == least)[: count - int(keep.sum())]] = True
    return places[keep]
