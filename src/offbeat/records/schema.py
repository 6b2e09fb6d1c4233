"""The kinds of record. Tables, figures and reports are computed from these alone.

`at` is the time of a record, in seconds since the run began. A run is a directory with `run.json` (a `RunHeader`) and
`records.jsonl` (one record per line); a live run has one file per rank instead, `records-0.jsonl` and so on. They
contain no times of day, host names or paths, so that a simulation with the same seed writes the same bytes.

Beyond a limit of size, a record of a live run is an aggregate: it stands for several, and has their number
(`records/aggregation.py`). Fields of aggregates alone have defaults, which are omitted in the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from offbeat.core.actions import Record
from offbeat.core.notebook_html import ShownAsHtml
from offbeat.errors import unknown
from offbeat.records.data_frames import TABLES, record_frame

if TYPE_CHECKING:
    from pandas import DataFrame

FORMAT = 1
"""The version of the format of run directories."""

Count = Annotated[int, msgspec.Meta(ge=1)]
"""How many records an aggregate stands for."""


class Round(Record, frozen=True, tag="round", omit_defaults=True, gc=False):
    """One computation of one rank, written by the engine at its end (`at`).

    `seconds` is its duration from `start`. `induced_seconds` of it are what the straggler model and slow-down factors
    have added to the natural speed of the machine. `idle_seconds` is the time between the end of the previous round of
    the rank and `start`. `send_seconds` is how long the last message of the previous round took to be sent.

    An aggregate has the number of its `rounds`, sums of seconds, samples and loss, the first `start`, the last
    `version`, and draws from the lowest to the highest.
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
    rounds: Count = 1


