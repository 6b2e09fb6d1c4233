"""What a hub checks in a message of a worker before it uses any of it: the worker may be wrong, or lie.

Each check raises `InvalidMessage`, with the sentence for the records. The engine then closes the link of that worker,
and training goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from offbeat.core.events import MessageArrived
from offbeat.core.flat import is_finite
from offbeat.core.messages import Buffers
from offbeat.core.sample_ledger import Range, SampleLedger
from offbeat.errors import InvalidMessage

SAMPLES_PER_SECOND_MAX = 1e9
"""A worker that claims more is not believed, where nothing else limits how much it computes."""


class MemberCheck:
    """The checks of one message, received by rank `receiver`."""

    def __init__(self, event: MessageArrived, receiver: int) -> None:
        self._event = event
        self._receiver = receiver

    def refuse(self, what: str) -> NoReturn:
        """Raise the error; `what` completes the sentence: rank 2 sent Gradient to rank 0 with …"""
        raise InvalidMessage(self._event.source, type(self._event.message).__name__, self._receiver, f" with {what}")

    def require(self, condition: bool, what: str) -> None:
        """Refuse the message unless the condition holds. For every message: test, and call `refuse` with a text."""
        if not condition:
            self.refuse(what)

    def vector(self, name: str, vector: Tensor, like: Tensor, numel: int, rounded: torch.dtype | None = None) -> None:
        """A flat tensor of `numel` elements, of the type of `like`, or of the one that values are rounded to."""
        dtype = rounded or like.dtype
        if vector.dim() != 1 or vector.numel() != numel or vector.dtype not in (dtype, like.dtype):
            self.refuse(
                f"a {name} of shape {tuple(vector.shape)} and type {vector.dtype}, where ({numel},) and {dtype} are "
                "expected"
            )

    def finite(self, name: str, vector: Tensor) -> None:
        """No NaN and no infinity."""
        if not is_finite(vector):
            self.refuse(f"a {name} that is not finite, and is said to be")

    def buffers(self, buffers: Buffers, expected: Buffers) -> None:
        """None, or as many as are expected, with their sizes and types."""
        if not buffers:
            return
        found = [(buffer.shape, buffer.dtype) for buffer in buffers]
        if found != [(buffer.shape, buffer.dtype) for buffer in expected]:
            self.refuse("buffers that are not those of the model")

    def version(self, version: int, newest: int) -> None:
        if not 0 <= version <= newest:
            self.refuse(f"version {version}, where {newest} is the newest")

    def number(self, name: str, value: float) -> None:
        if not (math.isfinite(value) and value >= 0):
            self.refuse(f"{name} {value}")

    def draws(self, ranges: Iterable[Range], ledger: SampleLedger, stop_max: int) -> None:
        """Ranges that were not accounted for before, do not overlap, and end where the worker can be by now."""
        end = 0
        for first, stop in sorted(ranges):
            if not 0 <= first <= stop:
                self.refuse(f"draws {first} to {stop}")
            if stop > stop_max:
                self.refuse(f"draws up to {stop}, where {stop_max} is possible by now")
            if first < end or ledger.overlaps(first, stop):
                self.refuse(f"draws {first} to {stop}, which it sent before")
            end = stop
