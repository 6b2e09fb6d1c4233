"""What peers say to each other, besides Stop and Stopped.

averaging   Offer → Answer or Declined       one exchange; both ends use the one difference that is in the Answer
            Ready → Paired                   to and from the matchmaker, where partners are the first available
together    Gather → Part … → Average … → Have      a global average, up and down a tree; at the start and at the end
            Retry                            the tree is broken: once more, directly
coming      Status, AskCopy → Copied         who comes late, or again, copies one that is training
ending      Tally, Enough, Through           my samples so far; all have taken what was asked for; my own loop is over
members     Roster                           who is there, for those who are not linked to everybody

`counts` is rank → samples, merged by maximum wherever it arrives: so peers count without a coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from offbeat.core.messages import Buffers, Message

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Offer(Message):
    """Here are my parameters: let us average. `pairing` is the matchmaker's number of it, or 0."""

    values: ClassVar[tuple[str, ...]] = ("parameters",)

    parameters: Tensor
    buffers: Buffers
    sequence: int
    pairing: int
    counts: Counts


@dataclass(frozen=True)
class Answer(Message):
    """The sender has taken its share of `difference` = yours − mine. Take yours, by the same factors.

    `buffers` are the sender's, as they were before. Both ends must use one difference, or
    their mean would move; so the sender uses what a compression makes of it, and coding that loses nothing.
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
    """The sender does not average now, and nothing has changed."""

    sequence: int
    counts: Counts


@dataclass(frozen=True)
class Ready(Message):
    """The sender would like to average with somebody."""


@dataclass(frozen=True)
class Paired(Message):
    """Average with `partner`; the one that `begins` makes the offer, which may arrive before this."""

    pairing: int
    partner: int
    begins: bool


@dataclass(frozen=True)
class ReduceStart(Message):
    """A global average over `members` begins; `direct`: send your part to me, not up the tree."""

    round: int
    final: bool
    members: tuple[int, ...]
    direct: bool


@dataclass(frozen=True)
class PartialSum(Message):
    """The sum over `peers` peers. Where `result`, it is the final average that was agreed upon before."""

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
    """The global average; it is passed on down the tree."""

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
    """The sender has lost its neighbour in the tree of this round."""

    round: int


@dataclass(frozen=True)
class Status(Message):
    """Whether the sender is training already."""

    training: bool


@dataclass(frozen=True)
class CopyRequest(Message):
    """The sender comes late, or again, and would like to go on from your parameters."""


@dataclass(frozen=True)
class CopyReply(Message):
    """Go on from these; the run has lasted for `elapsed_seconds`."""

    parameters: Tensor
    buffers: Buffers
    counts: Counts
    elapsed_seconds: float


@dataclass(frozen=True)
class GoalReached(Message):
    """As the sender counts, training is over; it is linked to `members`."""

    counts: Counts
    members: tuple[int, ...]


@dataclass(frozen=True)
class SampleCounts(Message):
    """What the sender knows of everybody's samples."""

    counts: Counts


@dataclass(frozen=True)
class LoopEnded(Message):
    """The sender's own loop is over; it stays for the others."""

    counts: Counts


@dataclass(frozen=True)
class MemberList(Message):
    """Who is there, as the sender, who is linked to everybody, sees it."""

    ranks: tuple[int, ...]
