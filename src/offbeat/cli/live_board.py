"""A live run so far, worked out from its records: how it goes, and what each worker does."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from offbeat.lab.report.numbers import fixed, number, size
from offbeat.records.schema import AnyRecord, Evaluation, Membership, Round, Traffic, Undone, Update

RECENT_SECONDS = 5.0
"""What rates and losses are taken over, so that they show how it goes now."""
CONTRIBUTIONS_KEPT = 50
WAITING_SHARE = 0.5
"""A worker that spends more of its time than this without work is shown as waiting."""


@dataclass
class Worker:
    """What the records say about one rank."""

    rank: int
    there: bool | None = None
    """Whether it is in the run; None until somebody has seen it."""
    losses: set[int] = field(default_factory=set)
    """Who has lost it, and not seen it again."""
    returns: Counter[int] = field(default_factory=Counter)
    """Who has seen it come back, and how often."""
    rounds: int = 0
    samples: int = 0
    compute_seconds: float = 0.0
    idle_seconds: float = 0.0
    send_seconds: float = 0.0
    recent: deque[Round] = field(default_factory=deque)
    staleness: deque[int] = field(default_factory=lambda: deque(maxlen=CONTRIBUTIONS_KEPT))

    def add(self, record: Round) -> None:
        self.there = self.there is not False
        self.rounds += 1
        self.samples += record.samples
        self.compute_seconds += record.seconds
        self.idle_seconds += record.idle_seconds
        self.send_seconds += record.send_seconds
        self.recent.append(record)

    def met(self, record: Membership) -> None:
        """Somebody has seen it join, or leave. Who was started again itself meets everybody anew, and nobody again."""
        self.there = record.joined
        if not record.joined:
            self.losses.add(record.rank)
        elif record.rank in self.losses:
            self.losses.remove(record.rank)
            self.returns[record.rank] += 1

    def forget(self, before: float) -> None:
        while self.recent and self.recent[0].at < before:
            self.recent.popleft()

    @property
    def state(self) -> str:
        """Records come when a round has ended, so this is what it does most of the time, not at this very moment."""
        if self.there is None:
            return "expected"
        if not self.there:
            return "lost"
        if not self.rounds:
            return "joined"
        share = _share(self.recent)
        return "waiting" if share is None or share > WAITING_SHARE else "computing"

    @property
    def idle_share(self) -> float | None:
        return _ratio(self.idle_seconds, self.idle_seconds + self.compute_seconds)

    @property
    def staleness_mean(self) -> float | None:
        return _ratio(sum(self.staleness), len(self.staleness))

    @property
    def lives(self) -> int:
        return 1 + max(self.returns.values(), default=0)


def _share(rounds: deque[Round]) -> float | None:
    idle = sum(record.idle_seconds for record in rounds)
    return _ratio(idle, idle + sum(record.seconds for record in rounds))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


class Board:
    """A live run so far."""

    def __init__(self, computing: Sequence[int] = ()) -> None:
        self.workers = {rank: Worker(rank) for rank in computing}
        self.elapsed = 0.0
        self.version = 0
        self.updates = 0
        self.samples = 0
        self.among_equals = False
        """Whether others than rank 0 make updates, too: then there is no version that all of them have."""
        self._applied = 0
        self.evaluation: Evaluation | None = None
        self._updates: deque[Update] = deque()
        self._traffic: dict[tuple[int, float], deque[tuple[float, int]]] = {}
        """For each count when it stood where, in bytes sent; the last that is too old is kept, to count from."""

    def add(self, records: Sequence[AnyRecord]) -> None:
        for record in records:
            self.elapsed = max(self.elapsed, record.at)
            if isinstance(record, Round):
                self._worker(record.rank).add(record)
            elif isinstance(record, Update):
                self._updated(record)
            elif isinstance(record, Undone):
                self.version, self.samples = record.version, record.samples_total
            elif isinstance(record, Membership):
                self._met(record)
            elif isinstance(record, Traffic):
                self._counted(record)
            elif isinstance(record, Evaluation) and (self.evaluation is None or self.evaluation.at <= record.at):
                self.evaluation = record
        since = self.elapsed - RECENT_SECONDS
        for worker in self.workers.values():
            worker.forget(since)
        while self._updates and self._updates[0].at < since:
            self._updates.popleft()
        for count in self._traffic.values():
            while len(count) > 1 and count[1][0] < since:
                count.popleft()

    def _worker(self, rank: int) -> Worker:
        return self.workers.setdefault(rank, Worker(rank))

    def _updated(self, record: Update) -> None:
        self.version, self.updates = max(self.version, record.version), self.updates + 1
        self.among_equals = self.among_equals or record.rank != 0
        self._applied += record.samples
        self.samples = max(self.samples, record.samples_total, self._applied if self.among_equals else 0)
        self._updates.append(record)
        for part in record.contributions:
            self._worker(part.rank).staleness.append(part.staleness)

    def _counted(self, record: Traffic) -> None:
        count = self._traffic.setdefault((record.rank, record.since), deque([(record.since, 0)]))
        count.append((record.at, sum(flow.bytes for flow in record.sent.values())))

    def _met(self, record: Membership) -> None:
        if record.peer not in self.workers and record.rank != 0:
            return  # a worker that meets the hub
        self._worker(record.peer).met(record)

    @property
    def samples_per_second(self) -> float | None:
        """Samples applied a second, lately."""
        return _ratio(sum(update.samples for update in self._updates), min(self.elapsed, RECENT_SECONDS))

    @property
    def bytes_per_second(self) -> float | None:
        """What all ranks send a second, lately; of those that have told."""
        rates = [
            _ratio(count[-1][1] - count[0][1], count[-1][0] - count[0][0])
            for count in self._traffic.values()
            if count[-1][0] >= self.elapsed - RECENT_SECONDS
        ]
        return sum(rate or 0.0 for rate in rates) if rates else None

    def computed_per_second(self, worker: Worker) -> float | None:
        return _ratio(sum(record.samples for record in worker.recent), min(self.elapsed, RECENT_SECONDS))

    @property
    def train_loss(self) -> float | None:
        """Per sample, over the rounds that have ended lately."""
        rounds = [record for worker in self.workers.values() for record in worker.recent if record.loss is not None]
        return _ratio_of_sums([record.loss or 0.0 for record in rounds], [record.samples for record in rounds])

    def facts(self) -> list[str]:
        """How it goes, in a few words each; what is not known yet is left out."""
        test = self.evaluation
        found = [
            f"{self.elapsed:.0f} s",
            f"{self.updates:,} updates" if self.among_equals else f"version {self.version:,}",
            f"{self.samples:,} samples",
            f"{number(self.samples_per_second)} a second" if self.samples_per_second is not None else None,
            f"{size(self.bytes_per_second)} sent a second" if self.bytes_per_second is not None else None,
            f"train loss {number(self.train_loss)}" if self.train_loss is not None else None,
            f"test loss {number(test.loss)}" if test is not None and test.loss is not None else None,
            f"accuracy {fixed(test.accuracy, 3)}" if test is not None and test.accuracy is not None else None,
        ]
        return [fact for fact in found if fact is not None]


def _ratio_of_sums(parts: Sequence[float], wholes: Sequence[float]) -> float | None:
    return sum(parts) / sum(wholes) if sum(wholes) > 0 else None
