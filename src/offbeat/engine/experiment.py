"""The specification of a run.

`Experiment` is made by the command line, `simulate`, `train` and `join`, and reaches engines and ranks unchanged. The
settings that the runs of a plan have in common are declared once, in `RunSettings`.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import nn

from offbeat.cluster.cluster import Cluster
from offbeat.cluster.stragglers import SECONDS_PER_SAMPLE
from offbeat.core.actions import Budget, Samples, Seconds
from offbeat.core.configuration import Configuration, from_plain, options, to_plain
from offbeat.core.splits import Shared, Split
from offbeat.core.strategy import Cadence, EveryUpdates, Strategy
from offbeat.core.validation import check_instance, require, require_bandwidth_limit
from offbeat.core.workload import NamedWorkload, Target, Workload
from offbeat.errors import ConfigurationError
from offbeat.records.schema import RunHeader, Update
from offbeat.version import __version__

DEFAULT_WORKERS = 10
WORKLOAD_EXAMPLE = "offbeat.workloads.Digits()"


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSettings(Configuration):
    """The settings that the runs of a plan have in common."""

    cluster: Cluster = Cluster()
    """how fast machines and links are and what goes wrong"""
    workers: int | None = None
    """workers that compute; none: as many as the cluster says, or else 10"""
    until: Budget | None = None
    """how long to train: samples (60000) or seconds (90s); none: the default of the workload"""
    evaluate: Cadence | None = EveryUpdates()
    """how often to evaluate: updates:N, seconds:N, or none"""
    bytes_per_second: float | None = None
    """bandwidth limit in bytes per second, for each link and direction; none: what the link can carry"""
    target: Target | None = None
    """the metric whose time is measured: accuracy:0.9 or loss:0.1; none: the default of the workload"""
    batched: Literal["auto", "on", "off"] = "auto"
    """whether a simulation computes gradients of several workers in one call: auto (where it is faster), on, off"""

    def __post_init__(self) -> None:
        check_instance(self.cluster, (Cluster,), "the cluster", 'offbeat.Cluster() or offbeat.load_cluster("niagara")')
        check_instance(self.evaluate, (Cadence, type(None)), "evaluate", "offbeat.EveryUpdates(5)")
        check_instance(self.target, (Target, type(None)), "the target", 'offbeat.Target("accuracy", 0.9)')
        if self.until is not None:
            object.__setattr__(self, "until", parse_until(self.until))
        object.__setattr__(self, "workers", self.worker_count)
        _require_whole("workers", self.workers, 1)
        require_bandwidth_limit(self.bytes_per_second)
        require(
            self.batched in ("auto", "on", "off"),
            f'batched must be "auto", "on" or "off", but is {self.batched!r}',
        )

    @property
    def worker_count(self) -> int:
        """How many workers compute: `workers`, or the size of the cluster, or 10."""
        return workers_for(self.workers, self.cluster)


@dataclass(frozen=True, eq=False)
class Experiment(RunSettings):
    """The specification of one run; the outcome of a simulated run follows from it."""

    workload: NamedWorkload | Workload | None
    """model, data, loss and evaluation; none: a training loop of the user's own"""
    strategy: Strategy
    """the algorithm"""
    _: KW_ONLY
    seed: int = 0
    """seed of initial parameters, data order and stragglers"""
    label: str | None = None
    """the name in records and tables; none: the name of the strategy"""

    def __post_init__(self) -> None:
        check_instance(self.workload, (NamedWorkload, Workload, type(None)), "the workload", WORKLOAD_EXAMPLE)
        check_instance(self.strategy, (Strategy,), "the strategy", "offbeat.FixedMinibatch()")
        super().__post_init__()
        _require_whole("seed", self.seed, 0)

    @property
    def name(self) -> str:
        """The label in records, tables and figures."""
        return self.label or self.strategy.name or type(self.strategy).__name__

    @property
    def split(self) -> Split:
        """How the examples of the workload are divided among the workers."""
        return Shared() if self.workload is None else self.workload.split

    def resolved(self, seconds_per_sample: float | None = None) -> tuple[Experiment, Workload]:
        """This experiment with all defaults filled in, and its workload; raises if it has none.

        seconds_per_sample: the speed of a worker that default times of the strategy are computed from; None: the
            cluster's.
        """
        check_instance(self.workload, (NamedWorkload, Workload), "the workload", WORKLOAD_EXAMPLE)
        assert self.workload is not None
        workload = self.build_workload()
        speed = seconds_per_sample or self.cluster.seconds_per_sample or SECONDS_PER_SAMPLE
        strategy = self.strategy.with_default_optimizer(workload.optimizer).with_default_timing(speed)
        if isinstance(workload.model, nn.Module):
            strategy = strategy.for_module(workload.model)
        resolved = dataclasses.replace(
            self,
            strategy=strategy,
            until=workload.until if self.until is None else self.until,
            target=workload.target if self.target is None else self.target,
        )
        return resolved, workload

    def build_workload(self) -> Workload:
        """The workload, built, with validation data if the strategy scores models; the experiment has one."""
        assert self.workload is not None
        workload = build_workload(self.workload)
        return workload.with_validation if self.strategy.scores_models and self.evaluate is not None else workload

    def header(self, engine: Literal["simulated", "live"], workload: str, parameters: int) -> RunHeader:
        """The description of a run of this experiment, for `run.json`.

        engine: what runs it
        workload: the label of the workload
        parameters: the number of parameters of the model
        """
        strategy = self.strategy
        return RunHeader(
            engine=engine,
            label=self.name,
            workload=workload,
            workers=sum(map(strategy.computes, range(strategy.processes(self.worker_count)))),
            seed=self.seed,
            parameters=parameters,
            target=None if self.target is None else to_plain(self.target),
            experiment=self.to_plain(),
            optimizers={name: optimizer.describe() for name, optimizer in strategy.optimizers().items()},
            offbeat=__version__,
            torch=str(torch.__version__),
        )

    def to_plain(self) -> dict[str, Any] | None:
        """As plain data; None if the workload or a part of the strategy has no name to write down."""
        if not self.strategy.name or not isinstance(self.workload, NamedWorkload):
            return None
        try:
            plain = {item.path: to_plain(getattr(self, item.path)) for item in options(type(self))}
        except ConfigurationError:
            return None
        return without_defaults(plain)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Experiment:
        """The inverse of `to_plain`; raises KeyError if a field is missing that is not None by default.

        Knows the named strategies and workloads whose modules have been imported.
        """
        optional = {item.path: None for item in options(cls) if item.default is None} | {"batched": "auto"}
        table = {**optional, **plain}
        return cls(**{item.path: from_plain(item.kind, table[item.path], item.path) for item in options(cls)})


def without_defaults(plain: dict[str, Any]) -> dict[str, Any]:
    """Settings as plain data, without those that few runs set."""
    defaults = {"bytes_per_second": None, "batched": "auto"}
    return {name: value for name, value in plain.items() if name not in defaults or value != defaults[name]}


def parse_until(until: Any) -> Budget:
    """How long to train: a budget, a number of samples, or a text such as "90s"; raises `ConfigurationError`."""
    if isinstance(until, int | str) and not isinstance(until, bool):
        until = Budget.shorthand(str(until))
    check_instance(until, (Samples, Seconds), "until", "offbeat.Samples(60_000)")
    assert isinstance(until, Budget)
    return until


def workers_for(workers: int | None, cluster: Cluster, default: int = DEFAULT_WORKERS) -> int:
    """The number of workers: `workers`, or if that is None the size of the cluster, or if it has none `default`."""
    if workers is not None:
        return workers
    size = cluster.size if isinstance(cluster, Cluster) else None
    return default if size is None else size


def _require_whole(name: str, value: Any, least: int) -> None:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    require(whole and value >= least, f"{name} must be a whole number of at least {least}, but is {value!r}")


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
