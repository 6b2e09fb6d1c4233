"""The state of a live run so far and of its workers, computed from its records alone."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.lab.report.formatting import fixed, number, size
from offbeat.records.schema import AnyRecord, Evaluation, Membership, Round, Traffic, Undone, Update

RECENT_SECONDS = 5.0
"""The window of rates and training losses."""
CONTRIBUTIONS_KEPT = 50
WAITING_SHARE = 0.5
"""A worker that is idle for more than this share of its recent time is shown as waiting."""


@dataclass
class WorkerState:
    """The state of one rank that computes."""

    rank: int
    is_member: bool | None = None
    """Whether it is in the run; None until it has joined."""
    lost_by: set[int] = field(default_factory=set)
    """Ranks that have lost the connection to it and have not reconnected."""
    rejoins: Counter[int] = field(default_factory=Counter)
    """Per rank, how often that rank has seen it rejoin."""
    rounds: int = 0
    samples: int = 0
    compute_seconds: float = 0.0
    idle_seconds: float = 0.0
    send_seconds: float = 0.0
    recent: deque[Round] = field(default_factory=deque)
    """Rounds that ended within the last `RECENT_SECONDS`; an aggregate stays for as long as it covers."""
    staleness: deque[float] = field(default_factory=lambda: deque(maxlen=CONTRIBUTIONS_KEPT))
    """Of its last contributions to updates."""

    def add_round(self, record: Round) -> None:
        self.is_member = self.is_member is not False
        self.rounds += record.rounds
        self.samples += record.samples
        self.compute_seconds += record.seconds
        self.idle_seconds += record.idle_seconds
        self.send_seconds += record.send_seconds
        self.recent.append(record)

    def add_membership(self, record: Membership) -> None:
        """Enter that another rank has seen this one join or leave.

        A join counts as a rejoin only for a rank that had lost this one: a restarted rank sees all others join.
        """
        self.is_member = record.joined
        if not record.joined:
            self.lost_by.add(record.rank)
        elif record.rank in self.lost_by:
            self.lost_by.remove(record.rank)
            self.rejoins[record.rank] += 1

    @property
    def state(self) -> str:
        """A word for what it mostly does. A round is recorded when it ends, so this lags behind."""
        if not self.is_member:
            return "expected" if self.is_member is None else "lost"
        if not self.rounds:
            return "joined"
        idle = sum(record.idle_seconds for record in self.recent)
        share = _ratio(idle, idle + sum(record.seconds for record in self.recent))
        return "waiting" if share is None or share > WAITING_SHARE else "computing"

    @property
    def idle_share(self) -> float | None:
        return _ratio(self.idle_seconds, self.idle_seconds + self.compute_seconds)

    @property
    def staleness_mean(self) -> float | None:
        return _ratio(sum(self.staleness), len(self.staleness))

    @property
    def starts(self) -> int:
        return 1 + max(self.rejoins.values(), default=0)

    def summary_line(self) -> str:
        stale = self.staleness_mean
        return ", ".join(
            [
                f"{self.samples:,} samples in {self.rounds:,} rounds",
                f"compute {self.compute_seconds:.1f} s",
                f"idle {self.idle_seconds:.1f} s",
                f"send {self.send_seconds:.1f} s",
                *([f"staleness {fixed(stale, 1)}"] if stale is not None else []),
                *([f"{self.starts} starts"] if self.starts > 1 else []),
            ]
        )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _covered_seconds(record: Update | Round) -> float:
    """The time that an aggregate covers; 0 for a record of a single round or update."""
    begin = record.since if isinstance(record, Update) else record.start if record.rounds > 1 else None
    return 0.0 if begin is None else record.at - begin


class RunState:
    """The state of a live run.

    Args:
        computing: the ranks that are expected to compute; others are added when they join.
    """

    def __init__(self, computing: Iterable[int] = ()) -> None:
        self.workers = {rank: WorkerState(rank) for rank in computing}
        self.elapsed = 0.0
        self.version = 0
        self.updates = 0
        self.samples = 0
        self.is_decentralized = False
        """Whether other ranks than 0 make updates: then there is no common version."""
        self.evaluation: Evaluation | None = None
        self._applied = 0
        self._updates: deque[Update] = deque()
        self._traffic: dict[tuple[int, float], deque[tuple[float, int]]] = {}
        """Per rank and start of its counter: times and bytes sent; the last count before the window is kept."""

    def add(self, records: Sequence[AnyRecord]) -> None:
        for record in records:
            self._add(record)
        since = self.elapsed - RECENT_SECONDS
        windows: list[deque[Any]] = [self._updates, *(worker.recent for worker in self.workers.values())]
        for window in windows:
            while window and window[0].at < min(since, self.elapsed - _covered_seconds(window[0])):
                window.popleft()
        for counts in self._traffic.values():
            while len(counts) > 2 and counts[1][0] < since:
                counts.popleft()

    def _add(self, record: AnyRecord) -> None:
        self.elapsed = max(self.elapsed, record.at)
        if isinstance(record, Round):
            self._worker(record.rank).add_round(record)
        elif isinstance(record, Update):
            self._add_update(record)
        elif isinstance(record, Undone):
            self.version, self.samples = record.version, record.samples_total
        elif isinstance(record, Membership):
            if record.rank == 0 or record.peer in self.workers:  # otherwise a worker sees the hub join
                self._worker(record.peer).add_membership(record)
        elif isinstance(record, Traffic):
            counts = self._traffic.setdefault((record.rank, record.since), deque([(record.since, 0)]))
            counts.append((record.at, sum(flow.bytes for flow in record.sent.values())))
        elif isinstance(record, Evaluation) and (self.evaluation is None or self.evaluation.at <= record.at):
            self.evaluation = record

    def _worker(self, rank: int) -> WorkerState:
        return self.workers.setdefault(rank, WorkerState(rank))

    def _add_update(self, record: Update) -> None:
        self.version, self.updates = max(self.version, record.version), self.updates + record.updates
        self.is_decentralized = self.is_decentralized or record.rank != 0
        self._applied += record.samples
        self.samples = max(self.samples, record.samples_total, self._applied if self.is_decentralized else 0)
        self._updates.append(record)
        for part in record.parts():
            repeats = min(part.contributions, CONTRIBUTIONS_KEPT)
            self._worker(part.rank).staleness.extend([part.staleness_sum / part.contributions] * repeats)

    def _per_second(self, records: Sequence[Update | Round]) -> float | None:
        covered = max((records[-1].at - record.at + _covered_seconds(record) for record in records), default=0.0)
        seconds = max(covered, min(self.elapsed, RECENT_SECONDS))
        return _ratio(sum(record.samples for record in records), seconds)

    @property
    def samples_per_second(self) -> float | None:
        """Samples applied per second, within the window."""
        return self._per_second(self._updates)

    def computed_per_second(self, worker: WorkerState) -> float | None:
        """Samples that a worker computed per second, within the window."""
        return self._per_second(worker.recent)

    @property
    def bytes_per_second(self) -> float | None:
        """Bytes sent per second, over the ranks that have reported traffic within the window.

        A count stays for as long as it covers, since beyond the limit of records counts are further apart.
        """
        rates = [
            _ratio(counts[-1][1] - counts[0][1], counts[-1][0] - counts[0][0])
            for counts in self._traffic.values()
            if counts[-1][0] >= self.elapsed - max(RECENT_SECONDS, counts[-1][0] - counts[-2][0])
        ]
        return sum(rate or 0.0 for rate in rates) if rates else None

    @property
    def train_loss(self) -> float | None:
        """The mean loss per sample, over the rounds within the window."""
        rounds = [record for worker in self.workers.values() for record in worker.recent if record.loss is not None]
        return _ratio(sum(record.loss or 0.0 for record in rounds), sum(record.samples for record in rounds))

    def facts(self) -> list[str]:
        """The state in short phrases, without those that are not known yet."""
        test, rate, traffic, loss = self.evaluation, self.samples_per_second, self.bytes_per_second, self.train_loss
        facts = [
            f"{self.elapsed:.0f} s",
            f"{self.updates:,} updates" if self.is_decentralized else f"version {self.version:,}",
            f"{self.samples:,} samples",
            f"{number(rate)} a second" if rate is not None else None,
            f"{size(traffic)} sent a second" if traffic is not None else None,
            f"train loss {number(loss)}" if loss is not None else None,
            f"test loss {number(test.loss)}" if test is not None and test.loss is not None else None,
            f"accuracy {fixed(test.accuracy, 3)}" if test is not None and test.accuracy is not None else None,
        ]
        return [fact for fact in facts if fact is not None]
