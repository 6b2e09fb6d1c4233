"""Experiments: workload × strategy × cluster × budget × seed, from Python or from TOML.

An `Experiment` describes one run, a `Plan` the runs of several strategies and seeds that are compared. An experiment
file holds a plan:

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
import itertools
import numbers
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import offbeat.lab.workloads
import offbeat.strategies  # noqa: F401  (registers the named strategies)
from offbeat.cluster.cluster import Cluster
from offbeat.cluster.presets import load_cluster
from offbeat.cluster.stragglers import SECONDS_PER_SAMPLE
from offbeat.core.actions import Budget, Samples, Seconds
from offbeat.core.configuration import Configuration, build, from_plain, options, read_toml, to_plain
from offbeat.core.strategy import Cadence, EveryUpdates, Strategy
from offbeat.core.validation import check_instance, check_types, require, require_bandwidth_limit
from offbeat.core.workload import NamedWorkload, Target, Workload
from offbeat.errors import ConfigurationError, unknown
from offbeat.records.schema import Update

DEFAULT_WORKERS = 10


@dataclass(frozen=True, eq=False)
class Experiment(Configuration):
    """The configuration of one run; the outcome of a simulated run follows from it."""

    workload: NamedWorkload | Workload
    """model, data, loss and evaluation"""
    strategy: Strategy
    """the algorithm"""
    cluster: Cluster = Cluster()
    """how fast machines and links are and what goes wrong"""
    workers: int | None = None
    """workers that compute; none: as many as the cluster says, or else 10"""
    until: Budget | None = None
    """how long to train, in samples or seconds; none: the default of the workload"""
    seed: int = 0
    """seed of initial parameters, data order and stragglers"""
    evaluate: Cadence | None = EveryUpdates()
    """how often to evaluate; none: only at the end"""
    target: Target | None = None
    """the metric and value whose time is measured; none: the default of the workload"""
    label: str | None = None
    """the name in records and tables; none: the name of the strategy"""
    bytes_per_second: float | None = None
    """bandwidth limit in bytes per second, for each link and direction; none: what the link can carry"""

    def __post_init__(self) -> None:
        check_instance(self.workload, (NamedWorkload, Workload), "the workload", "offbeat.workloads.Digits()")
        check_instance(self.strategy, (Strategy,), "the strategy", "offbeat.FixedMinibatch()")
        check_instance(self.cluster, (Cluster,), "the cluster", 'offbeat.Cluster() or offbeat.load_cluster("niagara")')
        check_instance(self.evaluate, (Cadence, type(None)), "evaluate", "offbeat.EveryUpdates(5)")
        check_instance(self.target, (Target, type(None)), "the target", 'offbeat.Target("accuracy", 0.9)')
        if isinstance(self.until, int | str) and not isinstance(self.until, bool):
            object.__setattr__(self, "until", Budget.shorthand(str(self.until)))
        check_instance(self.until, (Samples, Seconds, type(None)), "until", "offbeat.Samples(60_000)")
        object.__setattr__(self, "workers", self.worker_count)
        _require_whole("workers", self.workers, 1)
        _require_whole("seed", self.seed, 0)
        require_bandwidth_limit(self.bytes_per_second)

    @property
    def worker_count(self) -> int:
        """How many workers compute: `workers`, or the size of the cluster, or 10."""
        return workers_for(self.workers, self.cluster)

    @property
    def name(self) -> str:
        """The label in records, tables and figures."""
        return self.label or self.strategy.name or type(self.strategy).__name__

    def resolved(self, seconds_per_sample: float | None = None) -> tuple[Experiment, Workload]:
        """This experiment with all defaults filled in, and its workload.

        seconds_per_sample: the speed of a worker that default times of the strategy are computed from; None: the
            cluster's.
        """
        workload = build_workload(self.workload)
        speed = seconds_per_sample or self.cluster.seconds_per_sample or SECONDS_PER_SAMPLE
        resolved = dataclasses.replace(
            self,
            strategy=self.strategy.with_default_optimizer(workload.optimizer).with_default_timing(speed),
            until=workload.until if self.until is None else self.until,
            target=workload.target if self.target is None else self.target,
        )
        return resolved, workload

    def to_plain(self) -> dict[str, Any] | None:
        """As plain data; None if the workload or a part of the strategy has no name to write down."""
        if not self.strategy.name or not isinstance(self.workload, NamedWorkload):
            return None
        try:
            plain = {item.name: to_plain(getattr(self, item.name)) for item in dataclasses.fields(self)}
        except ConfigurationError:
            return None
        if self.bytes_per_second is None:
            del plain["bytes_per_second"]
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Experiment:
        """The inverse of `to_plain`; raises KeyError if a field is missing."""
        table = {"bytes_per_second": None, **plain}
        return cls(**{item.path: from_plain(item.kind, table[item.path], item.path) for item in options(cls)})


@dataclass(frozen=True, kw_only=True)
class Settings(Configuration):
    """What the runs of a plan have in common, except the workload."""

    workers: int | None = None
    """workers that compute; none: as many as the cluster says, or else 10"""
    seeds: tuple[int, ...] = (0,)
    """seeds; each gives other initial parameters, another data order and other stragglers"""
    cluster: Cluster = Cluster()
    """how fast machines and links are and what goes wrong"""
    until: Budget | None = None
    """how long to train: samples (60000) or seconds (90s); none: the default of the workload"""
    evaluate: Cadence | None = EveryUpdates()
    """how often to evaluate: updates:N, seconds:N, or none"""
    bytes_per_second: float | None = None
    """bandwidth limit in bytes per second, for each link and direction; none: what the link can carry"""
    target: Target | None = None
    """the metric whose time is measured: accuracy:0.9 or loss:0.1; none: the default of the workload"""
    baseline: str | None = None
    """the label that speed-ups are measured against; none: fmb, or else the first"""

    @property
    def worker_count(self) -> int:
        """How many workers compute: `workers`, or the size of the cluster, or 10."""
        return workers_for(self.workers, self.cluster)


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """Several strategies on one workload and cluster, each with the same seeds."""

    workload: NamedWorkload
    """model, data, loss and evaluation"""
    strategies: tuple[Strategy, ...]
    """the algorithms"""
    labels: tuple[str, ...] = ()
    """one label for each strategy; empty: their names"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", self.worker_count)
        check_types(self)
        _require_whole("workers", self.workers, 1)
        require_bandwidth_limit(self.bytes_per_second)
        require(bool(self.strategies), "there is no strategy to run; name at least one, for example fmb")
        require(bool(self.seeds), "there is no seed to run; give at least one")
        if not self.labels:
            object.__setattr__(self, "labels", unique_labels(strategy.name for strategy in self.strategies))
        require(
            len(set(self.labels)) == len(self.labels) == len(self.strategies),
            f'every strategy needs a label of its own, but they are {", ".join(self.labels)}; add label = "..."',
        )
        if self.baseline is not None and self.baseline not in self.labels:
            raise unknown("baseline", self.baseline, self.labels)

    def experiments(self) -> Iterator[Experiment]:
        """The experiments, seed by seed, so that an interrupted plan has finished the same seeds of all strategies."""
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
                    self.bytes_per_second,
                )

    @classmethod
    def from_plain(cls, table: Mapping[str, Any], where: str) -> Plan:
        """A plan from the table of an experiment file; `where` names the file in error messages."""
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
        names = (label or strategy.name for label, strategy in zip(labels, strategies, strict=True))
        settings = vars(build(Settings, table, where))
        return cls(workload=workload, strategies=tuple(strategies), labels=unique_labels(names), **settings)

    @classmethod
    def from_file(cls, path: str | Path) -> Plan:
        return cls.from_plain(read_toml(path, "experiment"), str(path))

    def to_plain(self) -> dict[str, Any]:
        """The table of an experiment file; the inverse of `from_plain`."""
        plain: dict[str, Any] = to_plain(self)
        strategies, labels = plain.pop("strategies"), plain.pop("labels")
        plain["strategy"] = [{**strategy, "label": label} for strategy, label in zip(strategies, labels, strict=True)]
        if self.evaluate is None:
            plain["evaluate"] = "none"
        return plain


