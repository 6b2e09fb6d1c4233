"""The runs of a study: several at a time, into a directory, from which they can be read again.

A finished run is not repeated, so that an interrupted study continues where it stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from offbeat.core.actions import Record
from offbeat.core.validation import require
from offbeat.engine.experiment import Experiment, share_done
from offbeat.errors import ConfigurationError, OffbeatError, RunFailed, shortened
from offbeat.lab.live_runs import train_experiment
from offbeat.lab.reproduction.study import Scale, Study, StudyCase, StudyRun, load_study
from offbeat.lab.reproduction.study_reads import drawn_from_records
from offbeat.lab.simulated_runs import simulate_experiment
from offbeat.live.local_ranks import LIVE_SECONDS_PER_SAMPLE
from offbeat.records.files import HEADER, RECORDS, file_name, rank_files, read_header, read_run
from offbeat.records.metrics import Summary, end_of, summarize
from offbeat.records.schema import Update

MANIFEST = "study.json"
METRICS = "metrics.json"
"""In an archive: the summary of a run, computed from all of its records."""
STUDY_COPY = "study.toml"
"""A copy of the file of a user's own study."""
POLL_SECONDS = 0.25
"""The interval at which the progress of a run is reported."""


class StudyManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which study a directory holds, as JSON in the directory."""

    study: str
    scale: Scale
    seeds: tuple[int, ...] | None
    thinned: dict[str, list[str]] | None = None
    """In an archive, whose records are thinned: the quantities and plots that they suffice for, by case."""


@dataclass(frozen=True)
class RunTask:
    """One run of a study, and its directory."""

    index: int
    case: StudyCase
    experiment: Experiment
    directory: Path


OnProgress = Callable[[int, float], None]
"""Called with the index of a task and the share of it that is done."""
OnEnd = Callable[[int, StudyRun], None]
"""Called with the index of a task and its run."""


def tasks_of(study: Study, directory: Path) -> list[RunTask]:
    """All runs of a study, each with a directory of its own below `directory`."""
    tasks = [
        RunTask(index, case, experiment, directory / _run_path(case, experiment))
        for index, (case, experiment) in enumerate(study.experiments())
    ]
    counts = Counter(task.directory for task in tasks)
    twice = next((path for path, count in counts.items() if count > 1), None)
    require(twice is None, f"two runs of {study.name} would share the directory {twice}; change one of their labels")
    return tasks


def _run_path(case: StudyCase, experiment: Experiment) -> Path:
    run = f"{file_name(experiment.name)}-seed{experiment.seed}"
    return Path(file_name(case.label).lstrip(".") or "-", run) if case.label else Path(run)


def claim_directory(study: Study, directory: Path, seeds: tuple[int, ...] | None) -> None:
    """Write to a directory which study it holds; refuse one that holds something else."""
    manifest = StudyManifest(study.name, study.scale, seeds)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / MANIFEST
        if path.is_file():
            other = read_manifest(directory)
            if other.thinned is not None:
                raise ConfigurationError(
                    f"{directory} holds the thinned records of an archive; name another place with --out"
                )
            if other != manifest:
                raise ConfigurationError(
                    f"{directory} holds the study {other.study} at scale {other.scale}"
                    f"{'' if other.seeds == seeds else ' with other seeds'}; name another place with --out"
                )
        elif any(directory.rglob(HEADER)):
            raise ConfigurationError(f"{directory} holds other runs; name another place with --out")
        else:
            path.write_bytes(msgspec.json.encode(manifest) + b"\n")
        if study.own is not None:
            (directory / STUDY_COPY).write_bytes(study.own.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"cannot use {directory} ({error.strerror}); name another place with --out") from None


def is_done(task: RunTask) -> bool:
    """Whether the directory of the task holds its run, and the run has ended; refuse a run of another experiment.

    A simulation that failed is done, since it would fail again; a live run that failed is not.
    """
    if not (task.directory / HEADER).is_file():
        return False
    resolved, _ = task.experiment.resolved(LIVE_SECONDS_PER_SAMPLE if task.case.engine == "live" else None)
    header = read_header(task.directory)
    plain = msgspec.json.decode(msgspec.json.encode(resolved.to_plain()))
    if header.engine != task.case.engine or header.experiment != plain:
        raise ConfigurationError(
            f"{task.directory} holds a run with other settings, of an earlier version of this study perhaps; "
            "name another place with --out"
        )
    end = end_of(read_run(task.directory))
    return end is not None and (end.failure is None or header.engine == "simulated")


def run_tasks(tasks: Sequence[RunTask], processes: int, on_progress: OnProgress, on_end: OnEnd) -> list[StudyRun]:
    """Run all tasks that are not done, simulations `processes` at a time and then live runs one by one.

    Returns the runs in the order of the tasks.
    """
    runs: dict[int, StudyRun] = {}

    def end(task: RunTask) -> None:
        runs[task.index] = load_run(task)
        on_end(task.index, runs[task.index])

    remaining = []
    for task in tasks:
        if is_done(task):
            end(task)
        else:
            _clear(task.directory)
            remaining.append(task)
    simulated = [task for task in remaining if task.case.engine == "simulated"]
    for index in _simulate_all(simulated, min(processes, len(simulated)), on_progress):
        end(tasks[index])
    for task in remaining:
        if task.case.engine == "live":
            train_experiment(task.experiment, task.directory)
            end(task)
    return [runs[index] for index in sorted(runs)]


def load_run(task: RunTask) -> StudyRun:
    """The run of a task that has ended, with its summary, which is stored beside thinned records."""
    records = read_run(task.directory)
    stored = task.directory / METRICS
    summary = _read_metrics(stored) if stored.is_file() else summarize(records)
    return StudyRun(task.case.label, records, summary)


def _read_metrics(path: Path) -> Summary:
    try:
        summary = msgspec.json.decode(path.read_bytes(), type=Summary)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"{path} was written by another version ({shortened(error)}); run the study again, and save it again"
        ) from None
    return msgspec.structs.replace(summary, directory=str(path.parent))


def _clear(directory: Path) -> None:
    """Remove the files of an interrupted run."""
    if directory.is_dir():
        for path in (directory / HEADER, directory / RECORDS, *(path for _, path in rank_files(directory))):
            path.unlink(missing_ok=True)


# Several simulations at a time

TaskOutcome = tuple[int, OffbeatError | None]
"""The index of a task, and why it failed."""


def _simulate_all(tasks: Sequence[RunTask], processes: int, on_progress: OnProgress) -> Iterator[int]:
    """Yields the index of each task when it has ended; raises if one failed."""
    in_turn = (_simulate(task, on_progress) for task in tasks)
    for index, error in in_turn if processes <= 1 else _simulate_in_pool(tasks, processes, on_progress):
        if error is not None:
            raise error
        yield index


def _simulate_in_pool(tasks: Sequence[RunTask], processes: int, on_progress: OnProgress) -> Iterator[TaskOutcome]:
    """Processes are spawned, since torch cannot be forked safely."""
    context = multiprocessing.get_context("spawn")
    shares: Any = context.SimpleQueue()
    others = multiprocessing.active_children()
    with contextlib.ExitStack() as stack:
        pool = context.Pool(processes, _initialize_worker, (shares,))
        stack.callback(pool.join)
        stack.enter_context(pool)  # terminates the processes at the end
        workers = [child for child in multiprocessing.active_children() if child not in others]
        outcomes = pool.imap_unordered(_simulate, tasks, chunksize=1)
        for _ in tasks:
            yield _wait_for_outcome(outcomes, workers, shares, on_progress)


def _wait_for_outcome(
    outcomes: Any, workers: Sequence[BaseProcess], shares: Any, on_progress: OnProgress
) -> TaskOutcome:
    """Report progress until a task has ended; raises if a process was killed, since the pool would wait for ever."""
    while True:
        try:
            outcome: TaskOutcome = outcomes.next(POLL_SECONDS)
            return outcome
        except multiprocessing.TimeoutError:
            while not shares.empty():
                on_progress(*shares.get())
        if any(worker.exitcode is not None for worker in workers):
            raise RunFailed(
                "a process of this study was killed, for want of memory perhaps; what was finished is kept: "
                "type the same again, with --out and fewer --processes"
            )


_shares: Any = None
"""In a process of the pool: the queue for the progress of tasks."""


def _initialize_worker(shares: Any) -> None:
    global _shares
    _shares = shares
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which terminates its processes


def _simulate(task: RunTask, on_progress: OnProgress | None = None) -> TaskOutcome:
    """Simulate one task; without `on_progress`, progress goes to the queue of the pool."""
    reported = 0.0

    def on_record(experiment: Experiment, record: Record) -> None:
        nonlocal reported
        now = time.monotonic()
        if isinstance(record, Update) and now - reported >= POLL_SECONDS:
            reported = now
            share = share_done(experiment, record)
            if on_progress is None:
                _shares.put((task.index, share))
            else:
                on_progress(task.index, share)

    try:
        simulate_experiment(task.experiment, task.directory, on_record)
    except ConfigurationError as error:  # of the class that can be pickled, whatever the subclass
        return task.index, ConfigurationError(str(error))
    except OffbeatError as error:
        return task.index, RunFailed(str(error))
    except Exception:
        traceback.print_exc()
        return task.index, RunFailed(f"{task.experiment.name}, seed {task.experiment.seed}, met a mistake, shown above")
    return task.index, None


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Reading


def read_study(directory: Path) -> tuple[Study, list[StudyRun]]:
    """The study that a directory holds, and those of its runs that have ended."""
    manifest = read_manifest(directory)
    own = directory / STUDY_COPY
    study = load_study(str(own) if own.is_file() else manifest.study, manifest.scale, manifest.seeds)
    study = dataclasses.replace(study, name=manifest.study)
    if manifest.thinned is not None:
        _check_computable(study, manifest.thinned)
    tasks = [task for task in tasks_of(study, directory) if _has_ended(task.directory)]
    if not tasks:
        raise ConfigurationError(
            f"{directory} holds no run of the study {study.name}; type: offbeat reproduce {study.name}"
        )
    return study, [load_run(task) for task in tasks]


def _check_computable(study: Study, computable: Mapping[str, Sequence[str]]) -> None:
    """Refuse thinned records of a study that has changed since, and now reads some that were left out."""
    for case in study.cases:
        missing = set(drawn_from_records(study, case.label)) - set(computable.get(case.label, []))
        if case.label in computable and missing:
            raise ConfigurationError(
                f"this archive of the study {study.name} has no records for {', '.join(sorted(missing))}, which the "
                f"study did not have when it was saved; run it again: offbeat reproduce {study.name} --save FILE.zip"
            )


def _has_ended(directory: Path) -> bool:
    return (directory / HEADER).is_file() and end_of(read_run(directory)) is not None


def read_manifest(directory: Path) -> StudyManifest:
    """The manifest of a directory; raises ConfigurationError if it holds no study."""
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=StudyManifest)
    except (OSError, msgspec.MsgspecError):
        raise ConfigurationError(
            f"{directory} holds no study; name a directory or an archive that 'offbeat reproduce' has written"
        ) from None
