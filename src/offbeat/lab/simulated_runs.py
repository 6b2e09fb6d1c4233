"""`simulate`: an experiment in virtual time, with records in memory or in a run directory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import nn

from offbeat.cluster.cluster import Cluster
from offbeat.core.actions import Budget, Finish, Record
from offbeat.core.notebook_html import ShownAsHtml
from offbeat.core.strategy import Cadence, EveryUpdates, Strategy
from offbeat.core.validation import require
from offbeat.core.workload import NamedWorkload, Workload
from offbeat.engine.experiment import Experiment
from offbeat.engine.gradient_computer import GradientComputer
from offbeat.errors import RunFailed
from offbeat.lab.experiment_progress import show_experiments
from offbeat.lab.run_results import save_result
from offbeat.lab.tracked_runs import open_sink, sink_for
from offbeat.launch.process_settings import keep_freed_memory
from offbeat.records.files import HEADER, FileWriter, MemoryWriter
from offbeat.records.metrics import Summary, summarize
from offbeat.records.schema import RunHeader, RunRecords
from offbeat.simulation.simulator import Simulation
from offbeat.tracking.named_trackers import Track, checked_trackers
from offbeat.tracking.sink import TrackingSink, print_sentence
from offbeat.tracking.tracker_thread import Say


class Run(ShownAsHtml):
    """A run that has ended: its summary, its records, and the trained model."""

    def __init__(self, records: RunRecords, finish: Finish | None, workload: Workload, seed: int) -> None:
        self.records = records
        self.finish = finish
        """The final parameters and buffers; None if the run failed."""
        self._workload = workload
        self._seed = seed

    @functools.cached_property
    def summary(self) -> Summary:
        return summarize(self.records)

    @property
    def directory(self) -> Path | None:
        return self.records.directory

    def model(self) -> nn.Module:
        """The trained model; raises `RunFailed` if the run failed."""
        if self.finish is None:
            raise RunFailed(f"the run failed and has no result: {self.summary.failure}")
        computing = GradientComputer(self._workload, self._seed)
        computing.flat.load(self.finish.parameters, self.finish.buffers)
        return computing.flat.module

    def __repr__(self) -> str:
        summary = self.summary
        if summary.failure is not None:
            outcome = f"failed: {summary.failure}"
        elif summary.seconds_to_target is None:
            outcome = "target not reached"
        else:
            outcome = f"target reached after {summary.seconds_to_target:.1f} s"
        return f"<Run {summary.strategy} on {summary.workload}, seed {summary.seed}: {outcome}>"


OnRecord = Callable[[Experiment, Record], None]
"""Called with every record of a run, as it is made."""


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
    batched: Literal["auto", "on", "off"] = "auto",
    out: str | Path | None = None,
    progress: bool | None = None,
    track: Track = None,
) -> Run:
    """Run one experiment in virtual time.

    workload: model, data, loss and evaluation
    strategy: the algorithm; an optimizer that it leaves out is the workload's
    cluster: how fast machines and links are and what goes wrong; None: `Cluster()`
    until: how long to train, in samples or virtual seconds; None: the default of the workload
    seed: seed of initial parameters, data order and stragglers
    workers: workers that compute; None: as many as the cluster says, or else 10
    evaluate: how often to evaluate; None: only at the end
    bytes_per_second: bandwidth limit of each direction of each link; None: what the link can carry
    batched: whether gradients of several workers are computed in one call: "auto", where it is faster; "on"; "off"
    out: a new directory that the records and the trained parameters are written to; None: they stay in memory
    progress: whether to show progress, as a bar in a notebook or on a terminal; None: in a notebook only
    track: follow the run in "tensorboard", "wandb" or "mlflow": a name, an `offbeat.Tracker`, or a list of these
    """
    experiment = Experiment(
        workload,
        strategy,
        cluster=cluster or Cluster(),
        workers=workers,
        until=until,
        seed=seed,
        evaluate=evaluate,
        bytes_per_second=bytes_per_second,
        batched=batched,
    )
    with show_experiments(progress, 1) as shown:
        on_record = None if shown is None else shown.on_record
        run = simulate_experiment(experiment, out, on_record, keep_result=True, track=track)
        if shown is not None:
            shown.on_end(run.records)
    return run


def simulate_experiment(
    experiment: Experiment,
    out: str | Path | None = None,
    on_record: OnRecord | None = None,
    *,
    keep_result: bool = False,
    track: Track = None,
    say: Say = print_sentence,
) -> Run:
    """Run one experiment in virtual time.

    out: a new directory for the records, or None.
    on_record: called with every record.
    keep_result: write the trained parameters to that directory, too.
    track: trackers that follow the run; they do not change it.
    say: receives sentences for the user about trackers.
    """
    trackers = checked_trackers(track)
    experiment, workload = experiment.resolved()
    assert experiment.until is not None
    directory = None if out is None else Path(out)
    keep_freed_memory()
    with one_thread(), contextlib.ExitStack() as stack:
        recorder = _Recorder(experiment, on_record)
        simulation = Simulation(experiment, recorder)
        header = experiment.header("simulated", workload.label, simulation.gradient_computer.flat.layout.numel)
        header = msgspec.structs.replace(header, batched=simulation.batching.group_max > 0)
        if directory is not None:
            check_new(directory)
            recorder.file = stack.enter_context(FileWriter(directory, header, flush_every=1000))
        if trackers:
            sink = sink_for(trackers, header, experiment, workload, directory, say=say)
            recorder.sink = stack.enter_context(open_sink(sink, lambda: summarize(recorder.run_records(header))))
        outcome = simulation.run()
    records = recorder.run_records(header, directory)
    finish = outcome.finishes[min(outcome.finishes)] if outcome.finishes and outcome.failure is None else None
    if keep_result and directory is not None and finish is not None:
        save_result(directory, finish)
    return Run(records, finish, workload, experiment.seed)


def check_new(directory: Path) -> None:
    """Refuse a directory that holds a run."""
    require(not (directory / HEADER).exists(), f"{directory} holds a run already; name another directory")


class _Recorder(MemoryWriter):
    """Keeps records in memory, and passes them on to a file and a callback."""

    def __init__(self, experiment: Experiment, on_record: OnRecord | None) -> None:
        super().__init__()
        self._experiment = experiment
        self._on_record = on_record
        self.file: FileWriter | None = None
        self.sink: TrackingSink | None = None

    def write(self, record: Record) -> None:
        super().write(record)
        if self.file is not None:
            self.file.write(record)
        if self._on_record is not None:
            self._on_record(self._experiment, record)
        if self.sink is not None:
            self.sink.records((record,))

    def run_records(self, header: RunHeader, directory: Path | None = None) -> RunRecords:
        """All records so far, as those of a run."""
        return RunRecords(directory, header, tuple(self.records))  # type: ignore[arg-type]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Make torch use one thread: sums depend on the number of threads, and small models are fastest with one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def record_bytes(records: Sequence[Record]) -> bytes:
    """Records as JSON lines, as in a file of records."""
    encoder = msgspec.json.Encoder()
    return b"".join(encoder.encode(record) + b"\n" for record in records)
