"""Compression to fewer bits per element: bfloat16, and int8 with a scale per chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat.core.compression.compression import BLOCK, Compression, check_size, decoded_like
from offbeat.core.compression.encoded_tensor import ENCODED_HEADER_BYTES, EncodedHeader, new_blob
from offbeat.core.memory_pool import Pool
from offbeat.core.validation import check_types, require_field, require_positive


@dataclass(frozen=True)
class BFloat16(Compression, name="bf16"):
    """Every element rounded to the nearest bfloat16, with a relative error of at most 1/256 and no error feedback.

    Elements below 1e-38, which are subnormal, have an absolute error below 1e-40.
    """

    def _body_bytes(self, vector: Tensor) -> int:
        return 2 * vector.numel()

    def _encode(self, vector: Tensor, pool: Pool, residual: Tensor | None) -> Tensor:
        blob = new_blob(self.name, vector, 0, self._body_bytes(vector), pool)
        blob[ENCODED_HEADER_BYTES:].view(torch.bfloat16).copy_(vector)
        return blob

    @classmethod
    def _decode(cls, header: EncodedHeader, body: Tensor, pool: Pool) -> Tensor:
        check_size(header, body, 2 * header.numel)
        return decoded_like(header, pool).copy_(body.view(torch.bfloat16))


LEVELS = 127
CHUNK_MAX = 1 << 20

_Array = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Int8(Compression, name="int8"):
    """Elements as integers from -127 to 127, in units of 1/127 of the largest magnitude of their chunk.

    The last 8 bits of the mantissa of a scale are 0. So scale × integer is exact, and encoding again loses nothing.
    """

    chunk: int = 512
    """elements that share a scale"""
    feedback: bool = True
    """add the error of an increment to the next"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "chunk")
        require_field(self, "chunk", self.chunk <= CHUNK_MAX, f"must be at most {CHUNK_MAX}, but is {self.chunk}")

    @property
    def keeps_residual(self) -> bool:
        return self.feedback

    def _body_bytes(self, vector: Tensor) -> int:
        return _scale_bytes(vector.numel(), self.chunk, vector.dtype) + vector.numel()

    def _encode(self, vector: Tensor, pool: Pool, residual: Tensor | None) -> Tensor:
        numel, scale_bytes = vector.numel(), _scale_bytes(vector.numel(), self.chunk, vector.dtype)
        blob = new_blob(self.name, vector, self.chunk, self._body_bytes(vector), pool)
        body, new = blob.numpy()[ENCODED_HEADER_BYTES:], vector.numpy()
        kept = None if residual is None else residual.numpy()
        scales, levels = body[:scale_bytes].view(new.dtype), body[scale_bytes:].view(np.int8)
        scratch = np.empty(min(numel, _block_of(self.chunk)), new.dtype)
        for rows, part, width in _blocks(numel, self.chunk):
            values = new[part].reshape(-1, width)
            if kept is not None:
                sums = kept[part].reshape(-1, width)
                values = np.add(sums, values, out=sums)
            room = scratch[: values.size].reshape(-1, width)
            scale = _scale_of(np.abs(values, out=room).max(axis=1))
            scales[rows] = scale
            np.multiply(values, _inverse(scale)[:, None], out=room)
            np.rint(room, out=room)
            np.copyto(levels[part].reshape(-1, width), room, casting="unsafe")
            if kept is not None:
                np.multiply(room, scale[:, None], out=room)
                np.subtract(values, room, out=values)
        return blob

    @classmethod
    def _decode(cls, header: EncodedHeader, body: Tensor, pool: Pool) -> Tensor:
        chunk = max(1, header.number)
        scale_bytes = _scale_bytes(header.numel, chunk, header.dtype)
        check_size(header, body, scale_bytes + header.numel)
        vector = decoded_like(header, pool)
        raw, values = body.numpy(), vector.numpy()
        scales, levels = raw[:scale_bytes].view(values.dtype), raw[scale_bytes:].view(np.int8)
        for rows, part, width in _blocks(header.numel, chunk):
            room = values[part].reshape(-1, width)
            with np.errstate(over="ignore", invalid="ignore"):  # of damaged scales; the hub refuses the result
                np.multiply(levels[part].reshape(-1, width), scales[rows, None], out=room)
        return vector


def _scale_bytes(numel: int, chunk: int, dtype: torch.dtype) -> int:
    return -(-numel // chunk) * dtype.itemsize


def _scale_of(largest: _Array) -> _Array:
    """The scales of chunks with these largest magnitudes, without their last 8 bits; 0 for chunks of tiny elements."""
    scale = largest / largest.dtype.type(LEVELS)
    upper = scale * scale.dtype.type(2**8 + 1)
    scale = upper - (upper - scale)
    scale[scale < 2**25 * np.finfo(scale.dtype).tiny] = 0.0
    return scale


def _inverse(scale: _Array) -> _Array:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)


def _block_of(chunk: int) -> int:
    return max(1, BLOCK // chunk) * chunk


def _blocks(numel: int, chunk: int) -> Iterator[tuple[slice, slice, int]]:
    """Chunks in blocks: (slice of chunks, slice of elements, elements per chunk). The last chunk may be shorter."""
    whole = numel // chunk * chunk
    for first in range(0, whole, _block_of(chunk)):
        stop = min(whole, first + _block_of(chunk))
        yield slice(first // chunk, stop // chunk), slice(first, stop), chunk
    if whole < numel:
        yield slice(whole // chunk, whole // chunk + 1), slice(whole, numel), numel - whole