class Contribution(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One message of an update: the draws [first, stop) of `rank`, and the staleness of their version."""

    rank: int
    first: int
    stop: int
    staleness: int


class MergedContributions(msgspec.Struct, frozen=True, array_like=True):
    """The contributions of `rank` to an aggregate of updates.

    `samples` is the number of draws in [first, stop) that were applied: all of them, unless some were dropped or are in
    other updates. `staleness_sum` and `staleness_max` are over the `contributions`, of which there are so many.
    """

    rank: int
    first: int
    stop: int
    samples: int
    contributions: Count
    staleness_sum: int
    staleness_max: int

    def stalenesses(self) -> list[float]:
        """One staleness for each contribution, with the same sum and maximum as the original ones."""
        others = self.contributions - 1
        return [self.staleness_max, *[(self.staleness_sum - self.staleness_max) / max(1, others)] * others]


class Update(Record, frozen=True, tag="update", omit_defaults=True, gc=False):
    """One update of the parameters on `rank`, which made `version`. `samples_total` counts the samples of the run.

    An aggregate has the number of its `updates`, the time of the first (`since`), sums of messages and samples, and the
    last version, total and learning rate. It has no `contributions`, but `merged` ones, one for each rank.
    """

    rank: int
    version: int
    messages: int
    samples: int
    samples_total: int
    learning_rate: float
    contributions: tuple[Contribution, ...]
    updates: Count = 1
    since: float | None = None
    merged: tuple[MergedContributions, ...] = ()

    def parts(self) -> Iterator[MergedContributions]:
        """What was applied, in one form: the contributions of a single update, or the merged ones of an aggregate."""
        for one in self.contributions:
            yield MergedContributions(
                one.rank, one.first, one.stop, one.stop - one.first, 1, one.staleness, one.staleness
            )
        yield from self.merged

    def updates_by(self, seconds: float) -> float:
        """How many of its updates were made by a time; those of an aggregate count as evenly spaced."""
        if self.at <= seconds:
            return self.updates
        if self.since is None or seconds < self.since:
            return 0
        return self.updates * (seconds - self.since) / (self.at - self.since)


class Undone(Record, frozen=True, tag="undone"):
    """`rank` restored the state of version `to_version`: later updates and their samples no longer count.

    The restored state has the number `version`, and `samples_total` samples remain. The others are computed again.
    """

    rank: int
    version: int
    to_version: int
    samples: int
    samples_total: int


Outcome = Literal["averaged", "declined", "lost"]
Reason = Literal["stale", "late", "nonfinite", "stopped", "lost"]


class Dropped(Record, frozen=True, tag="dropped", omit_defaults=True):
    """Samples of `rank` that were computed and not applied, with the reason.

    stale: above `staleness_max`; late: a newer version existed already; nonfinite: the gradient was not finite;
    stopped: training had ended; lost: never arrived, and were not repeated by a restarted worker.

    An aggregate has the number of `messages`, the highest staleness, and in `partly` the number of draws in
    [first, stop) that were dropped, if not all of them were.
    """

    rank: int
    first: int
    stop: int
    staleness: int
    reason: Reason
    messages: Count = 1
    partly: int | None = None

    @property
    def samples(self) -> int:
        return self.stop - self.first if self.partly is None else self.partly


class Evaluation(Record, frozen=True, tag="evaluation", omit_defaults=True):
    """Held-out loss and accuracy of one version; `at` is the time of that version.

    `accuracy_top5` is the top-5 accuracy, omitted with 5 classes or fewer.
    """

    rank: int
    version: int
    samples_total: int
    loss: float | None
    accuracy: float | None
    accuracy_top5: float | None = None


class Exchange(Record, frozen=True, tag="exchange", omit_defaults=True):
    """One exchange of two peers, written at its end by `rank`, which initiated it; `seconds` is its duration.

    `distance` is ‖x_rank − x_peer‖². lost: the peer was lost before it answered, and may have applied its half;
    declined: the peer was about to end, and neither has changed.

    An aggregate has the number of its `exchanges`, the sum of their seconds, and the mean of their distances.
    """

    rank: int
    peer: int
    seconds: float
    distance: float | None
    outcome: Outcome
    exchanges: Count = 1


class Consensus(Record, frozen=True, tag="consensus"):
    """The exact consensus distance: the mean over `peers` of ‖x_i − mean of x‖², written by the simulator."""

    peers: int
    distance: float


class Membership(Record, frozen=True, tag="membership"):
    """The link from `rank` to `peer` came up or went down."""

    rank: int
    peer: int
    incarnation: int
    joined: bool


class Notice(Record, frozen=True, tag="notice"):
    """A message for the user, written once."""

    rank: int
    text: str


class Flow(msgspec.Struct, frozen=True):
    """The messages of one kind in one direction: their number, and their size with and without compression.

    Sizes are those on the wire, including headers.
    """

    messages: int
    bytes: int
    bytes_uncompressed: int


class Traffic(Record, frozen=True, tag="traffic"):
    """What was sent and received by kind of message from `since` to `at`, written by the engine.

    A simulated run has one counter for all ranks, with rank 0, written before each evaluation and at the end. In a live
    run each process counts for its own rank, and writes about once a second and at its end. A restarted process starts
    at 0, and its records have another `since`. Counts are cumulative, so beyond the limit of size some are left out.
    """

    rank: int
    since: float
    sent: dict[str, Flow]
    received: dict[str, Flow]


RECORD_LINES_KIND = "RecordLines"
"""The kind of message that carries records to rank 0 without a shared disk: not part of the training traffic."""


class LinkUse(Record, frozen=True, tag="link_use"):
    """The bytes of training traffic that `rank` sent to each peer, in a run with a bandwidth limit.

    Written by the engine, once at the end. `bytes_per_second` is the limit of each direction of each link.
    """

    rank: int
    bytes_per_second: float
    used: dict[str, int]


class Ended(Record, frozen=True, tag="ended", omit_defaults=True):
    """The last record of a run, written by the engine. `failure` is the error sentence, or None.

    In a live run each process writes one for its own rank, with what it has sent; a killed process writes none. Rank 0
    is the default and omitted in the file.
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
"""Decodes a line of records. Shared by all threads and created on import, since creating two at once is unsafe."""


class RunHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a run: everything that is needed to repeat it."""

    format: int = FORMAT
    engine: Literal["simulated", "live"]
    label: str
    """The name in tables and figures: the short name of the strategy, or one given by the user."""
    workload: str
    workers: int
    seed: int
    parameters: int
    """The number of parameters of the model."""
    target: dict[str, Any] | None
    """`{"metric": "accuracy" | "loss", "value": float}`, or None."""
    experiment: dict[str, Any] | None
    """The experiment as plain data, or None if it has objects that cannot be serialized."""
    optimizers: dict[str, str] = {}
    """Class and settings of each optimizer of the strategy, by the name of its field."""
    batched: bool | None = None
    """Whether small gradients of several workers were computed in one call; None for a live run."""
    offbeat: str
    torch: str


@dataclass(frozen=True, repr=False)
class RunRecords(ShownAsHtml):
    """The header and the records of a run; `directory` is None if they are in memory only."""

    directory: Path | None
    header: RunHeader
    records: tuple[AnyRecord, ...]

    def __repr__(self) -> str:
        header = self.header
        count = f"{len(self.records):,} records"
        return f"<RunRecords of {header.label} on {header.workload}, seed {header.seed}: {count}>"

    def counts(self) -> dict[str, int]:
        """How many records of each kind the run has, in the order of their first."""
        return dict(Counter(str(record.__struct_config__.tag) for record in self.records))

    def to_pandas(self, kind: str) -> DataFrame:
        """A table of the records of one kind, in their order, with the strategy and the seed of the run.

        Needs pandas. Without such records the table is empty.

        kind: the kind, such as "round" or "evaluation". Of "update", messages are left out; "contribution" has a row
            for each of them. "traffic" has a row for each direction and kind of message, "link_use" for each peer
        """
        kinds = {str(record.__struct_config__.tag): record for record in AnyRecord.__args__}
        if kind not in (*kinds, *TABLES):
            raise unknown("kind of record", kind, [*kinds, *TABLES])
        cls = kinds.get(kind, Update)
        same_for_all = {"strategy": self.header.label, "seed": self.header.seed}
        return record_frame(cls, TABLES.get(kind), of_kind(self, cls), same_for_all)


def of_kind(run: RunRecords, kind: type[Kind]) -> Iterator[Kind]:
    """The records of one kind, in their order."""
    return (record for record in run.records if isinstance(record, kind))
