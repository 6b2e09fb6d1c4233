"""The runs of a study: carried out, several at a time, into a directory, and read again from there.

A run that was finished is not run again, so that a study that was broken off goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.pool import Pool
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from offbeat.core.actions import Record
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, OffbeatError, RunFailed
from offbeat.lab.experiment import Experiment, share_done
from offbeat.lab.live_runs import train_experiment
from offbeat.lab.microbatching import time_per_step
from offbeat.lab.reproduction.study import SCALES, Scale, Study, StudyCase, StudyRun, load_study
from offbeat.lab.simulated_runs import simulate_experiment
from offbeat.live.local_ranks import LIVE_SECONDS_PER_SAMPLE
from offbeat.records.files import HEADER, RECORDS, file_name, find_runs, rank_files, read_header, read_run
from offbeat.records.metrics import end_of, summarize
from offbeat.records.schema import Update

MANIFEST = "study.json"
STUDY_COPY = "study.toml"
"""A copy of the file of a study that does not ship."""
POLL_SECONDS = 0.25
"""How often a run says how far it is."""


class StudyManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which study a directory holds."""

    study: str
    scale: Scale
    seeds: tuple[int, ...] | None


@dataclass(frozen=True)
class RunTask:
    """One run, and where it goes."""

    index: int
    case: StudyCase
    experiment: Experiment
    place: Path


OnProgress = Callable[[int, float], None]
"""Is told how much of which task is done."""
OnEnd = Callable[[int, StudyRun], None]


def tasks_of(study: Study, directory: Path) -> list[RunTask]:
    """Every run and its place, no two the same."""
    tasks = [
        RunTask(index, case, experiment, directory / _place(case, experiment))
        for index, (case, experiment) in enumerate(study.experiments())
    ]
    places = Counter(task.place for task in tasks)
    twice = next((place for place, count in places.items() if count > 1), None)
    require(twice is None, f"two runs of {study.name} would share the directory {twice}; change one of their labels")
    return tasks


def _place(case: StudyCase, experiment: Experiment) -> Path:
    run = f"{file_name(experiment.name)}-seed{experiment.seed}"
    return Path(file_name(case.label).lstrip(".") or "-", run) if case.label else Path(run)


def claim_directory(study: Study, directory: Path, seeds: tuple[int, ...] | None) -> None:
    """Say in the directory which study it holds; refuse one that holds another."""
    stored = StudyManifest(study.name, study.scale, seeds)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / MANIFEST
        if path.is_file():
            other = _read_manifest(directory)
            if other != stored:
                raise ConfigurationError(
                    f"{directory} holds the study {other.study} at scale {other.scale}"
                    f"{'' if other.seeds == seeds else ' with other seeds'}; name another place with --out"
                )
        elif any(directory.rglob(HEADER)):
            raise ConfigurationError(f"{directory} holds other runs; name another place with --out")
        else:
            path.write_bytes(msgspec.json.encode(stored) + b"\n")
        if study.own is not None:
            (directory / STUDY_COPY).write_bytes(study.own.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"cannot use {directory} ({error.strerror}); name another place with --out") from None


def is_done(task: RunTask) -> bool:
    """Whether the run is there, of the same experiment, and has ended.

    A simulation that failed would fail again; a live run that failed, or was interrupted, is worth another try.
    """
    if not (task.place / HEADER).is_file():
        return False
    resolved, _ = task.experiment.resolved(LIVE_SECONDS_PER_SAMPLE if task.case.engine == "live" else None)
    header = read_header(task.place)
    plain = msgspec.json.decode(msgspec.json.encode(resolved.to_plain()))
    if header.engine != task.case.engine or header.experiment != plain:
        raise ConfigurationError(
            f"{task.place} holds a run with other settings, of an earlier version of this study perhaps; "
            "name another place with --out"
        )
    end = end_of(read_run(task.place))
    return end is not None and (end.failure is None or header.engine == "simulated")


