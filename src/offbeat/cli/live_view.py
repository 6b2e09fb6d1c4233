"""What a user sees of a live run while it goes on: a table that changes on a terminal, lines elsewhere.

Everything is worked out from records, so a view can begin in the middle and still tells the truth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.live import Live as Screen
from rich.table import Table
from rich.text import Text

from offbeat.cli.live_board import Board, Worker
from offbeat.cli.output import say as say_line
from offbeat.lab.report.numbers import NONE, fixed, number, percent
from offbeat.launch.process_settings import names_of
from offbeat.records.schema import AnyRecord, Ended, Notice

if TYPE_CHECKING:
    from offbeat.lab.experiment import Experiment
    from offbeat.launch import Watcher

LINE_SECONDS = 5.0
"""Seconds of the run between two lines, where there is no terminal."""
Name = Callable[[int], str]


class Quiet:
    """Says only what went wrong: what processes complain of, and what becomes of those that die."""

    def __init__(self, name: Name) -> None:
        self._name = name

    def records(self, records: Sequence[AnyRecord]) -> None:
        pass

    def say(self, sentence: str) -> None:
        say_line(sentence)

    def line(self, rank: int, text: str) -> None:
        # What a process says in a sentence of ours, on its way out, is why it ended, and is told with that.
        if not text.startswith("offbeat: "):
            self._show(f"[{self._name(rank)}] {text}")

    def ended(self) -> None:
        pass

    def _show(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Lines(Quiet):
    """A line about the run every few seconds of it, and at the end one about each worker."""

    def __init__(self, title: str, name: Name, board: Board) -> None:
        super().__init__(name)
        self._title, self._board = title, board
        self._next = LINE_SECONDS

    def records(self, records: Sequence[AnyRecord]) -> None:
        self._board.add(records)
        for record in records:
            if isinstance(record, Notice):
                self.say(f"{self._title}: {record.text}")
        over = any(isinstance(record, Ended) for record in records)
        if self._board.elapsed >= self._next and not over:
            self._next = (self._board.elapsed // LINE_SECONDS + 1) * LINE_SECONDS
            self._show(f"{self._title}: {', '.join(self._board.facts())}")

    def ended(self) -> None:
        self._show(f"{self._title}: {', '.join(self._board.facts())}")
        for rank, worker in sorted(self._board.workers.items()):
            self._show(f"  {self._name(rank)}: {worker_line(worker)}")


def worker_line(worker: Worker) -> str:
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


class Terminal(Quiet):
    """The view for a terminal; what is said appears above it."""

    def __init__(self, title: str, target: str | None, name: Name, board: Board, screen: Screen) -> None:
        super().__init__(name)
        self._title, self._target, self._board, self._screen = title, target, board, screen

    def records(self, records: Sequence[AnyRecord]) -> None:
        self._board.add(records)
        for record in records:
            if isinstance(record, Notice):
                self.say(record.text)
        self._screen.update(view(self._title, self._target, self._name, self._board))

    def say(self, sentence: str) -> None:
        self._show(f"offbeat: {sentence}")

    def _show(self, text: str) -> None:
        self._screen.console.print(text, markup=False, highlight=False, soft_wrap=True)


def view(title: str, target: str | None, name: Name, board: Board) -> Group:
    """The run in two lines, and a row for each worker."""
    head = Text(title, style="bold")
    if target is not None:
        head.append(f" (target: {target})", style="not bold")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    table.add_column("")
    table.add_column("state")
    for column in ("samples", "samples/s", "staleness", "idle", "compute s", "idle s", "send s", "lives"):
        table.add_column(column, justify="right")
    for rank, worker in sorted(board.workers.items()):
        table.add_row(name(rank), Text(worker.state, style=_STYLES[worker.state]), *_cells(board, worker))
    return Group(head, Text(" · ".join(board.facts())), Text(""), table)


_STYLES = {"computing": "green", "waiting": "yellow", "joined": "green", "lost": "red", "expected": "dim"}


def _cells(board: Board, worker: Worker) -> list[str]:
    rate = board.computed_per_second(worker)
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
def watching(experiment: Experiment, quiet: bool, position: str = "") -> Iterator[Watcher]:
    """Somebody to look on while an experiment runs; `position` is its place among several, such as `[2/4]`."""
    strategy = experiment.strategy
    ranks = range(strategy.processes(experiment.workers))
    computing = [rank for rank in ranks if strategy.computes(rank)]
    name = names_of(strategy)
    title = " ".join(filter(None, [position, f"{experiment.name}, seed {experiment.seed}"]))
    board = Board(computing)
    if quiet:
        yield Quiet(name)
    elif not sys.stderr.isatty():
        lines = Lines(title, name, board)
        yield lines
        lines.ended()
    else:
        resolved, workload = experiment.resolved()
        target = resolved.target
        goal = None if target is None else f"{target.metric} {target.value:g}"
        whole = f"{title}, on {workload.label}"
        with Screen(view(whole, goal, name, board), console=Console(stderr=True), transient=True) as screen:
            yield Terminal(whole, goal, name, board, screen)
