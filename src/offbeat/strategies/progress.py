"""What learners and their hub say to each other, besides Stop and Stopped.

hub → learner   Begin      you have joined: where to begin, in your data and in the numbering of exchanges
learner → hub   Progress   what I have learned since the last time, in one fragment of the parameters; or, as a
                           Snapshot, the parameters themselves
hub → learner   Merged     the new values of a fragment, and how much of what you sent is in them

Exchanges are numbered from 0, by each learner one after the other. Exchange e carries fragment e mod (number of
fragments).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from offbeat.draws import Range
from offbeat.messages import Buffers, Message

Stretch = tuple[int, int, int]
"""Draws from first to stop, and the oldest version at which one of their gradients was taken."""


@dataclass(frozen=True)
class Begin(Message):
    """Begin with these parameters, or with your own where they are empty; `learners` is how many there are.

    Go on at `draw`, but pass over `done`, which has arrived already. Your next exchange has the number `exchange`.
    They may be compressed: a learner sends what it learned from wherever it began.
    """

    values: ClassVar[tuple[str, ...]] = ("parameters",)

    parameters: Tensor
    buffers: Buffers
    version: int
    exchange: int
    samples_total: int
    learners: int
    draw: int
    done: tuple[Range, ...]


@dataclass(frozen=True)
class Progress(Message):
    """What was learned in `samples` samples since the fragment was last sent; `change` is empty where that is nothing.

    `complete` are the draws all of whose fragments have been sent with this message, `broken` those whose gradients
    were not finite and are in none. `score` is the mean training loss of late.
    """

    increments: ClassVar[tuple[str, ...]] = ("change",)
    parted_by: ClassVar[tuple[str, ...]] = ("fragment",)

    change: Tensor
    buffers: Buffers
    exchange: int
    fragment: int
    samples: int
    complete: tuple[Stretch, ...]
    broken: tuple[Range, ...]
    broken_in_a_row: int
    score: float


@dataclass(frozen=True)
class Snapshot(Progress):
    """As `Progress`, but `change` holds the parameters themselves."""

    increments: ClassVar[tuple[str, ...]] = ()
    values: ClassVar[tuple[str, ...]] = ("change",)

    takeovers: int
    """How many times the sender has taken another's place since it began."""
    abandoned: tuple[Range, ...]
    """Draws that it had computed for what it was before."""


@dataclass(frozen=True)
class Merged(Message):
    """New values of a fragment. Of the learner's own exchanges of it, those up to number `included` are in them.

    Where they are empty there is nothing new: go on, what you sent has arrived.
    """

    values: ClassVar[tuple[str, ...]] = ("parameters",)

    parameters: Tensor
    buffers: Buffers
    version: int
    fragment: int
    included: int
    samples_total: int
    learners: int
