"""Observers that show a live run on standard error: a table on a terminal, lines elsewhere.

They show what `RunState` computes from records, so a view may start in the middle of a run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from offbeat.cli.output import print_status, table
from offbeat.cli.run_state import RunState, WorkerState
from offbeat.lab.report.formatting import NONE, fixed, number, percent
from offbeat.launch.process_settings import rank_names
from offbeat.launch.run_failure import with_article
from offbeat.records.schema import AnyRecord, Ended, Membership, Notice

if TYPE_CHECKING:
    from offbeat.engine.experiment import Experiment
    from offbeat.launch.run_monitor import RunObserver

LINE_SECONDS = 5.0
"""Seconds of the run between two lines."""
RankName = Callable[[int], str]


class RunWatcher:
    """Prints problems only: output of processes, and messages about processes that die."""

    def __init__(self, name: RankName) -> None:
        self._name = name

    def records(self, records: Sequence[AnyRecord]) -> None:
        pass

    def say(self, sentence: str) -> None:
        print_status(sentence)

    def line(self, rank: int, text: str) -> None:
        self._print(f"[{self._name(rank)}] {text}")

    def ended(self) -> None:
        pass

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def events(records: Sequence[AnyRecord], name: RankName, lost: set[int]) -> Iterator[str]:
    """A sentence for each notice, and for each rank that rank 0 loses, or that joins it again; `lost` is updated."""
    for record in records:
        if isinstance(record, Notice):
            yield record.text
        elif isinstance(record, Membership) and record.rank == 0:
            if not record.joined and record.peer not in lost:
                lost.add(record.peer)
                yield f"{with_article(name(record.peer))} is lost"
            elif record.joined and record.peer in lost:
                lost.remove(record.peer)
                yield f"{with_article(name(record.peer))} has joined again"


class LineWatcher(RunWatcher):
    """Prints a line about the run every few seconds of it, and at the end one about each worker."""

    def __init__(self, title: str, name: RankName, state: RunState) -> None:
        super().__init__(name)
        self._title, self._state = title, state
        self._lost: set[int] = set()
        self._next_line_at = LINE_SECONDS

    def records(self, records: Sequence[AnyRecord]) -> None:
        self._state.add(records)
        for sentence in events(records, self._name, self._lost):
            self.say(f"{self._title}: {sentence}")
        has_ended = any(isinstance(record, Ended) for record in records)
        if self._state.elapsed >= self._next_line_at and not has_ended:
            self._next_line_at = (self._state.elapsed // LINE_SECONDS + 1) * LINE_SECONDS
            self._print_facts()

    def ended(self) -> None:
        self._print_facts()
        for rank, worker in sorted(self._state.workers.items()):
            self._print(f"  {self._name(rank)}: {worker.summary_line()}")

    def _print_facts(self) -> None:
        self._print(f"{self._title}: {', '.join(self._state.facts())}")


class ScreenWatcher(RunWatcher):
    """Updates a table on a terminal, and prints messages above it."""

    def __init__(self, title: str, target: str | None, name: RankName, state: RunState, screen: Live) -> None:
        super().__init__(name)
        self._title, self._target, self._state, self._screen = title, target, state, screen
        self._lost: set[int] = set()

    def records(self, records: Sequence[AnyRecord]) -> None:
        self._state.add(records)
        for sentence in events(records, self._name, self._lost):
            self.say(sentence)
        self._screen.update(render_run(self._title, self._target, self._name, self._state))

    def say(self, sentence: str) -> None:
        self._print(f"offbeat: {sentence}")

    def _print(self, text: str) -> None:
        self._screen.console.print(text, markup=False, highlight=False, soft_wrap=True)


def render_run(title: str, target: str | None, name: RankName, state: RunState) -> Group:
    """The run in two lines, and a row for each worker.

    Args:
        title: what is run.
        target: what is timed, such as `accuracy 0.9`.
        name: names of ranks.
        state: the state to show.
    """
    head = Text(title, style="bold")
    if target is not None:
        head.append(f" (target: {target})", style="not bold")
    heads = ("samples", "samples/s", "staleness", "idle", "compute s", "idle s", "send s", "starts")
    rows: list[tuple[str | Text, ...]] = [
        (name(rank), Text(worker.state, style=_STYLES[worker.state]), *_cells(state, worker))
        for rank, worker in sorted(state.workers.items())
    ]
    workers = table(["", "state", *heads], rows, right=heads)
    workers.padding = (0, 1, 0, 0)  # so that it fits a terminal of 80 columns
    workers.collapse_padding = True
    return Group(head, Text(" · ".join(state.facts())), Text(""), workers)


_STYLES = {"computing": "green", "waiting": "yellow", "joined": "green", "lost": "red", "expected": "dim"}


def _cells(state: RunState, worker: WorkerState) -> list[str]:
    seconds = (worker.compute_seconds, worker.idle_seconds, worker.send_seconds)
    return [
        f"{worker.samples:,}",
        number(state.computed_per_second(worker)) if worker.rounds else NONE,
        fixed(worker.staleness_mean, 1),
        percent(worker.idle_share),
        *(f"{value:.1f}" for value in seconds),
        str(worker.starts),
    ]


@contextmanager
def watch_run(experiment: Experiment, quiet: bool, position: str = "") -> Iterator[RunObserver]:
    """An observer for a live run of an experiment.

    Args:
        experiment: the run.
        quiet: print problems only.
        position: the place of the run among several, such as `[2/4]`.
    """
    strategy = experiment.strategy
    ranks = range(strategy.processes(experiment.worker_count))
    name = rank_names(strategy)
    title = " ".join(filter(None, [position, f"{experiment.name}, seed {experiment.seed}"]))
    state = RunState(rank for rank in ranks if strategy.computes(rank))
    if quiet:
        yield RunWatcher(name)
    elif not sys.stderr.isatty():
        lines = LineWatcher(title, name, state)
        yield lines
        lines.ended()
    else:
        resolved, workload = experiment.resolved()
        target = None if resolved.target is None else f"{resolved.target.metric} {resolved.target.value:g}"
        title = f"{title}, on {workload.label}"
        with Live(render_run(title, target, name, state), console=Console(stderr=True), transient=True) as screen:
            yield ScreenWatcher(title, target, name, state, screen)