def run_tasks(tasks: Sequence[RunTask], processes: int, on_progress: OnProgress, on_end: OnEnd) -> list[StudyRun]:
    """All runs, simulated ones `processes` at a time and then live ones one by one; in the order of the tasks."""
    found: dict[int, StudyRun] = {}

    def ended(task: RunTask) -> None:
        found[task.index] = load_run(task)
        on_end(task.index, found[task.index])

    open_tasks = []
    for task in tasks:
        if is_done(task):
            ended(task)
        else:
            _clear(task.place)
            open_tasks.append(task)
    simulated = [task for task in open_tasks if task.case.engine == "simulated"]
    for index in _simulated(simulated, min(processes, len(simulated)), on_progress):
        ended(tasks[index])
    for task in open_tasks:
        if task.case.engine == "live":
            train_experiment(task.experiment, task.place)
            ended(task)
    return [found[index] for index in sorted(found)]


def load_run(task: RunTask) -> StudyRun:
    records = read_run(task.place)
    return StudyRun(task.case.label, records, summarize(records))


def _clear(place: Path) -> None:
    """Remove what is left of a run that was broken off."""
    if place.is_dir():
        for path in (place / HEADER, place / RECORDS, *(path for _, path in rank_files(place))):
            path.unlink(missing_ok=True)


# Several at a time


def _simulated(tasks: Sequence[RunTask], processes: int, on_progress: OnProgress) -> Iterator[int]:
    """The index of each task when it has ended."""
    ended = _one_by_one(tasks, on_progress) if processes <= 1 else _side_by_side(tasks, processes, on_progress)
    for index, failure, wrong in ended:
        if failure is not None:
            raise ConfigurationError(failure) if wrong else RunFailed(failure)
        yield index


TaskOutcome = tuple[int, str | None, bool]
"""Which task it was, why it failed, and whether that is for the user to mend."""


def _one_by_one(tasks: Sequence[RunTask], on_progress: OnProgress) -> Iterator[TaskOutcome]:
    for task in tasks:
        yield _simulate(task, on_progress)


def _side_by_side(tasks: Sequence[RunTask], processes: int, on_progress: OnProgress) -> Iterator[TaskOutcome]:
    """Every process imports anew, for torch cannot be copied safely."""
    context = multiprocessing.get_context("spawn")
    shares: Any = context.SimpleQueue()
    others = multiprocessing.active_children()
    with _pool(context.Pool(processes, _be_quiet, (shares,))) as pool:
        workers = [child for child in multiprocessing.active_children() if child not in others]
        results = pool.imap_unordered(_simulate, tasks, chunksize=1)
        left = len(tasks)
        while left:
            try:
                outcome: TaskOutcome = results.next(POLL_SECONDS)
            except multiprocessing.TimeoutError:
                while not shares.empty():
                    on_progress(*shares.get())
                _check_alive(workers)
                continue
            left -= 1
            yield outcome


def _check_alive(workers: Sequence[BaseProcess]) -> None:
    """A pool replaces a process that was killed, but the run that it was at would be waited for in vain."""
    if any(worker.exitcode is not None for worker in workers):
        raise RunFailed(
            "a process of this study was killed, for want of memory perhaps; what was finished is kept: "
            "type the same again, with --out and fewer --processes"
        )


@contextmanager
def _pool(pool: Pool) -> Iterator[Pool]:
    try:
        yield pool
    finally:
        pool.terminate()
        pool.join()


_tell: OnProgress = lambda index, share: None  # noqa: E731


def _be_quiet(shares: Any) -> None:
    """Whoever types Ctrl-C means the command, which ends its processes."""
    global _tell
    _tell = lambda index, share: shares.put((index, share))  # noqa: E731
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _simulate(task: RunTask, tell: OnProgress | None = None) -> TaskOutcome:
    """Run one; in a process of the pool, which tells its share through a queue."""
    said = 0.0

    def on_record(experiment: Experiment, record: Record) -> None:
        nonlocal said
        now = time.monotonic()
        if isinstance(record, Update) and now - said >= POLL_SECONDS:
            said = now
            (tell or _tell)(task.index, share_done(experiment, record))

    try:
        simulate_experiment(task.experiment, task.place, on_record)
    except OffbeatError as error:
        return task.index, str(error), isinstance(error, ConfigurationError)
    except Exception:  # it would come as an object that the other process may not be able to make again
        traceback.print_exc()
        return task.index, f"{task.experiment.name}, seed {task.experiment.seed}, met a mistake, shown above", False
    return task.index, None, False


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Read again


