"""Coded tensors: bytes that say themselves what they are, in the place of the tensor that they stand for.

    8s name of the compression, u8 bytes of an element, 3 zeros, u32 a number of that compression's, u64 elements;
    then whatever it needs. Little-endian.

A field of a message that may be compressed holds floating-point numbers; where it holds bytes, it is coded.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.core.memory_pool import COPY_BYTES_MIN, Pool
from offbeat.core.messages import Message
from offbeat.errors import ContractViolation

_HEADER = struct.Struct("<8sB3xIQ")
ENCODED_HEADER_BYTES = _HEADER.size
DTYPES = {4: torch.float32, 8: torch.float64}


class EncodedHeader(NamedTuple):
    """What a blob stands for: a vector of `numel` elements of `dtype`."""

    name: str
    dtype: torch.dtype
    number: int
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def new_blob(name: str, like: Tensor, number: int, body_bytes: int, pool: Pool) -> Tensor:
    """A blob for a vector, whose body is still to be written."""
    blob = memory(ENCODED_HEADER_BYTES + body_bytes, pool)
    _HEADER.pack_into(blob.numpy(), 0, name.encode("ascii"), like.dtype.itemsize, number, like.numel())  # type: ignore[arg-type]
    return blob


def memory(nbytes: int, pool: Pool) -> Tensor:
    """Bytes that hold anything: of the pool, where there are enough of them to be worth it."""
    return pool.take(nbytes) if nbytes >= COPY_BYTES_MIN else torch.empty(nbytes, dtype=torch.uint8)


def is_coded(tensor: Tensor) -> bool:
    """Whether what a field holds that may be compressed is coded."""
    return tensor.dtype is torch.uint8


def parse_header(blob: Tensor) -> EncodedHeader:
    """What a blob stands for; refuses bytes that cannot be one."""
    if blob.dim() != 1 or blob.numel() < ENCODED_HEADER_BYTES or not blob.is_contiguous():
        raise ContractViolation(f"{blob.numel()} bytes came in the place of a tensor, and cannot be a compressed one")
    name, itemsize, number, numel = _HEADER.unpack_from(blob.numpy())  # type: ignore[arg-type]
    if itemsize not in DTYPES:
        raise ContractViolation(f"a compressed tensor of elements of {itemsize} bytes came; 4 and 8 are known")
    return EncodedHeader(name.rstrip(b"\0").decode("ascii", "replace"), DTYPES[itemsize], number, numel)


def encoded_body(blob: Tensor) -> Tensor:
    """What follows the header, where its numbers can be read in place."""
    return (blob if blob.storage_offset() % 8 == 0 else blob.clone())[ENCODED_HEADER_BYTES:]


def uncompressed_bytes(message: Message) -> int:
    """What a message would weigh if nothing in it were coded."""
    return message.nbytes + saved_bytes(message)


def saved_bytes(message: Message) -> int:
    """How much less a message weighs for what is coded in it; engines ask this of every message.

    This only counts: bytes that cannot be a blob stand for themselves here, and are refused by who decodes them.
    """
    saved = 0
    for name in message.compressible():
        tensor = getattr(message, name)
        if is_coded(tensor):
            try:
                saved += parse_header(tensor.cpu()).nbytes - tensor.nbytes
            except ContractViolation:
                continue
    return saved
