"""The runs of a study: several at a time, into a directory, from which they can be read again.

A finished run is not repeated, so that an interrupted study continues where it stopped.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from offbeat.core.validation import require
from offbeat.engine.experiment import Experiment
from offbeat.errors import ConfigurationError, RunFailed, shortened
from offbeat.lab.live_runs import train_experiment
from offbeat.lab.parallel_simulations import ProcessKilled, SimulationTask, jobs_for, run_simulations
from offbeat.lab.reproduction.study import Scale, Study, StudyCase, StudyRun, load_study
from offbeat.lab.reproduction.study_reads import drawn_from_records
from offbeat.live.local_ranks import LIVE_SECONDS_PER_SAMPLE
from offbeat.records.files import HEADER, RECORDS, file_name, rank_files, read_header, read_run
from offbeat.records.metrics import Summary, end_of, summarize
from offbeat.records.schema import RunRecords

MANIFEST = "study.json"
METRICS = "metrics.json"
"""In an archive: the summary of a run, computed from all of its records."""
STUDY_COPY = "study.toml"
"""A copy of the file of a user's own study."""


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


OnProgress = Callable[[int, float, str], None]
"""Called with the index of a task, the share of it that is done, and what it is called."""
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
    simulations = [SimulationTask(task.experiment, task.directory) for task in simulated]
    try:
        run_simulations(simulations, jobs_for(processes, simulations), _StudyObserver(simulated, on_progress, end))
    except ProcessKilled as killed:
        raise RunFailed(
            f"{killed}; what was finished is kept: type the same again, with --out and fewer --processes"
        ) from None
    for task in remaining:
        if task.case.engine == "live":
            train_experiment(task.experiment, task.directory)
            end(task)
    return [runs[index] for index in sorted(runs)]


@dataclass(frozen=True)
class _StudyObserver:
    """Translates positions among the simulations of a study that remain to those among its tasks."""

    tasks: Sequence[RunTask]
    on_progress: OnProgress
    end: Callable[[RunTask], None]

    def share(self, index: int, share: float, label: str) -> None:
        self.on_progress(self.tasks[index].index, share, label)

    def ended(self, index: int, records: RunRecords) -> None:
        self.end(self.tasks[index])

    def say(self, sentence: str) -> None:
        """Studies have no trackers."""


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
