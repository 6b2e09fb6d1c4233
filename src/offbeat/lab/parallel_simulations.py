"""Several simulations at a time: in forked copies of this process, which hand in records as files.

A copy simulates one after the other, since the first one in a process takes longer.

A simulation does not depend on which process it runs in: its records have the same bytes as one at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import mmap
import operator
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from offbeat.core.actions import Record
from offbeat.core.validation import require
from offbeat.engine.experiment import Experiment, build_workload, share_done
from offbeat.errors import ConfigurationError, OffbeatError, RunFailed
from offbeat.lab.forking import can_fork_to_differentiate, prepare_to_fork
from offbeat.lab.simulated_runs import simulate_experiment
from offbeat.launch.children import Child, start_forked
from offbeat.launch.failure_reports import FailureKind
from offbeat.records.files import read_run
from offbeat.records.schema import RunRecords, Update
from offbeat.tracking.named_trackers import Track

POLL_SECONDS = 0.02
"""The interval at which ends and progress of running simulations are looked for."""


class ProcessKilled(RunFailed):
    """A copy of this process was ended by a signal, for want of memory perhaps."""


@dataclass(frozen=True)
class SimulationTask:
    """One simulation, and where its records go."""

    experiment: Experiment
    directory: Path | None
    """A new one; None: the records stay in memory."""
    keep_result: bool = False
    """Write the trained parameters to the directory as well."""
    track: Track = None
    """Trackers that follow it."""


class SimulationObserver(Protocol):
    """Follows simulations, each named by its position in the sequence of tasks."""

    def share(self, index: int, share: float, label: str) -> None:
        """`share`, from 0 to 1, of a simulation is done."""

    def ended(self, index: int, records: RunRecords) -> None:
        """A simulation has ended, and its records are complete."""

    def say(self, sentence: str) -> None:
        """A tracker has a sentence for the user."""


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def jobs_for(jobs: int | None, tasks: Sequence[SimulationTask]) -> int:
    """How many of these simulations run at a time, at least 1; raises ConfigurationError for a wrong number.

    jobs: the number that was asked for; None: one for each core
    tasks: the simulations
    """
    is_whole = isinstance(jobs, int) and not isinstance(jobs, bool)
    require(
        jobs is None or (is_whole and jobs >= 1),
        f"jobs is how many simulations run at a time, at least 1, but is {jobs!r}; leave it out for one on each core",
    )
    if not can_fork_to_differentiate() or any(_is_bound_to_process(task.track) for task in tasks):
        return 1
    return max(1, min(cores() if jobs is None else jobs, len(tasks)))


def _is_bound_to_process(track: Track) -> bool:
    """Whether a tracker is an object of this process: what one in a copy has collected would be lost."""
    trackers = track if isinstance(track, list | tuple) else [track]
    return not all(one is None or isinstance(one, str) for one in trackers)


def run_simulations(tasks: Sequence[SimulationTask], jobs: int, observer: SimulationObserver) -> list[RunRecords]:
    """Run all simulations; returns their records in the order of the tasks.

    The first one that raises ends the others. One that fails by itself has records that say so.

    tasks: the simulations
    jobs: how many at a time, as `jobs_for` says
    observer: follows them
    """
    results: dict[int, RunRecords] = {}
    in_turn = _simulate_in_turn(tasks, observer)
    for index, records in in_turn if jobs <= 1 else _simulate_in_copies(tasks, jobs, observer):
        results[index] = records
        observer.ended(index, records)
    return [results[index] for index in range(len(tasks))]


Ended = Iterator[tuple[int, RunRecords]]
"""The positions of simulations that have ended, and their records."""


def _simulate_in_turn(tasks: Sequence[SimulationTask], observer: SimulationObserver) -> Ended:
    for index, task in enumerate(tasks):
        share = functools.partial(observer.share, index, label=label_of(task.experiment))
        yield index, _simulate(task, share, observer.say)


def label_of(experiment: Experiment) -> str:
    """How progress names a simulation."""
    return f"{experiment.name}, seed {experiment.seed}"


class _Share(Protocol):
    def __call__(self, share: float, /) -> None: ...


class _Say(Protocol):
    def __call__(self, sentence: str, /) -> None: ...


def _simulate(task: SimulationTask, share: _Share, say: _Say) -> RunRecords:
    reported = 0.0

    def on_record(experiment: Experiment, record: Record) -> None:
        nonlocal reported
        if isinstance(record, Update) and time.monotonic() - reported >= POLL_SECONDS:
            reported = time.monotonic()
            share(share_done(experiment, record))

    run = simulate_experiment(
        task.experiment, task.directory, on_record, keep_result=task.keep_result, track=task.track, say=say
    )
    return run.records


# In copies of this process


def _simulate_in_copies(tasks: Sequence[SimulationTask], jobs: int, observer: SimulationObserver) -> Ended:
    for workload in {id(task.experiment.workload): task.experiment.workload for task in tasks}.values():
        assert workload is not None
        build_workload(workload)  # once, and not once in each copy
    prepare_to_fork()
    with tempfile.TemporaryDirectory(prefix="offbeat-simulations-") as temporary:
        placed = [
            task if task.directory is not None else dataclasses.replace(task, directory=Path(temporary, str(index)))
            for index, task in enumerate(tasks)
        ]
        board = _Board(len(tasks))
        copies: list[Child] = []
        try:
            copies += [_start(number, placed, board) for number in range(jobs)]
            waiting = set(range(len(tasks)))
            while waiting:
                board.hand_out()
                ended = [index for index in waiting if board.states[index] == _ENDED]
                for index in ended:
                    waiting.remove(index)
                    yield index, _records_of(tasks[index], placed[index])
                for number, copy in enumerate(copies):
                    if copy.poll():
                        _raise_failure(copy, board.task_of(number), tasks)
                for index in waiting:
                    if board.states[index] != _WAITING:
                        observer.share(index, board.shares[index], label_of(tasks[index].experiment))
                if not ended:
                    time.sleep(POLL_SECONDS)
        finally:
            board.close()
            for copy in copies:
                copy.kill()
                copy.wait()


_WAITING, _ENDED = 0, -1
"""States of a task; in between, the number of the copy that simulates it, counted from 1."""


class _Board:
    """The tasks, where all copies see them: which comes next, and how far each is."""

    def __init__(self, tasks: int) -> None:
        memory = memoryview(mmap.mmap(-1, 16 * tasks))  # shared with the copies
        self.shares = memory[: 8 * tasks].cast("d")
        self.states = memory[8 * tasks :].cast("q")
        self._next, self._queue = os.pipe()
        os.set_blocking(self._queue, False)
        self._queued, self._tasks = 0, tasks

    def hand_out(self) -> None:
        """Let copies take the next tasks; all of them, unless there are ten thousand."""
        with contextlib.suppress(BlockingIOError):
            while self._queued < self._tasks:
                os.write(self._queue, self._queued.to_bytes(_INDEX_BYTES, "little"))
                self._queued += 1

    def take(self) -> int:
        """In a copy: the next task. A pipe gives it to one copy, even if another is killed meanwhile."""
        return int.from_bytes(os.read(self._next, _INDEX_BYTES), "little")

    def task_of(self, number: int) -> int | None:
        """What a copy simulates."""
        return next((index for index, state in enumerate(self.states) if state == number + 1), None)

    def close(self) -> None:
        os.close(self._queue)
        os.close(self._next)


_INDEX_BYTES = 8


def _records_of(task: SimulationTask, placed: SimulationTask) -> RunRecords:
    assert placed.directory is not None
    return dataclasses.replace(read_run(placed.directory), directory=task.directory)


def _start(number: int, tasks: Sequence[SimulationTask], board: _Board) -> Child:
    """Start a copy, which simulates one task after the other, and is killed when all have ended."""

    def main() -> int:
        while True:
            index = board.take()
            board.states[index] = number + 1
            share = functools.partial(operator.setitem, board.shares, index)
            _simulate(tasks[index], share, lambda sentence: print(f"offbeat: {sentence}", file=sys.stderr))
            board.states[index] = _ENDED

    return start_forked(main, rank=number, incarnation=0, environment={}, on_line=_print_line)


def _print_line(_: int, text: str) -> None:
    with contextlib.suppress(ValueError):  # the last lines of one that is ended with this process
        print(text, file=sys.stderr)


def _raise_failure(child: Child, index: int | None, tasks: Sequence[SimulationTask]) -> NoReturn:
    """Raise what has ended a copy."""
    label = "the next run" if index is None else label_of(tasks[index].experiment)
    raise _failure(child, child.wait(), label)


def _failure(child: Child, code: int, label: str) -> OffbeatError:
    report = child.report
    if code < 0:
        return ProcessKilled(f"the process that simulated {label} was killed, for want of memory perhaps")
    if report is None:
        return RunFailed(f"the process that simulated {label} ended with exit code {code} before its run had ended")
    if report.kind is FailureKind.CONFIGURATION:
        return ConfigurationError(report.sentence)
    if report.kind is FailureKind.OTHER:
        return RunFailed(f"{label}, met a mistake, shown above: {report.sentence}")
    return RunFailed(report.sentence)
