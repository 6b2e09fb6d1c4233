"""Run experiments in virtual time: one, or several side by side; in memory, or into run directories."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import nn

from offbeat.cluster.cluster import Cluster
from offbeat.core.actions import Budget, Finish, Record
from offbeat.core.configuration import to_plain
from offbeat.core.strategy import Cadence, EveryUpdates, Strategy
from offbeat.core.validation import check_instance, require
from offbeat.core.workload import NamedWorkload, Workload
from offbeat.errors import RunFailed
from offbeat.lab.experiment import Experiment, Plan, workers_for
from offbeat.records.comparison import Comparison
from offbeat.records.files import HEADER, FileWriter, MemoryWriter, file_name
from offbeat.records.metrics import Summary, summarize
from offbeat.records.schema import RunHeader, RunRecords
from offbeat.simulation.gradients import GradientComputer
from offbeat.simulation.simulator import Simulation
from offbeat.simulation.state import Scenario
from offbeat.version import __version__


class Run:
    """A run that has ended: its summary, its records, and the model it trained."""

    def __init__(self, records: RunRecords, finish: Finish | None, workload: Workload, seed: int) -> None:
        self.records = records
        self.finish = finish
        """The parameters and buffers that it ended with; None where it failed."""
        self._workload = workload
        self._seed = seed

    @functools.cached_property
    def summary(self) -> Summary:
        return summarize(self.records)

    @property
    def directory(self) -> Path | None:
        return self.records.directory

    def model(self) -> nn.Module:
        """The trained model."""
        if self.finish is None:
            raise RunFailed(f"the run failed and has no result: {self.summary.failure}")
        computing = GradientComputer(self._workload, self._seed)
        computing.flat.load(self.finish.parameters, self.finish.buffers)
        return computing.flat.module

    def __repr__(self) -> str:
        summary = self.summary
        reached = summary.seconds_to_target
        timed = "target not reached" if reached is None else f"target reached after {reached:.1f} s"
        if summary.failure is not None:
            timed = f"failed: {summary.failure}"
        return f"<Run {summary.strategy} on {summary.workload}, seed {summary.seed}: {timed}>"


OnRecord = Callable[[Experiment, Record], None]


def simulate(
    workload: NamedWorkload | Workload,
    strategy: Strategy,
    cluster: Cluster | None = None,
    until: Budget | None = None,
    seed: int = 0,
    *,
    workers: int | None = None,
    evaluate: Cadence | None = EveryUpdates(),  # noqa: B008  (frozen)
    bytes_per_second: float | None = None,
    out: str | Path | None = None,
) -> Run:
    """Run one experiment in virtual time.

    What is left out is filled in from the workload: its optimizer, how long to train, what to reach; and from the
    cluster: how many workers it has, or else 10. `bytes_per_second` is what each direction of each link may carry.
    With `out`, records are written to that directory as well.
    """
    cluster = cluster or Cluster()
    workers = workers_for(workers, cluster)
    experiment = Experiment(
        workload, strategy, cluster, workers, until, seed, evaluate, bytes_per_second=bytes_per_second
    )
    return simulate_experiment(experiment, out)


def simulate_experiment(
    experiment: Experiment, out: str | Path | None = None, on_record: OnRecord | None = None
) -> Run:
    """Run one experiment in virtual time; `on_record` sees every record as it is made."""
    experiment, workload = experiment.resolved()
    assert experiment.until is not None
    scenario = Scenario(
        experiment.strategy,
        workload,
        experiment.cluster,
        experiment.workers,
        experiment.until,
        experiment.seed,
        experiment.evaluate,
        bytes_per_second=experiment.bytes_per_second,
    )
    with one_thread():
        memory = MemoryWriter()
        recorder = _Recorder(memory, experiment, on_record)
        simulation = Simulation(scenario, recorder)
        header = header_of(experiment, workload, simulation.gradient_computer.flat.layout.numel)
        directory = None if out is None else Path(out)
        if directory is not None:
            require(not (directory / HEADER).exists(), f"{directory} holds a run already; name another directory")
            with FileWriter(directory, header, flush_every=1000) as recorder.file:
                outcome = simulation.run()
        else:
            outcome = simulation.run()
    records = RunRecords(directory, header, tuple(memory.records))  # type: ignore[arg-type]
    finish = outcome.finishes[min(outcome.finishes)] if outcome.finishes and outcome.failure is None else None
    return Run(records, finish, workload, experiment.seed)


def compare(experiments: Iterable[Experiment] | Plan, out: str | Path | None = None) -> Comparison:
    """Run several experiments in virtual time and put them side by side."""
    if not isinstance(experiments, Plan):
        what = "compare takes offbeat.Experiment objects or an offbeat.Plan"
        require(isinstance(experiments, Iterable) and not isinstance(experiments, str), f"{what}, not {experiments!r}")
        experiments = list(experiments)
        for experiment in experiments:
            check_instance(experiment, (Experiment,), "what is compared", "offbeat.Experiment(workload, strategy)")
    return Comparison.of(simulate_all(experiments, out), _baseline(experiments))


def _baseline(experiments: Iterable[Experiment] | Plan) -> str | None:
    return experiments.baseline if isinstance(experiments, Plan) else None


def simulate_all(
    experiments: Iterable[Experiment] | Plan, out: str | Path | None = None, on_record: OnRecord | None = None
) -> list[RunRecords]:
    """Simulate experiments one after the other; with `out`, each into a directory of its own below it."""
    runs = []
    for experiment in experiments.experiments() if isinstance(experiments, Plan) else _with_unique_labels(experiments):
        directory = None if out is None else Path(out) / f"{file_name(experiment.name)}-seed{experiment.seed}"
        runs.append(simulate_experiment(experiment, directory, on_record).records)
    return runs


def _with_unique_labels(experiments: Iterable[Experiment]) -> Iterator[Experiment]:
    """Experiments of one name and seed get a number, so that none is taken for another."""
    seen: dict[tuple[str, int], int] = {}
    for experiment in experiments:
        key = experiment.name, experiment.seed
        seen[key] = seen.get(key, 0) + 1
        name = experiment.name if seen[key] == 1 else f"{experiment.name}-{seen[key]}"
        yield dataclasses.replace(experiment, label=name)


def header_of(
    experiment: Experiment, workload: Workload, parameters: int, engine: Literal["simulated", "live"] = "simulated"
) -> RunHeader:
    """What `run.json` says of an experiment that is resolved."""
    return RunHeader(
        engine=engine,
        label=experiment.name,
        workload=workload.label,
        workers=_computing_workers(experiment),
        seed=experiment.seed,
        parameters=parameters,
        target=None if experiment.target is None else to_plain(experiment.target),
        experiment=experiment.to_plain(),
        offbeat=__version__,
        torch=str(torch.__version__),
    )


def _computing_workers(experiment: Experiment) -> int:
    """How many workers compute: as many as were asked for, unless the strategy is for fewer."""
    strategy = experiment.strategy
    return sum(map(strategy.computes, range(strategy.processes(experiment.workers))))


class _Recorder:
    """Passes records on: to memory, to a file, to whoever looks on."""

    def __init__(self, memory: MemoryWriter, experiment: Experiment, on_record: OnRecord | None) -> None:
        self._memory = memory
        self._experiment = experiment
        self._on_record = on_record
        self.file: FileWriter | None = None

    def write(self, record: Record) -> None:
        self._memory.write(record)
        if self.file is not None:
            self.file.write(record)
        if self._on_record is not None:
            self._on_record(self._experiment, record)


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums depend on how many threads share them; one is also the fastest for models that one simulates with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def holds_runs(directory: Path) -> bool:
    """Whether there are runs at or below a directory, so that they are not overwritten unasked."""
    return directory.is_dir() and next(directory.rglob(HEADER), None) is not None


def record_bytes(records: Sequence[Record]) -> bytes:
    """Records as they stand in a file; equal runs have equal bytes."""
    encoder = msgspec.json.Encoder()
    return b"".join(encoder.encode(record) + b"\n" for record in records)
