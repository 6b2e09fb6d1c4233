"""Top-k sparsification: the largest elements, each with its index.

To find the k-th largest of millions of elements is slow. So a strided sample gives a threshold that slightly more than
k elements exceed, and the k largest are selected from these. If fewer than k exceed it, the exact one is computed.
The result is exact: the k largest elements, or all that are not 0 if these are fewer.
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
from offbeat.core.validation import check_types, require_field
from offbeat.errors import ContractViolation

SAMPLE = 1 << 17
"""Approximate size of the sample; a shorter vector is used as a whole."""
DEVIATIONS = 4
"""The margin of the estimated threshold in standard deviations, so that it is hardly ever too high."""

_Array = npt.NDArray[np.floating]
_Indices = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TopK(Compression, name="top-k"):
    """The largest elements of an increment, as int32 indices and float32 values; the others stay in the residual.

    Values are not compressed, since no parameter may be omitted.
    """

    encodes_values: ClassVar[bool] = False

    share: float = 0.01
    """fraction of the elements that is sent, at most 1"""
    feedback: bool = True
    """add the elements that were not sent to the next increment"""

    def __post_init__(self) -> None:
        check_types(self)
        require_field(
            self, "share", 0 < self.share <= 1, f"must be greater than 0 and at most 1, but is {self.share!r}"
        )

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
        indices = _above(total, threshold, add=None if kept is None else new)
        if len(indices) < count and not exact:
            indices = _above(total, max(_kth_largest(np.abs(total), count), _least(total)), add=None)
        indices = _largest(total, indices, count)
        values = total[indices].astype(np.float32)
        if kept is not None:
            kept[indices] -= values
        blob = new_blob(self.name, vector, 0, self._body_bytes(vector), pool)
        blob = blob[: ENCODED_HEADER_BYTES + 8 * len(indices)]
        body = blob[ENCODED_HEADER_BYTES:].numpy()
        body[: 4 * len(indices)] = indices.view(np.uint8)
        body[4 * len(indices) :] = values.view(np.uint8)
        return blob

    @classmethod
    def _decode(cls, header: EncodedHeader, body: Tensor, pool: Pool) -> Tensor:
        count = body.numel() // 8
        check_size(header, body, 8 * min(count, header.numel))
        raw = body.numpy()
        indices, values = raw[: 4 * count].view(np.int32), raw[4 * count :].view(np.float32)
        if count and not ((indices[1:] > indices[:-1]).all() and indices[0] >= 0 and indices[-1] < header.numel):
            raise ContractViolation("a tensor compressed by top-k arrived with indices that are not in order")
        vector = decoded_like(header, pool).zero_()
        vector.numpy()[indices] = values
        return vector


def _threshold(new: _Array, kept: _Array | None, count: int) -> tuple[float, bool]:
    """An estimate, rather too low, of the `count`-th largest magnitude of new + kept; and whether it is exact."""
    stride = max(1, len(new) // SAMPLE)
    stride |= stride > 1  # odd, so that it is not aligned with the rows of a matrix
    sample = new[::stride].copy() if kept is None else new[::stride] + kept[::stride]
    wanted = count / stride
    if stride > 1:
        wanted += DEVIATIONS * math.sqrt(wanted)
    threshold = _kth_largest(np.abs(sample, out=sample), min(len(sample), max(1, math.ceil(wanted))))
    return max(threshold, _least(new)), stride == 1 or threshold < _least(new)


def _least(values: _Array) -> float:
    """The smallest positive magnitude, as a threshold that excludes only 0."""
    return float(np.finfo(values.dtype).smallest_subnormal)


def _kth_largest(magnitudes: _Array, k: int) -> float:
    position = len(magnitudes) - k
    magnitudes.partition(position)
    return float(magnitudes[position])


def _above(total: _Array, threshold: float, add: _Array | None) -> _Indices:
    """Indices of magnitudes of at least the threshold, in order; `add` is added to `total` in the same pass."""
    size = min(len(total), BLOCK)
    magnitudes, above = np.empty(size, total.dtype), np.empty(size, np.bool_)
    limit = total.dtype.type(threshold)
    blocks: list[_Indices] = []
    for first in range(0, len(total), BLOCK):
        block = total[first : first + BLOCK]
        if add is not None:
            block += add[first : first + BLOCK]
        np.abs(block, out=magnitudes[: len(block)])
        np.greater_equal(magnitudes[: len(block)], limit, out=above[: len(block)])
        blocks.append((np.flatnonzero(above[: len(block)]) + first).astype(np.int32))
    return np.concatenate(blocks)


def _largest(total: _Array, indices: _Indices, count: int) -> _Indices:
    """The `count` indices with the largest magnitudes, or all if there are fewer; ties go to the first."""
    if len(indices) <= count:
        return indices
    magnitudes = np.abs(total[indices])
    least = _kth_largest(magnitudes.copy(), count)
    keep = magnitudes > least
    keep[np.flatnonzero(magnitudes == least)[: count - int(keep.sum())]] = True
    return indices[keep]
