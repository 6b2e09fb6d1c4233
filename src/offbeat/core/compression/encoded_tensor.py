"""The format of an encoded tensor: a vector of bytes, a *blob*, that replaces the tensor in a message.

    8s name of the compression, u8 bytes per element, 3 zeros, u32 parameter of the compression, u64 elements;
    then the body, in the format of the compression. Little-endian.

A compressible field of a message holds floating-point numbers; if its dtype is uint8, it holds a blob.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.core.device_transfer import to_host
from offbeat.core.memory_pool import COPY_BYTES_MIN, Pool
from offbeat.core.messages import Message
from offbeat.errors import ContractViolation

_HEADER = struct.Struct("<8sB3xIQ")
ENCODED_HEADER_BYTES = _HEADER.size
NUMEL_MAX = (1 << 31) - 1
"""The largest vector that is encoded."""
DTYPES = {4: torch.float32, 8: torch.float64}


class EncodedHeader(NamedTuple):
    """The header of a blob, which decodes to a vector of `numel` elements of `dtype`."""

    name: str
    dtype: torch.dtype
    number: int
    numel: int

    @property
    def nbytes(self) -> int:
        """The size of the decoded vector."""
        return self.numel * self.dtype.itemsize


def new_blob(name: str, like: Tensor, number: int, body_bytes: int, pool: Pool) -> Tensor:
    """A blob for the vector `like`, with its header written and its body uninitialized."""
    blob = memory(ENCODED_HEADER_BYTES + body_bytes, pool)
    _HEADER.pack_into(blob.numpy(), 0, name.encode("ascii"), like.dtype.itemsize, number, like.numel())  # type: ignore[arg-type]
    return blob


def memory(nbytes: int, pool: Pool) -> Tensor:
    """Uninitialized bytes, from the pool unless they are few."""
    return pool.take(nbytes) if nbytes >= COPY_BYTES_MIN else torch.empty(nbytes, dtype=torch.uint8)


def is_encoded(tensor: Tensor) -> bool:
    """Whether the value of a compressible field is a blob."""
    return tensor.dtype is torch.uint8


def parse_header(blob: Tensor) -> EncodedHeader:
    """The header of a blob; raises ContractViolation if it cannot be one."""
    if blob.dim() != 1 or blob.numel() < ENCODED_HEADER_BYTES or not blob.is_contiguous():
        raise ContractViolation(f"{blob.numel()} bytes arrived in place of a tensor, but are not a compressed one")
    name, itemsize, number, numel = _HEADER.unpack_from(blob.numpy())  # type: ignore[arg-type]
    if itemsize not in DTYPES:
        raise ContractViolation(f"a compressed tensor has elements of {itemsize} bytes, but 4 or 8 were expected")
    if numel > NUMEL_MAX:
        raise ContractViolation(f"a compressed tensor claims {numel} elements, but {NUMEL_MAX} is the maximum")
    return EncodedHeader(name.rstrip(b"\0").decode("ascii", "replace"), DTYPES[itemsize], number, numel)


def encoded_body(blob: Tensor) -> Tensor:
    """The bytes after the header, aligned to 8 bytes; copied only if they are not."""
    return (blob if blob.storage_offset() % 8 == 0 else blob.clone())[ENCODED_HEADER_BYTES:]


def saved_bytes(message: Message) -> int:
    """How many bytes compression has saved in a message; engines call this for every message.

    Bytes that are not a valid blob count as saving nothing; `decode` raises the error for them.
    """
    saved = 0
    for name in message.compressible():
        tensor = getattr(message, name)
        if is_encoded(tensor):
            try:
                saved += parse_header(to_host(tensor)).nbytes - tensor.nbytes
            except ContractViolation:
                continue
    return saved
