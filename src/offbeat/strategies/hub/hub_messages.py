"""What hub and workers say to each other, besides Stop and Stopped.

hub → worker   Welcome      you have joined: the newest parameters, and where in your data to go on
hub → worker   Parameters   newer parameters (to one that waits: compute at these)
worker → hub   Gradient     a sum of gradients and how many samples are in it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from offbeat.core.actions import Budget
from offbeat.core.messages import Buffers, Message
from offbeat.core.sample_ledger import Range


@dataclass(frozen=True)
class Parameters(Message):
    """`budget` is how much to compute at them: the limit travels with the parameters."""

    values: ClassVar[tuple[str, ...]] = ("parameters",)

    parameters: Tensor
    buffers: Buffers
    version: int
    budget: Budget


@dataclass(frozen=True)
class Welcome(Message):
    """As `Parameters`, and the data position: go on at `draw`, but pass over `done`, which has arrived already."""

    parameters: Tensor
    buffers: Buffers
    version: int
    budget: Budget
    draw: int
    done: tuple[Range, ...]


@dataclass(frozen=True)
class Gradient(Message):
    """`gradient` is the sum over `samples` samples, and empty where it was not finite."""

    increments: ClassVar[tuple[str, ...]] = ("gradient",)

    gradient: Tensor
    buffers: Buffers
    samples: int
    loss: float
    version: int
    draws: Range
    seconds: float
    finite: bool
