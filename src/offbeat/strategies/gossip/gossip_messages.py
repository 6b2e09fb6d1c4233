"""Messages between gossip peers, besides `Stop` and `Stopped`.

exchange      Offer → Answer or Declined     average of two peers; both use the difference that is in the Answer
              Ready → Paired                 to and from the matchmaker, with partner `first-available`
global mean   ReduceStart → PartialSum … → Average … → AverageReceived      up and down a tree, at start and end
              ReduceRetry                    a link of the tree is lost: repeat, each rank directly to the root
late joiners  Status, CopyRequest → CopyReply      copy the parameters of a peer that is training
end           SampleCounts, GoalReached, LoopEnded      progress; the sample goal is reached; the user's loop has ended
membership    MemberList                     live ranks, for ranks that are not linked to all others

`counts` is the number of samples of each rank. Receivers merge it by maximum, so no coordinator has to count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from offbeat.core.messages import Buffers, Message

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Offer(Message):
    """Starts an exchange. `pairing` is the matchmaker's number of it, or 0 without matchmaker."""

    values: ClassVar[tuple[str, ...]] = ("parameters",)

    parameters: Tensor
    buffers: Buffers
    sequence: int
    pairing: int
    counts: Counts


@dataclass(frozen=True)
class Answer(Message):
    """Accepts an offer. `difference` is the receiver's parameters minus the sender's; the sender has applied its share.

    `buffers` are the sender's, from before the exchange. The mean of all peers is conserved only if both ends apply the
    same difference: the sender applies it after the compression round trip, and it is coded without further loss.
    """

    roundtrip: ClassVar[tuple[str, ...]] = ("difference",)

    difference: Tensor
    buffers: Buffers
    sequence: int
    counts: Counts
    alpha_tilde: float
    distance: float


@dataclass(frozen=True)
class Declined(Message):
    """Refuses an offer; nothing has changed on the sender."""

    sequence: int
    counts: Counts


@dataclass(frozen=True)
class Ready(Message):
    """The sender asks the matchmaker for a partner."""


@dataclass(frozen=True)
class Paired(Message):
    """Average with `partner`; the end that `begins` sends the offer, which may arrive before this message."""

    pairing: int
    partner: int
    begins: bool


@dataclass(frozen=True)
class ReduceStart(Message):
    """Starts a global average over `members`; with `direct`, partial sums go to the root and not up the tree."""

    round: int
    final: bool
    members: tuple[int, ...]
    direct: bool


@dataclass(frozen=True)
class PartialSum(Message):
    """The sum over `peers` peers; with `result`, the final average of an earlier round instead."""

    parameters: Tensor
    buffers: Buffers
    root: int
    round: int
    peers: int
    version: int
    counts: Counts
    result: bool


@dataclass(frozen=True)
class Average(Message):
    """The global average; each rank forwards it to its children in the tree."""

    parameters: Tensor
    buffers: Buffers
    root: int
    round: int
    final: bool
    members: tuple[int, ...]
    direct: bool
    version: int
    counts: Counts


@dataclass(frozen=True)
class AverageReceived(Message):
    """The sender holds the final average."""

    version: int


@dataclass(frozen=True)
class ReduceRetry(Message):
    """The sender has lost its parent or a child in the tree of this round."""

    round: int


@dataclass(frozen=True)
class Status(Message):
    """Whether the sender is training already."""

    training: bool


@dataclass(frozen=True)
class CopyRequest(Message):
    """The sender joins late, or again, and asks for the receiver's parameters."""


@dataclass(frozen=True)
class CopyReply(Message):
    """Parameters for a late joiner; the run started `elapsed_seconds` ago."""

    parameters: Tensor
    buffers: Buffers
    counts: Counts
    elapsed_seconds: float


@dataclass(frozen=True)
class GoalReached(Message):
    """By the sender's counts, training is over; it is linked to `members`."""

    counts: Counts
    members: tuple[int, ...]


@dataclass(frozen=True)
class SampleCounts(Message):
    """The sample counts of all ranks that the sender knows."""

    counts: Counts


@dataclass(frozen=True)
class LoopEnded(Message):
    """The user's training loop of the sender has ended; the sender goes on averaging with the others."""

    counts: Counts


@dataclass(frozen=True)
class MemberList(Message):
    """All live ranks, from the root, which is linked to all of them."""

    ranks: tuple[int, ...]
