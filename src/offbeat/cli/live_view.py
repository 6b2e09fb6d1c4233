"""A live run so far, worked out from its records: how it goes, and what each worker does."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live as Screen
from rich.text import Text

from offbeat.cli.output import print_status, table
from offbeat.lab.report.formatting import NONE, fixed, number, percent, size
from offbeat.launch.process_settings import rank_names
from offbeat.records.schema import AnyRecord, Ended, Evaluation, Membership, Notice, Round, Traffic, Undone, Update

if TYPE_CHECKING:
    from offbeat.lab.experiment import Experiment
    from offbeat.launch.supervisor import RunObserver


RECENT_SECONDS = 5.0
"""What rates and losses are taken over, so that they show how it goes now."""
CONTRIBUTIONS_KEPT = 50
WAITING_SHARE = 0.5
"""A worker that spends more of its time than this without work is shown as waiting."""


@dataclass
class WorkerState:
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


class RunState:
    """A live run so far."""

    def __init__(self, computing: Sequence[int] = ()) -> None:
        self.workers = {rank: WorkerState(rank) for rank in computing}
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

    def _worker(self, rank: int) -> WorkerState:
        return self.workers.setdefault(rank, WorkerState(rank))

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

    def computed_per_second(self, worker: WorkerState) -> float | None:
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


# What a user sees of a live run while it goes on: a table that changes on a terminal, lines elsewhere.
#
# Everything is worked out from records, so a view can begin in the middle and still tells the truth.


LINE_SECONDS = 5.0
"""Seconds of the run between two lines, where there is no terminal."""
Name = Callable[[int], str]


class RunWatcher:
    """Says only what went wrong: what processes complain of, and what becomes of those that die."""

    def __init__(self, name: Name) -> None:
        self._name = name

    def records(self, records: Sequence[AnyRecord]) -> None:
        pass

    def say(self, sentence: str) -> None:
        print_status(sentence)

    def line(self, rank: int, text: str) -> None:
        # What a process says in a sentence of ours, on its way out, is why it ended, and is told with that.
        if not text.startswith("offbeat: "):
            self._show(f"[{self._name(rank)}] {text}")

    def ended(self) -> None:
        pass

    def _show(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class LineWatcher(RunWatcher):
    """A line about the run every few seconds of it, and at the end one about each worker."""

    def __init__(self, title: str, name: Name, state: RunState) -> None:
        super().__init__(name)
        self._title, self._state = title, state
        self._next = LINE_SECONDS

    def records(self, records: Sequence[AnyRecord]) -> None:
        self._state.add(records)
        for record in records:
            if isinstance(record, Notice):
                self.say(f"{self._title}: {record.text}")
        over = any(isinstance(record, Ended) for record in records)
        if self._state.elapsed >= self._next and not over:
            self._next = (self._state.elapsed // LINE_SECONDS + 1) * LINE_SECONDS
            self._show(f"{self._title}: {', '.join(self._state.facts())}")

    def ended(self) -> None:
        self._show(f"{self._title}: {', '.join(self._state.facts())}")
        for rank, worker in sorted(self._state.workers.items()):
            self._show(f"  {self._name(rank)}: {worker_line(worker)}")


def worker_line(worker: WorkerState) -> str:
    """What one worker did, in one line."""
    stale = worker.staleness_mean
    return ", ".join(
        [
            f"{worker.samples:,} samples in {worker.rounds:,} rounds",
            f"compute {worker.compute_seconds:.1f} s",
            f"idle {worker.idle_seconds:.1f} s",
            f"send {worker.send_seconds:.1f} s",
            *([f"staleness {fixed(stale, 1)}"] if stale is not None else []),
            *([f"{worker.lives} lives"] if worker.lives > 1 else []),
        ]
    )


class ScreenWatcher(RunWatcher):
    """The view for a terminal; what is said appears above it."""

    def __init__(self, title: str, target: str | None, name: Name, state: RunState, screen: Screen) -> None:
        super().__init__(name)
        self._title, self._target, self._state, self._screen = title, target, state, screen

    def records(self, records: Sequence[AnyRecord]) -> None:
        self._state.add(records)
        for record in records:
            if isinstance(record, Notice):
                self.say(record.text)
        self._screen.update(render_run(self._title, self._target, self._name, self._state))

    def say(self, sentence: str) -> None:
        self._show(f"offbeat: {sentence}")

    def _show(self, text: str) -> None:
        self._screen.console.print(text, markup=False, highlight=False, soft_wrap=True)


def render_run(title: str, target: str | None, name: Name, state: RunState) -> Group:
    """The run in two lines, and a row for each worker."""
    head = Text(title, style="bold")
    if target is not None:
        head.append(f" (target: {target})", style="not bold")
    numbers = ("samples", "samples/s", "staleness", "idle", "compute s", "idle s", "send s", "lives")
    rows: list[tuple[str | Text, ...]] = [
        (name(rank), Text(worker.state, style=_STYLES[worker.state]), *_cells(state, worker))
        for rank, worker in sorted(state.workers.items())
    ]
    workers = table(["", "state", *numbers], rows, right=numbers)
    workers.padding = (0, 1, 0, 0)  # so that a terminal of 80 columns holds it
    workers.collapse_padding = True
    return Group(head, Text(" · ".join(state.facts())), Text(""), workers)


_STYLES = {"computing": "green", "waiting": "yellow", "joined": "green", "lost": "red", "expected": "dim"}


def _cells(state: RunState, worker: WorkerState) -> list[str]:
    rate = state.computed_per_second(worker)
    return [
        f"{worker.samples:,}",
        number(rate) if worker.rounds else NONE,
        fixed(worker.staleness_mean, 1),
        percent(worker.idle_share),
        f"{worker.compute_seconds:.1f}",
        f"{worker.idle_seconds:.1f}",
        f"{worker.send_seconds:.1f}",
        str(worker.lives),
    ]


@contextmanager
def watch_run(experiment: Experiment, quiet: bool, position: str = "") -> Iterator[RunObserver]:
    """Somebody to look on while an experiment runs; `position` is its place among several, such as `[2/4]`."""
    strategy = experiment.strategy
    ranks = range(strategy.processes(experiment.worker_count))
    computing = [rank for rank in ranks if strategy.computes(rank)]
    name = rank_names(strategy)
    title = " ".join(filter(None, [position, f"{experiment.name}, seed {experiment.seed}"]))
    state = RunState(computing)
    if quiet:
        yield RunWatcher(name)
    elif not sys.stderr.isatty():
        lines = LineWatcher(title, name, state)
        yield lines
        lines.ended()
    else:
        resolved, workload = experiment.resolved()
        target = resolved.target
        goal = None if target is None else f"{target.metric} {target.value:g}"
        whole = f"{title}, on {workload.label}"
        with Screen(render_run(whole, goal, name, state), console=Console(stderr=True), transient=True) as screen:
            yield ScreenWatcher(whole, goal, name, state, screen)