def read_study(directory: Path) -> tuple[Study, list[StudyRun]]:
    """The study that a directory holds, and its runs; those that are missing are left out."""
    stored = _read_manifest(directory)
    own = directory / STUDY_COPY
    study = load_study(str(own) if own.is_file() else stored.study, stored.scale, stored.seeds)
    study = dataclasses.replace(study, name=stored.study)
    tasks = [task for task in tasks_of(study, directory) if _has_ended(task.place)]
    if not tasks:
        raise ConfigurationError(
            f"{directory} holds no run of the study {study.name}; type: offbeat reproduce {study.name}"
        )
    return study, [load_run(task) for task in tasks]


def _has_ended(place: Path) -> bool:
    return (place / HEADER).is_file() and end_of(read_run(place)) is not None


def _read_manifest(directory: Path) -> StudyManifest:
    try:
        stored = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=StudyManifest)
    except (OSError, msgspec.MsgspecError):
        raise ConfigurationError(
            f"{directory} holds no study; name a directory or an archive that 'offbeat reproduce' has written"
        ) from None
    assert stored.scale in SCALES
    return stored


# Archives


def archive(directory: Path, path: Path) -> Path:
    """Everything that figures are drawn from in one file, the same bytes for the same records."""
    files = [directory / MANIFEST, directory / STUDY_COPY, directory / TIMINGS]
    for run in find_runs([directory]):
        files += [run / HEADER, run / RECORDS, *(path for _, path in rank_files(run))]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as held:
            for file in files:
                if file.is_file():
                    entry = zipfile.ZipInfo(file.relative_to(directory).as_posix())
                    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                    held.writestr(entry, file.read_bytes())
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {path} ({error.strerror}); the records are in {directory}, to be saved elsewhere"
        ) from None
    return path


@contextmanager
def open_results(place: Path) -> Iterator[Path]:
    """A directory with what a directory or an archive holds."""
    if place.suffix != ".zip":
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="offbeat-") as directory:
        try:
            with zipfile.ZipFile(place) as held:
                held.extractall(directory)  # zipfile makes names harmless that lead elsewhere
        except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:  # the last one: encrypted
            raise ConfigurationError(f"{place} cannot be read ({error}); name another archive") from None
        yield Path(directory)


# Time per step against the number of parts of a batch: measured here and now, and kept beside the records.


TIMINGS = "timings.json"


class BatchTiming(msgspec.Struct, frozen=True):
    """The gradient of a batch, cut into so many parts: how long it took, once for each repeat."""

    batch: int
    parts: int
    seconds: tuple[float, ...]


def measure(study: Study, on_batch: Callable[[str], None]) -> list[BatchTiming]:
    """What the study wants timed; `on_batch` is told what comes next."""
    timing = study.description.timing
    if timing is None:
        return []
    workload = study.cases[0].plan.workload
    rows = []
    for batch in timing.batches:
        on_batch(f"timing batches of {batch}")
        parts = [count for count in timing.splits if count <= batch // 2]
        for taken in time_per_step(workload, batch, parts, timing.repeats):
            rows.append(BatchTiming(batch, taken.splits, taken.repeats))
    return rows


def write_timings(directory: Path, rows: list[BatchTiming]) -> None:
    (directory / TIMINGS).write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


def read_timings(directory: Path) -> list[BatchTiming]:
    path = directory / TIMINGS
    if not path.is_file():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[BatchTiming])
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{path} cannot be read ({error}); delete it, and time again") from None
