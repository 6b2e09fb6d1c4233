"""What is run: workload × strategy × cluster × until × seed; to and from TOML.

An `Experiment` is one run. A `Plan` is several that differ in strategy and seed, which is what one compares, and
what an experiment file holds:

    workload = "digits"
    workers = 10
    seeds = 3
    cluster = {straggle = "niagara"}

    [[strategy]]
    name = "fmb"

    [[strategy]]
    name = "amb"
    label = "amb, fixed limit"
    seconds = 6.43
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from offbeat.actions import Budget, Finish, Record, Samples, Seconds
from offbeat.analysis import Summary, summarize
from offbeat.cluster import Cluster, load_cluster
from offbeat.comparison import Comparison
from offbeat.configuration import (
    build,
    check_instance,
    check_types,
    from_plain,
    option,
    read_toml,
    require,
    to_plain,
)
from offbeat.engines.computing import Computing
from offbeat.engines.simulated import Scenario, Simulation
from offbeat.errors import ConfigurationError, RunFailed, unknown
from offbeat.records.files import HEADER, FileWriter, MemoryWriter, RunRecords
from offbeat.records.schema import RunHeader
from offbeat.strategies.strategy import Cadence, EveryUpdates, Strategy
from offbeat.version import __version__
from offbeat.workloads import NamedWorkload, Target, Workload

DEFAULT_WORKERS = 10


@dataclass(frozen=True, eq=False)
class Experiment:
    """One run: everything that decides its outcome."""

    workload: NamedWorkload | Workload
    strategy: Strategy
    cluster: Cluster = Cluster()
    workers: int = DEFAULT_WORKERS
    until: Budget | None = None
    seed: int = 0
    evaluate: Cadence | None = EveryUpdates()
    target: Target | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        check_instance(self.workload, (NamedWorkload, Workload), "the workload", "offbeat.Digits()")
        check_instance(self.strategy, (Strategy,), "the strategy", "offbeat.FixedMinibatch()")
        check_instance(self.cluster, (Cluster,), "the cluster", 'offbeat.Cluster() or offbeat.load_cluster("niagara")')
        check_instance(self.evaluate, (Cadence, type(None)), "evaluate", "offbeat.EveryUpdates(5)")
        check_instance(self.target, (Target, type(None)), "the target", 'offbeat.Target("accuracy", 0.9)')
        if isinstance(self.until, int | str) and not isinstance(self.until, bool):
            object.__setattr__(self, "until", Budget.shorthand(str(self.until)))
        check_instance(self.until, (Samples, Seconds, type(None)), "until", "offbeat.Samples(60_000)")
        _require_whole("workers", self.workers, 1)
        _require_whole("seed", self.seed, 0)

    @property
    def name(self) -> str:
        """What tables and figures call it."""
        return self.label or self.strategy.name or type(self.strategy).__name__

    def resolved(self) -> tuple[Experiment, Workload]:
        """The same with nothing left open, and the workload it stands for."""
        workload = _built(self.workload)
        filled = dataclasses.replace(
            self,
            strategy=self.strategy.suited(workload.optimizer),
            until=workload.until if self.until is None else self.until,
            target=workload.target if self.target is None else self.target,
        )
        return filled, workload

    def to_plain(self) -> dict[str, Any] | None:
        """As plain data; None where it holds something that has no name and cannot be written down."""
        if not self.strategy.name or not isinstance(self.workload, NamedWorkload):
            return None
        try:
            return {item.name: to_plain(getattr(self, item.name)) for item in dataclasses.fields(self)}
        except ConfigurationError:
            return None

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Experiment:
        return cls(
            workload=from_plain(NamedWorkload, plain["workload"], "workload"),
            strategy=from_plain(Strategy, plain["strategy"], "strategy"),
            cluster=from_plain(Cluster, plain["cluster"], "cluster"),
            workers=plain["workers"],
            until=from_plain(Budget | None, plain["until"], "until"),
            seed=plain["seed"],
            evaluate=from_plain(Cadence | None, plain["evaluate"], "evaluate"),
            target=from_plain(Target | None, plain["target"], "target"),
            label=plain["label"],
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the runs of a plan share, besides the workload."""

    workers: int = option(DEFAULT_WORKERS, "workers that compute")
    seeds: tuple[int, ...] = option((0,), "seeds; each draws its own initial parameters, data order and stragglers")
    cluster: Cluster = option(Cluster(), "how fast machines and links are and what goes wrong")
    until: Budget | None = option(
        None, "how long to train: samples (60000) or seconds (90s); none: as suits the workload"
    )
    evaluate: Cadence | None = option(EveryUpdates(), "how often to evaluate: updates:N, seconds:N, or none")
    target: Target | None = option(None, "what is timed: accuracy:0.9 or loss:0.1; none: as suits the workload")
    baseline: str | None = option(None, "the label that speed-ups are measured against; none: fmb, or else the first")


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """Several strategies on one workload and cluster, each with the same seeds."""

    workload: NamedWorkload
    strategies: tuple[Strategy, ...]
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        _require_whole("workers", self.workers, 1)
        require(bool(self.strategies), "there is no strategy to run; name at least one, for example fmb")
        require(bool(self.seeds), "there is no seed to run; give at least one")
        if not self.labels:
            object.__setattr__(self, "labels", tuple(_labels([strategy.name for strategy in self.strategies])))
        require(
            len(set(self.labels)) == len(self.labels) == len(self.strategies),
            f'every strategy needs a label of its own, but they are {", ".join(self.labels)}; add label = "..."',
        )
        if self.baseline is not None and self.baseline not in self.labels:
            raise unknown("baseline", self.baseline, self.labels)

    def experiments(self) -> Iterator[Experiment]:
        """Seed by seed, so that a run that is broken off still compares like with like."""
        for seed in self.seeds:
            for strategy, label in zip(self.strategies, self.labels, strict=True):
                yield Experiment(
                    self.workload,
                    strategy,
                    self.cluster,
                    self.workers,
                    self.until,
                    seed,
                    self.evaluate,
                    self.target,
                    label,
                )

    @classmethod
    def from_plain(cls, table: Mapping[str, Any], where: str) -> Plan:
        """A plan from the table of an experiment file."""
        table = dict(table)
        if "workload" not in table or "strategy" not in table:
            missing = "workload" if "workload" not in table else "strategy"
            raise ConfigurationError(f'{where} names no {missing}; add {missing} = "..."')
        workload = from_plain(NamedWorkload, table.pop("workload"), f"{where}: workload")
        entries = table.pop("strategy")
        labels, strategies = [], []
        for entry in entries if isinstance(entries, list) else [entries]:
            entry = {"name": entry} if isinstance(entry, str) else dict(entry)
            labels.append(entry.pop("label", None))
            strategies.append(from_plain(Strategy, entry, f"{where}: strategy {entry.get('name', '')}".rstrip()))
        if isinstance(table.get("seeds"), int):
            table["seeds"] = list(range(table["seeds"]))
        if isinstance(table.get("cluster"), str):
            table["cluster"] = to_plain(load_cluster(table["cluster"]))
        names = [label or strategy.name for label, strategy in zip(labels, strategies, strict=True)]
        settings = vars(build(Settings, table, where))
        return cls(workload=workload, strategies=tuple(strategies), labels=tuple(_labels(names)), **settings)

    @classmethod
    def from_file(cls, path: str | Path) -> Plan:
        return cls.from_plain(read_toml(path, "experiment"), str(path))

    def to_plain(self) -> dict[str, Any]:
        """The table of an experiment file that gives this plan."""
        plain: dict[str, Any] = to_plain(self)
        strategies, labels = plain.pop("strategies"), plain.pop("labels")
        plain["strategy"] = [{**strategy, "label": label} for strategy, label in zip(strategies, labels, strict=True)]
        if self.evaluate is None:
            plain["evaluate"] = "none"
        return plain