def workers_for(workers: int | None, cluster: Cluster, default: int = DEFAULT_WORKERS) -> int:
    """The number of workers: `workers`, or if that is None the size of the cluster, or if it has none `default`."""
    if workers is not None:
        return workers
    size = cluster.size if isinstance(cluster, Cluster) else None
    return default if size is None else size


def _require_whole(name: str, value: Any, least: int) -> None:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    require(whole and value >= least, f"{name} must be a whole number of at least {least}, but is {value!r}")


def unique_labels(names: Iterable[str], groups: Iterable[Hashable] | None = None) -> tuple[str, ...]:
    """The names, with a number at the second and later occurrences: fmb, fmb-2, fmb-3.

    groups: one value for each name; names of different groups may be equal.
    """
    labels, counts = [], Counter[Hashable]()
    for name, group in zip(names, groups or itertools.repeat(None), strict=False):
        counts[name, group] += 1
        labels.append(name if counts[name, group] == 1 else f"{name}-{counts[name, group]}")
    return tuple(labels)


@functools.lru_cache(maxsize=8)
def _build_named(workload: NamedWorkload) -> Workload:
    return workload.build()


def build_workload(workload: NamedWorkload | Workload) -> Workload:
    """The workload itself; a named one is built, and the last eight are kept."""
    return _build_named(workload) if isinstance(workload, NamedWorkload) else workload


def share_done(experiment: Experiment, update: Update) -> float:
    """The share, from 0 to 1, of the samples or seconds of `until` that is done at this update; 0 without `until`."""
    until = experiment.until
    if isinstance(until, Samples):
        return min(1.0, update.samples_total / until.count)
    return min(1.0, update.at / until.seconds) if isinstance(until, Seconds) else 0.0
