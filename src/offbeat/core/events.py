"""Events: the input of `Node.handle`. Every event has `at`, its time in seconds since the run began.

Tensors in events are *leases*: they are valid inside `handle` only. To keep the payload of a message, a node calls
`keep()`; to keep a gradient, it sends or copies it.

Transports deliver `MessageArrived`, `Sent`, `PeerJoined` and `PeerLost` to the live engine, and the engine passes them
to the node. The fields after those that nodes use have defaults and are for engines: `MessageArrived.incarnation` and
`nbytes`, `Sent.incarnation`, `size` and `seconds`, `PeerLost.reason` and `detail`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from offbeat.core.loader_states import LoaderState
from offbeat.core.messages import Buffers, Message
from offbeat.core.wire_size import MessageSize


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of every node."""

    at: float


@dataclass(frozen=True, slots=True)
class GradientReady:
    """The outstanding computation has ended.

    `gradient` and `loss` are SUMS over samples, not means, computed at the parameters of `version`. `draws` is the
    half-open range of data positions. `seconds` is the duration of the round, of which `induced_seconds` are what
    injected delay and slow-down factors have added. If `finite` is false, `gradient` must not be used. `weight` is the
    sum of the weights of the samples, None where each has the weight 1; the mean gradient is `gradient / divisor`.
    `loader` is a state of the data loader at or before the end of `draws`; None if it has none.
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
    weight: float | None = None
    loader: LoaderState | None = None

    @property
    def divisor(self) -> float:
        return self.samples if self.weight is None else self.weight


@dataclass(frozen=True, slots=True)
class StepReady:
    """The counterpart of `GradientReady` for users with an optimizer of their own: the change of the parameters.

    `loss` is None if the user gave none. If `finite` is false, `delta` must not be used.
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
    """A message from rank `source`. Its tensors are a lease; `keep()` returns a message that may be stored.

    For engines: the `incarnation` of the link that it arrived on, and its size on the wire.
    """

    at: float
    source: int
    message: Message
    keep: Callable[[], Message]
    incarnation: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """A message to rank `to` was transmitted, and its link is free again. `key` is `Send.supersedes`.

    For engines: the `incarnation` of its link, its size, and for how many `seconds` the link was busy with it.
    """

    at: float
    to: int
    key: str | None
    incarnation: int = 0
    size: MessageSize | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The timer `name` of `SetTimer` has expired."""

    at: float
    name: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of `Evaluate`. `accuracy` is None without class labels, `accuracy_top5` with 5 classes or fewer."""

    at: float
    version: int
    loss: float
    accuracy: float | None
    accuracy_top5: float | None = None


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """The link to `peer` is up. After a restart of the peer its incarnation is higher."""

    at: float
    peer: int
    incarnation: int


class LossReason(Enum):
    """Why a link is down."""

    CLOSED = "closed"
    """The peer closed it in order, with a goodbye."""
    BROKEN = "broken"
    """The connection failed."""
    SILENT = "silent"
    """Nothing was received from the peer for too long."""
    INVALID = "invalid"
    """The peer sent data that cannot be decoded."""
    REPLACED = "replaced"
    """The peer connected again."""
    DIED = "died"
    """The process of the peer has ended."""
    LOCAL = "local"
    """This rank closed it without waiting for the peer."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The link to `peer` is down; no further message of this incarnation will arrive.

    For engines: the `reason`, and for logs and error messages what is known about it, as text.
    """

    at: float
    peer: int
    incarnation: int
    reason: LossReason = LossReason.BROKEN
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Leave:
    """This rank should leave the run in order: its training loop was left, or interrupted. Other ranks continue.

    `stay`: the loop has ended, and the run has no common goal. The rank computes no more, and waits until the other
    ranks have ended too: the result includes what it has learned, and it gets the result.
    """

    at: float
    stay: bool = False


Event = (
    Started | GradientReady | StepReady | MessageArrived | Sent | TimerFired | Evaluated | PeerJoined | PeerLost | Leave
)
