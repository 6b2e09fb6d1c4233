"""Plans: several strategies and seeds on one workload and cluster, from Python or from TOML.

A `Plan` describes the runs that are compared, each of them an `Experiment`. An experiment file holds a plan:

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
import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import offbeat.lab.workloads
import offbeat.strategies  # noqa: F401  (registers the named strategies)
from offbeat.cluster.presets import load_cluster
from offbeat.core.configuration import convert, from_plain, options, read_toml, to_plain
from offbeat.core.strategy import Strategy
from offbeat.core.validation import check_types, require
from offbeat.core.workload import NamedWorkload
from offbeat.engine.experiment import Experiment, RunSettings, without_defaults
from offbeat.errors import ConfigurationError, quoted, shortened, unknown

WHAT_RUNS = ("workload", "strategies", "labels")
"""Fields of a plan that name what is run; the others are settings of all its runs."""

SEEDS_MAX = 100_000
"""The largest number of seeds that a number can stand for."""


@dataclass(frozen=True, kw_only=True)
class Plan(RunSettings):
    """Several strategies on one workload and cluster, each with the same seeds."""

    workload: NamedWorkload
    """model, data, loss and evaluation"""
    strategies: tuple[Strategy, ...]
    """the algorithms"""
    labels: tuple[str, ...] = ()
    """one label for each strategy; empty: their names"""
    seeds: tuple[int, ...] = (0,)
    """seeds; each gives other initial parameters, another data order and other stragglers"""
    baseline: str | None = None
    """the label that speed-ups are measured against; none: fmb, or else the first"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_types(self)
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
        shared = {item.name: getattr(self, item.name) for item in dataclasses.fields(RunSettings)}
        for seed in self.seeds:
            for strategy, label in zip(self.strategies, self.labels, strict=True):
                yield Experiment(self.workload, strategy, seed=seed, label=label, **shared)

    @classmethod
    def from_plain(cls, table: Mapping[str, Any], where: str) -> Plan:
        """A plan from the table of an experiment file; `where` names the file in error messages."""
        table = dict(table)
        if "workload" not in table or "strategy" not in table:
            missing = "workload" if "workload" not in table else "strategy"
            raise ConfigurationError(f'{where} names no {missing}; add {missing} = "..."')
        workload = from_plain(NamedWorkload, table.pop("workload"), f"{where}: workload")
        labels, strategies = [], []
        for entry in strategy_entries(table.pop("strategy"), where):
            labels.append(entry.pop("label", None))
            strategies.append(from_plain(Strategy, _with_defaults(entry, workload), _place_of(entry, where)))
        if isinstance(table.get("seeds"), int) and not isinstance(table["seeds"], bool):
            table["seeds"] = first_seeds(table["seeds"], f"{where}.seeds")
        if isinstance(table.get("cluster"), str):
            table["cluster"] = to_plain(load_cluster(table["cluster"]))
        names = (label or strategy.name for label, strategy in zip(labels, strategies, strict=True))
        kinds = {item.path: item.kind for item in options(cls) if item.path not in WHAT_RUNS}
        settings = convert(kinds, table, where)
        return cls(workload=workload, strategies=tuple(strategies), labels=unique_labels(names), **settings)

    @classmethod
    def from_file(cls, path: str | Path) -> Plan:
        return cls.from_plain(read_toml(path, "experiment"), str(path))

    def to_plain(self) -> dict[str, Any]:
        """The table of an experiment file; the inverse of `from_plain`."""
        plain: dict[str, Any] = without_defaults(to_plain(self))
        strategies, labels = plain.pop("strategies"), plain.pop("labels")
        plain["strategy"] = [{**strategy, "label": label} for strategy, label in zip(strategies, labels, strict=True)]
        if self.evaluate is None:
            plain["evaluate"] = "none"
        return plain


def _place_of(entry: Mapping[str, Any], where: str) -> str:
    """The name of an entry of an experiment file in error messages."""
    name = entry.get("name")
    return f"{where}: strategy {shortened(name)}" if isinstance(name, str) else f"{where}: strategy"


def _with_defaults(entry: Mapping[str, Any], workload: NamedWorkload) -> dict[str, Any]:
    """An entry of an experiment file, with what suits the workload where the file leaves it out."""
    cls = Strategy.members.get(entry["name"]) if isinstance(entry.get("name"), str) else None
    fields = () if cls is None else {item.path for item in options(cls)}
    return {**{name: value for name, value in workload.strategy_defaults.items() if name in fields}, **entry}


def strategy_entries(entries: Any, where: str) -> list[dict[str, Any]]:
    """What an experiment file has under `strategy`, one table for each; `where` names the file in error messages.

    Raises ConfigurationError for an entry that is neither a name nor a table, and for a label that is no word.
    """
    tables = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, str | Mapping):
            raise ConfigurationError(f"{where}: a strategy is a name or a table, but {quoted(entry)} was given")
        table = {"name": entry} if isinstance(entry, str) else dict(entry)
        if not isinstance(table.get("label") or "", str):
            raise ConfigurationError(f"{where}: a label is a word, but {quoted(table['label'])} was given")
        tables.append(table)
    return tables


def first_seeds(count: int, where: str) -> tuple[int, ...]:
    """The seeds from 0 on that a number of seeds stands for; `where` names it in error messages."""
    require(
        count <= SEEDS_MAX,
        f"{where} is how many seeds to run, at most {SEEDS_MAX}, but {quoted(count)} was given; for one seed of your "
        "choice type --seed",
    )
    return tuple(range(count))


def unique_labels(names: Iterable[str], groups: Iterable[Hashable] | None = None) -> tuple[str, ...]:
    """The names, with a number at the second and later occurrences: fmb, fmb-2, fmb-3.

    groups: one value for each name; names of different groups may be equal.
    """
    labels, counts = [], Counter[Hashable]()
    for name, group in zip(names, groups or itertools.repeat(None), strict=False):
        counts[name, group] += 1
        labels.append(name if counts[name, group] == 1 else f"{name}-{counts[name, group]}")
    return tuple(labels)


def decode_experiment(plain: Mapping[str, Any] | None) -> Experiment:
    """The experiment in the header of a run; here all strategies and workloads of this library are registered.

    Raises KeyError if a field is missing.
    """
    require(plain is not None, "this run trains something that has no name, which only the process that began it knows")
    assert plain is not None
    return Experiment.from_plain(plain)
