"""What happens to a node. Every event carries `at`, the time in seconds since the run began.

Tensors in events are *leases*: they are good inside `handle`. A node that wants to hold on to the payload of a
message calls `keep()`; a gradient it wants to hold on to, it sends or copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from offbeat.core.messages import Buffers, Message


@dataclass(frozen=True, slots=True)
class Started:
    """The node's first event."""

    at: float


@dataclass(frozen=True, slots=True)
class GradientReady:
    """The outstanding computation has ended.

    `gradient` is the SUM over samples, never a mean, and `loss` likewise; both were taken at `version`.
    `draws` is the half-open range of data positions used. `seconds` counts from the start of the round,
    `induced_seconds` of them were artificial delay. Where `finite` is false, `gradient` must not be used.
    """

    at: float
    gradient: Tensor
    samples: int
    loss: float
    buffers: Buffers
    version: int
    draws: tuple[int, int]
    seconds: float
    induced_seconds: float
    finite: bool


@dataclass(frozen=True, slots=True)
class StepReady:
    """The variant for users who step an optimizer of their own: the change of the parameters, not a gradient.

    `loss` is None where the user has not told it. Where `finite` is false, `delta` must not be used.
    """

    at: float
    delta: Tensor
    samples: int
    loss: float | None
    buffers: Buffers
    version: int
    draws: tuple[int, int]
    seconds: float
    induced_seconds: float
    finite: bool


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """A message from `source`. Its tensors are a lease; `keep()` returns a message that may be held on to."""

    at: float
    source: int
    message: Message
    keep: Callable[[], Message]


@dataclass(frozen=True, slots=True)
class Sent:
    """A message to `to` has left this node, so its link is free again. `key` is the Send's `supersedes`."""

    at: float
    to: int
    key: str | None


@dataclass(frozen=True, slots=True)
class TimerFired:
    at: float
    name: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The answer to `Evaluate`; `accuracy` is None where the workload has none, the other where classes are few."""

    at: float
    version: int
    loss: float
    accuracy: float | None
    accuracy_top5: float | None = None


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """There is a link to `peer` now. A peer that comes back has a higher incarnation."""

    at: float
    peer: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The link to `peer` is gone; nothing of this incarnation will arrive any more."""

    at: float
    peer: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Leave:
    """This participant should end in order: its user has left the loop, or pressed Ctrl-C. The others may go on.

    With `stay` its user has come to the end of a loop without a goal that all share: it computes no more, and among
    equals stays until the others have come to theirs, so that it has a part in the result, and gets it.
    """

    at: float
    stay: bool = False


Event = (
    Started | GradientReady | StepReady | MessageArrived | Sent | TimerFired | Evaluated | PeerJoined | PeerLost | Leave
)
