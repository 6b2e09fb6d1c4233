"""Blocks of 32-bit integers that can be checked: where they begin and end, and a 64-bit checksum.

What lies between the markers follows from who sends it to whom and when, so a block that was left over from another
step, or meant for somebody else, is noticed as well. Nothing here needs memory beyond the block itself.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

BEGIN, END = 0x0FFBEA70, 0x0FFBEA7E
ELEMENTS_MIN = 3
"""The two markers, and something between them."""
ELEMENTS_MAX = (1 << 31) - 1
BYTES = 4
"""Of one element."""

_ROW = 4096
_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


def fill(block: Tensor, source: int, destination: int, step: int) -> None:
    """Write the block that goes from one rank to another in a step."""
    torch.arange(block.numel(), out=block)
    block.bitwise_xor_(_key(source, destination, step))
    block[0], block[-1] = BEGIN, END


def _key(source: int, destination: int, step: int) -> int:
    return zlib.crc32(f"{source} {destination} {step}".encode()) & 0x7FFFFFFF


def checksum(block: Tensor) -> int:
    """64 bits over the values and where they stand: Σ v · (c + 2 · place) modulo 2^64, v being pairs of elements.

    With c odd every factor is odd, so a change of one value always shows; and no two factors are the same, so that
    values which changed places show, too.
    """
    pairs = block.numel() // 2
    values = block[: 2 * pairs].view(torch.int64)
    rest = int(block[-1]) if block.numel() % 2 else 0
    rows = pairs // _ROW
    table = values[: rows * _ROW].view(rows, _ROW)
    tail = values[rows * _ROW :]
    by_row, by_column = table.sum(1), table.sum(0)
    places = torch.arange(max(rows, _ROW), dtype=torch.int64)
    plain = int(by_row.sum()) + int(tail.sum()) + rest
    weighted = _ROW * int((places[:rows] * by_row).sum()) + int((places[:_ROW] * by_column).sum())
    weighted += rows * _ROW * int(tail.sum()) + int((places[: tail.numel()] * tail).sum()) + pairs * rest
    return (_ODD * plain + 2 * weighted) & _MASK


def flaw(block: Tensor, announced: int, elements: int, source: int, destination: int, step: int) -> str | None:
    """What is wrong with a block that came, in a few words; None where it is as it was sent."""
    if block.dtype is not torch.int32 or block.numel() != elements:
        return f"{block.numel()} elements came, of {elements}"
    if int(block[0]) != BEGIN:
        return "its begin marker is wrong"
    if int(block[-1]) != END:
        return "its end marker is wrong"
    if int(block[1]) != 1 ^ _key(source, destination, step) and checksum(block) == announced:
        return "it is another block than was asked for"
    if checksum(block) != announced:
        return "its checksum is wrong"
    return None
