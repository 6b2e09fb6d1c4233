"""What the ranks of a probe say to each other. Rank 0 gives orders and is answered; blocks go to anybody."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offbeat.core.messages import Message


@dataclass(frozen=True)
class ProbePresent(Message):
    """To rank 0: I have a link to everybody."""

    host: str
    memory_bytes: int


@dataclass(frozen=True)
class ProbePing(Message):
    """Order: send small messages to `peer`, and wait for each to come back. Answered with `ProbePinged`."""

    step: int
    peer: int


@dataclass(frozen=True)
class ProbeEcho(Message):
    """The small message; sent back at once, with `back` set."""

    step: int
    back: bool


@dataclass(frozen=True)
class ProbePinged(Message):
    """To rank 0: the median round trip."""

    step: int
    seconds: float


@dataclass(frozen=True)
class ProbePrepare(Message):
    """Order: make these blocks ready, and expect those. `corrupt` names who is to get a damaged one."""

    step: int
    elements: int
    destinations: list[int]
    sources: list[int]
    corrupt: int | None = None


@dataclass(frozen=True)
class ProbePrepared(Message):
    step: int


@dataclass(frozen=True)
class ProbeGo(Message):
    """Order: send what was prepared, now. Answered with `ProbeTimed`."""

    step: int


@dataclass(frozen=True)
class ProbeBlock(Message):
    """A block. Answered at once with `ProbeReceipt`, and looked at later."""

    step: int
    source: int
    destination: int
    checksum: int
    block: Tensor


@dataclass(frozen=True)
class ProbeReceipt(Message):
    step: int


@dataclass(frozen=True)
class ProbeTimed(Message):
    """To rank 0: how long it took each destination to have its block and say so, in the order of `destinations`."""

    step: int
    seconds: list[float]


@dataclass(frozen=True)
class ProbeVerify(Message):
    """Order: look at what came. Answered with `ProbeVerified`."""

    step: int


@dataclass(frozen=True)
class ProbeVerified(Message):
    """To rank 0: what is wrong with the blocks that came, in the order of `sources`; empty for a good one."""

    step: int
    flaws: list[str]


@dataclass(frozen=True)
class ProbeTrouble(Message):
    """To rank 0: my link to `peer` is gone."""

    peer: int
    why: str


@dataclass(frozen=True)
class ProbeOver(Message):
    """Order: leave. `failure` says why, where it is not because everything is done."""

    failure: str
