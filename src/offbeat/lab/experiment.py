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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import offbeat.lab.workloads
import offbeat.strategies  # noqa: F401  (enters the named strategies in Strategy.members)
from offbeat.cluster.cluster import Cluster
from offbeat.cluster.presets import load_cluster
from offbeat.cluster.stragglers import SECONDS_PER_SAMPLE
from offbeat.core.actions import Budget, Samples, Seconds
from offbeat.core.configuration import Configuration, build, from_plain, read_toml, to_plain
from offbeat.core.strategy import Cadence, EveryUpdates, Strategy
from offbeat.core.validation import check_instance, check_types, require, require_bandwidth_limit
from offbeat.core.workload import NamedWorkload, Target, Workload
from offbeat.errors import ConfigurationError, unknown
from offbeat.records.schema import Update

DEFAULT_WORKERS = 10


@dataclass(frozen=True, eq=False)
class Experiment(Configuration):
    """One run: everything that decides its outcome."""

    workload: NamedWorkload | Workload
    """what is trained"""
    strategy: Strategy
    """the algorithm"""
    cluster: Cluster = Cluster()
    """how fast machines and links are and what goes wrong"""
    workers: int = cast(int, None)
    """Left out: as many as the cluster says, or else 10."""
    until: Budget | None = None
    """how long to train; none: as suits the workload"""
    seed: int = 0
    """draws initial parameters, data order and stragglers"""
    evaluate: Cadence | None = EveryUpdates()
    """how often to evaluate; none: only at the end"""
    target: Target | None = None
    """what is timed; none: as suits the workload"""
    label: str | None = None
    """the name in records and tables; none: the strategy's"""
    bytes_per_second: float | None = None
    """The budget: what each direction of each link may carry."""

    def __post_init__(self) -> None:
        check_instance(self.workload, (NamedWorkload, Workload), "the workload", "offbeat.workloads.Digits()")
        check_instance(self.strategy, (Strategy,), "the strategy", "offbeat.FixedMinibatch()")
        check_instance(self.cluster, (Cluster,), "the cluster", 'offbeat.Cluster() or offbeat.load_cluster("niagara")')
        check_instance(self.evaluate, (Cadence, type(None)), "evaluate", "offbeat.EveryUpdates(5)")
        check_instance(self.target, (Target, type(None)), "the target", 'offbeat.Target("accuracy", 0.9)')
        if isinstance(self.until, int | str) and not isinstance(self.until, bool):
            object.__setattr__(self, "until", Budget.shorthand(str(self.until)))
        check_instance(self.until, (Samples, Seconds, type(None)), "until", "offbeat.Samples(60_000)")
        object.__setattr__(self, "workers", workers_for(self.workers, self.cluster))
        _require_whole("workers", self.workers, 1)
        _require_whole("seed", self.seed, 0)
        require_bandwidth_limit(self.bytes_per_second)

    @property
    def name(self) -> str:
        """What tables and figures call it."""
        return self.label or self.strategy.name or type(self.strategy).__name__

    def resolved(self, seconds_per_sample: float | None = None) -> tuple[Experiment, Workload]:
        """The same with nothing left open, and the workload it stands for.

        Times that the strategy leaves open suit workers of that speed; by default, of the cluster's.
        """
        workload = build_workload(self.workload)
        pace = self.cluster.seconds_per_sample or SECONDS_PER_SAMPLE
        filled = dataclasses.replace(
            self,
            strategy=self.strategy.with_default_optimizer(workload.optimizer).with_default_timing(
                seconds_per_sample or pace
            ),
            until=workload.until if self.until is None else self.until,
            target=workload.target if self.target is None else self.target,
        )
        return filled, workload

    def to_plain(self) -> dict[str, Any] | None:
        """As plain data; None where it holds something that has no name and cannot be written down."""
        if not self.strategy.name or not isinstance(self.workload, NamedWorkload):
            return None
        try:
            plain = {item.name: to_plain(getattr(self, item.name)) for item in dataclasses.fields(self)}
        except ConfigurationError:
            return None
        if self.bytes_per_second is None:  # as in runs that were recorded before there were budgets
            del plain["bytes_per_second"]
        return plain

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
            bytes_per_second=plain.get("bytes_per_second"),
        )


@dataclass(frozen=True, kw_only=True)
class Settings(Configuration):
    """What the runs of a plan share, besides the workload."""

    workers: int = cast(int, None)
    """workers that compute; none: as many as the cluster says, or else 10"""
    seeds: tuple[int, ...] = (0,)
    """seeds; each draws its own initial parameters, data order and stragglers"""
    cluster: Cluster = Cluster()
    """how fast machines and links are and what goes wrong"""
    until: Budget | None = None
    """how long to train: samples (60000) or seconds (90s); none: as suits the workload"""
    evaluate: Cadence | None = EveryUpdates()
    """how often to evaluate: updates:N, seconds:N, or none"""
    bytes_per_second: float | None = None
    """budget in bytes per second, for each link and direction; none: as much as the links can carry"""
    target: Target | None = None
    """what is timed: accuracy:0.9 or loss:0.1; none: as suits the workload"""
    baseline: str | None = None
    """the label that speed-ups are measured against; none: fmb, or else the first"""


@dataclass(frozen=True, kw_only=True)
class Plan(Settings):
    """Several strategies on one workload and cluster, each with the same seeds."""

    workload: NamedWorkload
    """what is trained"""
    strategies: tuple[Strategy, ...]
    """the algorithms"""
    labels: tuple[str, ...] = ()
    """a name for each strategy; none: made from their names"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", workers_for(self.workers, self.cluster))
        check_types(self)
        _require_whole("workers", self.workers, 1)
        require_bandwidth_limit(self.bytes_per_second)
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
                    self.bytes_per_second,
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


def workers_for(workers: int | None, cluster: Cluster, otherwise: int = DEFAULT_WORKERS) -> int:
    """How many workers there are: as many as was said, or else as the cluster says, or else so many."""
    size = cluster.size if isinstance(cluster, Cluster) else None
    return (otherwise if size is None else size) if workers is None else workers


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


def build_workload(workload: NamedWorkload | Workload) -> Workload:
    return _build_named(workload) if isinstance(workload, NamedWorkload) else workload


def share_done(experiment: Experiment, update: Update) -> float:
    """The share, from 0 to 1, of a run's samples or seconds that is done at this update; 0 where no end is set."""
    until = experiment.until
    if isinstance(until, Samples):
        return min(1.0, update.samples_total / until.count)
    return min(1.0, update.at / until.seconds) if isinstance(until, Seconds) else 0.0
