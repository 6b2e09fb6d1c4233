"""The contract of compressions.

A compression turns a flat vector into fewer bytes, and these into a vector again. What it loses of an *increment*, a
gradient or a difference, it can put into a *residual*, which is added to the next increment (error feedback), so that
nothing is lost for good, only late. *Values* are absolute and have no residual.

All of them are deterministic, and exact on what they have made: to code a decoded vector loses nothing. They work
block by block, so that what they compute in between stays in the cache.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from offbeat.core.compression.encoded_tensor import (
    ENCODED_HEADER_BYTES,
    EncodedHeader,
    encoded_body,
    memory,
    parse_header,
)
from offbeat.core.configuration import Family
from offbeat.core.memory_pool import Pool
from offbeat.errors import ContractViolation

BLOCK = 1 << 17
"""Elements that are worked on at a time."""

LARGEST = torch.finfo(torch.float32).max / 2**16
"""Elements that are larger are not coded: there must be room for scales, and for a residual."""

_NUMEL_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class Compression(Family):
    """How tensors become fewer bytes."""

    codes_values: ClassVar[bool] = True
    """Whether it can do something for values, too, of which nothing may be left out."""

    @property
    def keeps_residual(self) -> bool:
        """Whether what it loses of an increment is added to the next."""
        return False

    def encode(self, vector: Tensor, pool: Pool, residual: Tensor | None = None) -> Tensor:
        """The vector, and what the residual holds, as a blob in memory of `pool`; the residual is what it loses then.

        The vector itself comes back where it cannot be coded: where it would not become smaller, is not of float32 or
        float64, or has elements that are not finite or too large. The residual is left alone then.
        """
        if ENCODED_HEADER_BYTES + self._body_bytes(vector) >= vector.nbytes or not _can_be_coded(vector):
            return vector
        return self._encode(vector.detach(), pool, residual)

    def roundtrip(self, vector: Tensor, pool: Pool) -> Tensor:
        """The vector as it will arrive: for a node that has to use what it sends."""
        here = vector.cpu()
        blob = self.encode(here, pool)
        return vector if blob is here else decode(blob, pool).to(vector.device)

    @abstractmethod
    def _body_bytes(self, vector: Tensor) -> int:
        """What a vector takes when it is coded, without the header."""

    @abstractmethod
    def _encode(self, vector: Tensor, pool: Pool, residual: Tensor | None) -> Tensor:
        """As `encode`, of a vector that can be coded."""

    @classmethod
    @abstractmethod
    def _decode(cls, header: EncodedHeader, body: Tensor, pool: Pool) -> Tensor:
        """The vector that follows a header."""


def decode(blob: Tensor, pool: Pool, numel_max: int | None = None) -> Tensor:
    """The vector that a blob stands for, in memory of `pool`. One that claims more elements than that is refused."""
    header = parse_header(blob)
    if numel_max is not None and header.numel > numel_max:
        raise ContractViolation(f"a compressed tensor claims {header.numel} elements, but {numel_max} is the most")
    member = Compression.members.get(header.name)
    if member is None:
        raise ContractViolation(f"a tensor came that {header.name!r} has compressed, which is not known here")
    decoded: Tensor = member._decode(header, encoded_body(blob), pool)
    return decoded


def decoded_like(header: EncodedHeader, pool: Pool) -> Tensor:
    """Memory for the vector that a header announces; it holds anything."""
    return memory(header.nbytes, pool).view(header.dtype)


def check_size(header: EncodedHeader, body: Tensor, nbytes: int) -> None:
    if body.numel() != nbytes:
        raise ContractViolation(
            f"a tensor of {header.numel} elements that {header.name} has compressed takes {nbytes} bytes, "
            f"but {body.numel()} came"
        )


def _can_be_coded(vector: Tensor) -> bool:
    if vector.dtype not in (torch.float32, torch.float64) or vector.dim() != 1 or not vector.is_contiguous():
        return False
    if vector.numel() > _NUMEL_MAX:
        return False
    low, high = torch.aminmax(vector)
    return bool(low >= -LARGEST) and bool(high <= LARGEST)
