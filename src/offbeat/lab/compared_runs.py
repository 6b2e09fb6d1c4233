"""`compare`: several experiments in virtual time, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from offbeat.core.validation import check_instance, require
from offbeat.engine.experiment import Experiment
from offbeat.lab.experiment_plan import Plan, unique_labels
from offbeat.lab.experiment_progress import PlanProgress, show_runs
from offbeat.lab.parallel_simulations import SimulationTask, jobs_for, run_simulations
from offbeat.records.comparison import Comparison
from offbeat.records.files import file_name
from offbeat.records.schema import RunRecords
from offbeat.tracking.named_trackers import Track, checked_trackers


def compare(
    experiments: Iterable[Experiment] | Plan,
    out: str | Path | None = None,
    *,
    jobs: int | None = None,
    progress: bool | None = None,
    track: Track = None,
) -> Comparison:
    """Simulate experiments and compare them.

    experiments: what to run; all must share workload and target
    out: a directory; each run is recorded in a directory of its own below it. None: nothing is kept
    jobs: how many to simulate at a time, in copies of this process; None: one on each core. The records are the same
    progress: whether to show progress, as a bar in a notebook or on a terminal; None: in a notebook only
    track: trackers, as for `simulate`, which follow each run as one of their own. With one that is an object and not a
        name, experiments are simulated one after the other, in this process, where the object is
    """
    if not isinstance(experiments, Plan):
        what = "compare takes a list of offbeat.Experiment objects"
        require(isinstance(experiments, Iterable) and not isinstance(experiments, str), f"{what}, not {experiments!r}")
        experiments = list(experiments)
        for experiment in experiments:
            check_instance(experiment, (Experiment,), "what is compared", "offbeat.Experiment(workload, strategy)")
    baseline = experiments.baseline if isinstance(experiments, Plan) else None
    return Comparison.of(simulate_all(experiments, out, jobs=jobs, progress=progress, track=track), baseline)


def simulate_all(
    experiments: Iterable[Experiment] | Plan,
    out: str | Path | None = None,
    *,
    jobs: int | None = None,
    progress: bool | None = False,
    track: Track = None,
) -> list[RunRecords]:
    """Simulate experiments; for the arguments see `compare`. The records are in the order of the experiments."""
    every = list(experiments.experiments()) if isinstance(experiments, Plan) else _with_unique_labels(experiments)
    names = [f"{file_name(experiment.name)}-seed{experiment.seed}" for experiment in every]
    tasks = [
        SimulationTask(experiment, None if out is None else Path(out) / name, out is not None, track)
        for experiment, name in zip(every, names, strict=True)
    ]
    checked_trackers(track)
    count = jobs_for(jobs, tasks)
    with show_runs(progress, len(tasks), count) as shown:
        return run_simulations(tasks, count, PlanProgress(shown))


def _with_unique_labels(experiments: Iterable[Experiment]) -> list[Experiment]:
    """The experiments with labels that are unique within each seed."""
    every = list(experiments)
    labels = unique_labels([one.name for one in every], [one.seed for one in every])
    return [dataclasses.replace(one, label=label) for one, label in zip(every, labels, strict=True)]