def _require_whole(name: str, value: Any, least: int) -> None:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    require(whole and value >= least, f"{name} must be a whole number of at least {least}, but is {value!r}")


def _labels(names: Sequence[str]) -> Iterator[str]:
    """The names, told apart by a number where one occurs again."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}"


@functools.lru_cache(maxsize=8)
def _build_named(workload: NamedWorkload) -> Workload:
    return workload.build()


def _built(workload: NamedWorkload | Workload) -> Workload:
    return _build_named(workload) if isinstance(workload, NamedWorkload) else workload


class Run:
    """A run that has ended: its summary, its records, and the model it trained."""

    def __init__(self, records: RunRecords, finish: Finish | None, workload: Workload, seed: int) -> None:
        self.records = records
        self._finish = finish
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
        if self._finish is None:
            raise RunFailed(f"the run failed and has no result: {self.summary.failure}")
        computing = Computing(self._workload, self._seed)
        computing.flat.load(self._finish.parameters, self._finish.buffers)
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
    workers: int = DEFAULT_WORKERS,
    evaluate: Cadence | None = EveryUpdates(),  # noqa: B008  (frozen)
    out: str | Path | None = None,
) -> Run:
    """Run one experiment in virtual time.

    What is left out is filled in from the workload: its optimizer, how long to train, what to reach. With `out`,
    records are written to that directory as well.
    """
    experiment = Experiment(workload, strategy, cluster or Cluster(), workers, until, seed, evaluate)
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
    )
    with one_thread():
        memory = MemoryWriter()
        recorder = _Recorder(memory, experiment, on_record)
        simulation = Simulation(scenario, recorder)
        header = _header(experiment, workload, simulation.computing.flat.layout.numel)
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
    return Comparison.of(run_all(experiments, out), _baseline(experiments))


def _baseline(experiments: Iterable[Experiment] | Plan) -> str | None:
    return experiments.baseline if isinstance(experiments, Plan) else None


def run_all(
    experiments: Iterable[Experiment] | Plan, out: str | Path | None = None, on_record: OnRecord | None = None
) -> list[RunRecords]:
    """Simulate experiments one after the other; with `out`, each into a directory of its own below it."""
    runs = []
    for experiment in experiments.experiments() if isinstance(experiments, Plan) else _told_apart(experiments):
        directory = None if out is None else Path(out) / f"{_as_file_name(experiment.name)}-seed{experiment.seed}"
        runs.append(simulate_experiment(experiment, directory, on_record).records)
    return runs


def _told_apart(experiments: Iterable[Experiment]) -> Iterator[Experiment]:
    """Experiments of one name and seed get a number, so that none is taken for another."""
    seen: dict[tuple[str, int], int] = {}
    for experiment in experiments:
        key = experiment.name, experiment.seed
        seen[key] = seen.get(key, 0) + 1
        name = experiment.name if seen[key] == 1 else f"{experiment.name}-{seen[key]}"
        yield dataclasses.replace(experiment, label=name)


def _as_file_name(label: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-_.=" else "-" for sign in label)


def _header(experiment: Experiment, workload: Workload, parameters: int) -> RunHeader:
    return RunHeader(
        engine="simulated",
        label=experiment.name,
        workload=workload.label,
        workers=experiment.workers,
        seed=experiment.seed,
        parameters=parameters,
        target=None if experiment.target is None else to_plain(experiment.target),
        experiment=experiment.to_plain(),
        offbeat=__version__,
        torch=str(torch.__version__),
    )


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
