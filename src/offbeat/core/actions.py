"""Actions: what a node returns from `handle`. The engine carries them out in order; none of them blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from offbeat.core.configuration import Family
from offbeat.core.loader_states import LoaderState
from offbeat.core.messages import Buffers, Message
from offbeat.core.validation import require_positive
from offbeat.errors import ConfigurationError


class Budget(Family):
    """How much to compute in a round, or how long to train (`until`). Shorthand: `60000` samples, or `90s`."""

    @classmethod
    def shorthand(cls, text: str) -> Any:
        try:
            return Seconds(float(text[:-1])) if text.endswith("s") else Samples(int(float(text)))
        except (ValueError, OverflowError):
            raise ConfigurationError(
                f"{text!r} is neither a number of samples, such as 60000, nor of seconds, such as 90s"
            ) from None


@dataclass(frozen=True)
class Samples(Budget, name="samples"):
    """An exact number of samples."""

    count: int = 256
    """samples"""

    def __post_init__(self) -> None:
        require_positive(self, "count")


@dataclass(frozen=True)
class Seconds(Budget, name="seconds"):
    """Micro-batches until this time has passed since the start of the round, or `samples_max` samples are done.

    The time is checked between micro-batches; at least one is computed.
    """

    seconds: float = 2.0
    """seconds"""
    samples_max: int | None = None
    """upper limit in samples; none: no limit"""

    def __post_init__(self) -> None:
        require_positive(self, "seconds", "samples_max")


class Record(msgspec.Struct, frozen=True, tag_field="record"):
    """The base class of records; the kinds are in `records/schema.py`. `at` is in seconds since the run began."""

    at: float


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the gradient at `parameters` over the data of this rank, from position `draw` on.

    The engine copies the values when it accepts the action, and a budget of seconds starts then. At most one `Compute`
    is outstanding; it always ends in `GradientReady` (or `StepReady`). `loader` is a state of the data loader at or
    before `draw`; None where none is known.
    """

    parameters: Tensor
    buffers: Buffers
    version: int
    draw: int
    budget: Budget
    microbatch: int
    loader: LoaderState | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the outstanding computation after the current micro-batch; `GradientReady` reports what was computed."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message; its tensors must not change from now on.

    `supersedes` is a key: this message replaces a queued one to the same peer with the same key whose transmission has
    not begun. `Sent(to, key)` follows for every message that was transmitted.
    """

    to: int
    message: Message
    supersedes: str | None = None


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the link to a peer; `PeerLost` follows at both ends. The peer may connect again. `why` is for the user."""

    peer: int
    why: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Request `TimerFired(name)` after `seconds`; replaces a timer of the same name."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ClearTimer:
    """Cancel a timer, if it is running."""

    name: str


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Measure held-out loss and accuracy in the background; `Evaluated` follows.

    A score, by which the node decides, is measured on the validation data; all else is for records, and on the test
    data. So no test example influences a run.
    """

    parameters: Tensor
    buffers: Buffers
    version: int
    is_score: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """Write a record. For an `Update` record, the simulator also advances the node by the time of an update."""

    record: Record


@dataclass(frozen=True, slots=True)
class Finish:
    """The node has ended and handles no further event. `failure` is the error sentence for the user, if any."""

    parameters: Tensor
    buffers: Buffers
    version: int
    failure: str | None = None


Action = Compute | Cancel | Send | Disconnect | SetTimer | ClearTimer | Evaluate | Report | Finish
