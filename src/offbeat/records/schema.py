"""The kinds of record there are. Every table, figure and page is drawn from these alone.

`at` is when the record was made, in seconds since the run began. A run is a directory with `run.json` (what
was run: a `RunHeader`) and `records.jsonl` (one record a line); a live run has a file for each rank instead,
`records-0.jsonl` and so on, since its ranks share no process. None of them holds wall-clock times of day, host
names or paths, so that the same seed writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from offbeat.core.actions import Record

FORMAT = 1


class Round(Record, frozen=True, tag="round"):
    """One computation of one rank, written by the engine when it ended (`at`).

    `seconds` counts from `start`, the first `induced_seconds` of them were artificial delay; `idle_seconds` went by
    between the end of the rank's previous round and this start, and of the messages that the previous round
    sent, the last took `send_seconds` to leave.
    """

    rank: int
    start: float
    seconds: float
    induced_seconds: float
    samples: int
    loss: float | None
    version: int
    draws: tuple[int, int]
    idle_seconds: float
    send_seconds: float
    finite: bool


class Contribution(msgspec.Struct, frozen=True, array_like=True):
    """One message that went into an update: whose samples, which of them, and how stale their version was."""

    rank: int
    first: int
    stop: int
    staleness: int


class Update(Record, frozen=True, tag="update"):
    """One update of the parameters on `rank`; `version` is the one it made. `samples_total` counts the run's."""

    rank: int
    version: int
    messages: int
    samples: int
    samples_total: int
    learning_rate: float
    contributions: tuple[Contribution, ...]


class Undone(Record, frozen=True, tag="undone"):
    """`rank` went back to what it was at version `to_version`: the updates after that do not count, nor their samples.

    They are computed again. What it went back to is called `version` from now on, and `samples_total` are left.
    """

    rank: int
    version: int
    to_version: int
    samples: int
    samples_total: int


Outcome = Literal["averaged", "declined", "lost"]
Reason = Literal["stale", "late", "nonfinite", "stopped", "lost"]


class Dropped(Record, frozen=True, tag="dropped"):
    """Samples of `rank` that were computed and not applied, and why.

    stale: older than `staleness_max`; late: a newer version was there already; nonfinite: not a number;
    stopped: training was over; lost: never arrived, and their worker did not come back to repeat them.
    """

    rank: int
    first: int
    stop: int
    staleness: int
    reason: Reason


class Evaluation(Record, frozen=True, tag="evaluation", omit_defaults=True):
    """Held-out loss and accuracy of one version; `at` is when that version was made.

    `accuracy_top5` is how often the label was among the five likeliest; left out where there are five classes or fewer.
    """

    rank: int
    version: int
    samples_total: int
    loss: float | None
    accuracy: float | None
    accuracy_top5: float | None = None


class Exchange(Record, frozen=True, tag="exchange"):
    """One averaging of two peers, written by `rank`, which began it, when it was over: `seconds` after it had begun.

    `distance` is ‖x_rank − x_peer‖², the square of how far they were apart. lost: the peer was gone before it answered,
    and may have taken its share; declined: it was about to end, and neither has changed.
    """

    rank: int
    peer: int
    seconds: float
    distance: float | None
    outcome: Outcome


class Consensus(Record, frozen=True, tag="consensus"):
    """How far peers are apart: the mean over `peers` of ‖x_i − mean of x‖², exact, written by the simulator."""

    peers: int
    distance: float


class Membership(Record, frozen=True, tag="membership"):
    """`rank` saw `peer` join or leave."""

    rank: int
    peer: int
    incarnation: int
    joined: bool


class Notice(Record, frozen=True, tag="notice"):
    """Something a user should read, said once."""

    rank: int
    text: str


class Flow(msgspec.Struct, frozen=True):
    """Messages of one kind that went one way: how many, what they weighed, and what they would have uncompressed.

    Bytes are those on the wire, heads included; where nothing is compressed, both numbers are equal.
    """

    messages: int
    bytes: int
    bytes_uncompressed: int


class Traffic(Record, frozen=True, tag="traffic"):
    """What was sent and received by kind of message, written by the engine, from `since` up to `at`.

    A simulated run has one count for all its ranks, under rank 0, written before each evaluation and at the end. In a
    live run each process counts for its own rank, about once a second and at its end, and one that takes over a rank
    begins at nothing: another `since` tells its counts from those of the one before.
    """

    rank: int
    since: float
    sent: dict[str, Flow]
    received: dict[str, Flow]


RECORD_LINES_KIND = "RecordLines"
"""The kind of message in which records travel where no disk is shared: traffic, but not for the sake of training."""


class LinkUse(Record, frozen=True, tag="link_use"):
    """What `rank` sent to each of its peers, in bytes, where each direction of a link had a budget of so many a second.

    Written once at the end, by the engine, and only where there was a budget. Of training traffic alone.
    """

    rank: int
    bytes_per_second: float
    used: dict[str, int]


class Ended(Record, frozen=True, tag="ended", omit_defaults=True):
    """The last record of a run, written by the engine. `failure` is None where all went well.

    In a live run each process that comes to its end writes one for its own rank, over what it sent itself; one that
    was killed writes none. Rank 0 is left out of the file, so a simulated run has the bytes that it always had.
    """

    bytes_sent: int
    messages_sent: int
    failure: str | None
    rank: int = 0


AnyRecord = (
    Round
    | Update
    | Undone
    | Dropped
    | Evaluation
    | Exchange
    | Consensus
    | Membership
    | Notice
    | Traffic
    | LinkUse
    | Ended
)

Kind = TypeVar("Kind", bound=AnyRecord)

RECORD_DECODER: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)
"""Reads a line of records. One for all threads, made before there are any: two that are made at once may be broken."""


class RunHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What was run: everything that is needed to run it again, and how to read it."""

    format: int = FORMAT
    engine: Literal["simulated", "live"]
    label: str
    """The name that tables and figures use: the strategy's short name, or the user's own."""
    workload: str
    workers: int
    seed: int
    parameters: int
    """How many parameters the model has."""
    target: dict[str, Any] | None
    """`{"metric": "accuracy" | "loss", "value": float}`, or None."""
    experiment: dict[str, Any] | None
    """The experiment as plain data, or None where it holds objects that cannot be written down."""
    offbeat: str
    torch: str


@dataclass(frozen=True)
class RunRecords:
    """A run as it was recorded."""

    directory: Path | None
    header: RunHeader
    records: tuple[AnyRecord, ...]


def of_kind(run: RunRecords, kind: type[Kind]) -> Iterator[Kind]:
    """The records of one kind, in the order in which they were written."""
    return (record for record in run.records if isinstance(record, kind))
