"""What the ranks of a network test send each other: commands of rank 0, replies to them, and blocks.

A block holds 32-bit integers between a begin and an end marker. They follow from sender, receiver, step and position,
so a block of another pair or step is detected as well. Its 64-bit checksum is in the header of its message.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.core.messages import Message

Flow = tuple[int, int]
"""The rank that sends a block and the rank that receives it."""

BEGIN, END = 0x0FFBEA70, 0x0FFBEA7E
ELEMENTS_MIN = 3
"""The two markers, and one value between them."""
ELEMENTS_MAX = (1 << 31) - 1
ELEMENT_BYTES = 4

_ROW = 4096
_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class RankReady(Message):
    """To rank 0: the sender has a link to every rank. With its host name and the memory of that machine."""

    host: str
    memory_bytes: int


@dataclass(frozen=True)
class MeasureLatency(Message):
    """Command: measure the round trip of small messages to `peer`. The reply holds the median, in seconds."""

    peer: int


@dataclass(frozen=True)
class Echo(Message):
    """The small message of a round trip; it is returned at once, with `is_reply` set."""

    is_reply: bool


@dataclass(frozen=True)
class PrepareBlocks(Message):
    """Command: fill a block of `elements` for each of `destinations`, and expect one from each of `sources`.

    The block for the rank `corrupt` is damaged after its checksum is computed.
    """

    step: int
    elements: int
    destinations: list[int]
    sources: list[int]
    corrupt: int | None = None


@dataclass(frozen=True)
class SendBlocks(Message):
    """Command: send the prepared blocks now. The reply holds the seconds of each, in the order of `destinations`."""

    step: int


@dataclass(frozen=True)
class DataBlock(Message):
    """A block. It is acknowledged at once with `BlockReceived` and verified later."""

    step: int
    checksum: int
    block: Tensor


@dataclass(frozen=True)
class BlockReceived(Message):
    """To the sender of a block: all of it has arrived."""


@dataclass(frozen=True)
class VerifyBlocks(Message):
    """Command: verify the received blocks. The reply holds a text for each of `sources`, empty for an intact block."""


@dataclass(frozen=True)
class StepReply(Message):
    """To rank 0: the last command is carried out."""

    seconds: list[float] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LinkFailed(Message):
    """To rank 0: the link of the sender to `peer` is gone."""

    peer: int
    why: str


@dataclass(frozen=True)
class EndTest(Message):
    """Command: end. `failure` is empty after a complete test, and otherwise says why it ends early."""

    failure: str


# Blocks


def fill(block: Tensor, flow: Flow, step: int) -> None:
    """Write the content of the block that a flow carries in a step."""
    torch.arange(block.numel(), out=block)
    block.bitwise_xor_(_key(flow, step))
    block[0], block[-1] = BEGIN, END


def _key(flow: Flow, step: int) -> int:
    return zlib.crc32(f"{flow[0]} {flow[1]} {step}".encode()) & 0x7FFFFFFF


def checksum(block: Tensor) -> int:
    """64 bits over values and positions: Σ v · (c + 2 · position) modulo 2^64, where v are pairs of elements.

    c is odd, so every factor is odd and a change of one value always changes the sum. No two factors are equal, so
    exchanged values change it, too. No memory beyond the block is needed.
    """
    pairs = block.numel() // 2
    values = block[: 2 * pairs].view(torch.int64)
    rest = int(block[-1]) if block.numel() % 2 else 0
    rows = pairs // _ROW
    table = values[: rows * _ROW].view(rows, _ROW)
    tail = values[rows * _ROW :]
    by_row, by_column = table.sum(1), table.sum(0)
    positions = torch.arange(max(rows, _ROW), dtype=torch.int64)
    plain = int(by_row.sum()) + int(tail.sum()) + rest
    weighted = _ROW * int((positions[:rows] * by_row).sum()) + int((positions[:_ROW] * by_column).sum())
    weighted += rows * _ROW * int(tail.sum()) + int((positions[: tail.numel()] * tail).sum()) + pairs * rest
    return (_ODD * plain + 2 * weighted) & _MASK


def flaw_of(received: DataBlock | None, elements: int, flow: Flow, step: int) -> str:
    """What is wrong with a received block, in a few words; empty where it is as it was sent."""
    if received is None:
        return "no block arrived"
    block = received.block
    if block.dtype is not torch.int32 or block.numel() != elements:
        return f"it has {block.numel()} elements instead of {elements}"
    if int(block[0]) != BEGIN:
        return "its begin marker is wrong"
    if int(block[-1]) != END:
        return "its end marker is wrong"
    if checksum(block) != received.checksum:
        return "its checksum is wrong"
    if received.step != step or int(block[1]) != 1 ^ _key(flow, step):
        return "it is the block of another pair or step"
    return ""
