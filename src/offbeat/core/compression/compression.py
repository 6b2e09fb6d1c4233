"""The contract of compressions.

A compression encodes a flat vector as fewer bytes, and decodes these. The error of an *increment*, a gradient or a
difference, can be kept in a *residual*, which is added to the next increment (error feedback), so that it is delayed
and not lost. *Values* are absolute and have no residual.

Compressions are deterministic and idempotent: encoding a decoded vector again loses nothing. They work block by block,
so that intermediate results stay in the cache.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from offbeat.core.compression.encoded_tensor import (
    ENCODED_HEADER_BYTES,
    NUMEL_MAX,
    EncodedHeader,
    encoded_body,
    memory,
    parse_header,
)
from offbeat.core.configuration import Family
from offbeat.core.device_transfer import to_device, to_host
from offbeat.core.memory_pool import Pool
from offbeat.errors import ContractViolation

BLOCK = 1 << 17
"""Elements per block."""

LARGEST = torch.finfo(torch.float32).max / 2**16
"""Vectors with larger elements are not encoded: scales and residuals could overflow."""


@dataclass(frozen=True)
class Compression(Family):
    """How tensors in messages are compressed."""

    encodes_values: ClassVar[bool] = True
    """Whether it encodes values too; a compression that omits elements cannot."""

    @property
    def keeps_residual(self) -> bool:
        """Whether the error of an increment is added to the next one."""
        return False

    def encode(self, vector: Tensor, pool: Pool, residual: Tensor | None = None) -> Tensor:
        """Encode vector + residual as a blob; the residual becomes the error of this encoding.

        Returns `vector` itself, and leaves the residual unchanged, if it would not become smaller, is not a contiguous
        vector of float32 or float64, or has elements that are not finite or too large.

        vector: what is encoded, on the CPU
        pool: where the memory of the blob comes from
        residual: the error of the previous increment, changed in place; None: no error feedback
        """
        if ENCODED_HEADER_BYTES + self._body_bytes(vector) >= vector.nbytes or not _is_encodable(vector):
            return vector
        return self._encode(vector.detach(), pool, residual)

    def roundtrip(self, vector: Tensor, pool: Pool) -> Tensor:
        """The vector as the receiver will decode it, for a node that has to use the same values."""
        on_host = to_host(vector)
        blob = self.encode(on_host, pool)
        return vector if blob is on_host else to_device(decode(blob, pool), vector.device)

    @abstractmethod
    def _body_bytes(self, vector: Tensor) -> int:
        """The largest size of the body for this vector."""

    @abstractmethod
    def _encode(self, vector: Tensor, pool: Pool, residual: Tensor | None) -> Tensor:
        """As `encode`, for a vector that can be encoded."""

    @classmethod
    @abstractmethod
    def _decode(cls, header: EncodedHeader, body: Tensor, pool: Pool) -> Tensor:
        """Decode a body."""


def decode(blob: Tensor, pool: Pool, numel_max: int | None = None) -> Tensor:
    """Decode a blob.

    blob: the bytes, on the CPU
    pool: where the memory of the vector comes from
    numel_max: the largest number of elements that is accepted; None: any

    Raises ContractViolation for invalid bytes.
    """
    header = parse_header(blob)
    if numel_max is not None and header.numel > numel_max:
        raise ContractViolation(f"a compressed tensor claims {header.numel} elements, but {numel_max} is the maximum")
    member = Compression.members.get(header.name)
    if member is None:
        raise ContractViolation(f"a tensor was compressed by {header.name!r}, which is not known on this rank")
    decoded: Tensor = member._decode(header, encoded_body(blob), pool)
    return decoded


def decoded_like(header: EncodedHeader, pool: Pool) -> Tensor:
    """Uninitialized memory for the decoded vector."""
    return memory(header.nbytes, pool).view(header.dtype)


def check_size(header: EncodedHeader, body: Tensor, nbytes: int) -> None:
    """Raise ContractViolation unless the body has `nbytes` bytes."""
    if body.numel() != nbytes:
        raise ContractViolation(
            f"a tensor of {header.numel} elements compressed by {header.name} takes {nbytes} bytes, "
            f"but {body.numel()} arrived"
        )


def _is_encodable(vector: Tensor) -> bool:
    if vector.dtype not in (torch.float32, torch.float64) or vector.dim() != 1 or not vector.is_contiguous():
        return False
    if vector.numel() > NUMEL_MAX:
        return False
    low, high = torch.aminmax(vector)
    return bool(low >= -LARGEST) and bool(high <= LARGEST)
