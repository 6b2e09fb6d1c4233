"""What a node asks for. An engine makes it happen.

A node returns actions from `handle`; the engine carries them out in that order. None of them blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from offbeat.core.configuration import Family
from offbeat.core.messages import Buffers, Message
from offbeat.core.validation import require_positive
from offbeat.errors import ConfigurationError


class Budget(Family):
    """How much to compute before reporting; also how long to train (`until`). As a word: `60000`, or `90s`."""

    @classmethod
    def shorthand(cls, text: str) -> Any:
        number, is_time = (text[:-1], True) if text.endswith("s") else (text, False)
        try:
            return Seconds(float(number)) if is_time else Samples(int(float(number)))
        except (ValueError, OverflowError):
            raise ConfigurationError(
                f"{text!r} is neither a number of samples, such as 60000, nor of seconds, such as 90s"
            ) from None


@dataclass(frozen=True)
class Samples(Budget, name="samples"):
    """Exactly so many samples."""

    count: int = 256
    """samples"""

    def __post_init__(self) -> None:
        require_positive(self, "count")


@dataclass(frozen=True)
class Seconds(Budget, name="seconds"):
    """Micro-batches until so much time has passed since the round started, or `samples_max` are done.

    The limit is looked at between micro-batches, and at least one is computed.
    """

    seconds: float = 2.0
    """seconds"""
    samples_max: int | None = None
    """samples at the most; none: no limit"""

    def __post_init__(self) -> None:
        require_positive(self, "seconds", "samples_max")


class Record(msgspec.Struct, frozen=True, tag_field="record"):
    """What can be reported. The kinds there are stand in `records/schema.py`."""

    at: float


@dataclass(frozen=True, slots=True)
class Compute:
    """Differentiate the loss at `parameters`, over the node's own data from position `draw` on.

    The engine takes its snapshot of the values when it accepts the action, and there the anytime clock starts.
    At most one is outstanding; it always ends in `GradientReady` (or `StepReady`).
    """

    parameters: Tensor
    buffers: Buffers
    version: int
    draw: int
    budget: Budget
    microbatch: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the outstanding computation at the next micro-batch boundary. What was done is still reported."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message; never blocks. Its tensors are immutable from now on.

    `supersedes` is a key: a queued message to the same peer under the same key that has not begun to leave is
    replaced by this one. Every message that has left is answered with `Sent(to, key)`.
    """

    to: int
    message: Message
    supersedes: str | None = None


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Ask for `TimerFired(name)` in so many seconds; a timer of the same name is replaced."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ClearTimer:
    """Forget a timer, if it is still running."""

    name: str


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Measure held-out loss and accuracy; answered with `Evaluated`, never in the way of an update."""

    parameters: Tensor
    buffers: Buffers
    version: int


@dataclass(frozen=True, slots=True)
class Report:
    """Write a record. A reported `Update` also tells the simulator that one update's time has been spent."""

    record: Record


@dataclass(frozen=True, slots=True)
class Finish:
    """This node is done; it will handle no further event. `failure` is the sentence that a user should read."""

    parameters: Tensor
    buffers: Buffers
    version: int
    failure: str | None = None


Action = Compute | Cancel | Send | SetTimer | ClearTimer | Evaluate | Report | Finish
