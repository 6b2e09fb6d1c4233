"""Studies: the runs of a published experiment, their figures, and claims that compare them with published numbers.

A study is read from a TOML file of `lab/experiments`. Its table `base` is that of an experiment file. Each `[[case]]`
changes some of it; it has a label and may have a number `x`, which figures draw cases against. The table `each`, of the
study or of a case, is merged into every strategy. At scale `full`, the table `[full]` is merged into the study.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from offbeat.core.configuration import read_toml
from offbeat.core.validation import require
from offbeat.engine.experiment import Experiment
from offbeat.errors import ConfigurationError, unknown
from offbeat.lab.experiment_plan import Plan
from offbeat.records.metrics import Summary
from offbeat.records.schema import RunRecords

Scale = Literal["default", "full"]
SCALES: tuple[Scale, ...] = get_args(Scale)
Engine = Literal["simulated", "live"]


class StudyFigure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A figure: a panel of `cells`, or the quantity `y` against the number `x` of the cases."""

    file: str
    caption: str
    cells: list[list[str]] = []
    """Names of plots, row by row."""
    cases: list[str] = []
    """The cases that are drawn; empty: all."""
    strategies: list[str] = []
    """The labels that are drawn; empty: all."""
    by: Literal["strategy", "case", "both"] = "strategy"
    """The label of a line: that of the strategy, of the case, or both."""
    x: str = ""
    """The label of the x axis."""
    y: str = ""
    """The name of the quantity in `findings.QUANTITIES`."""
    log_x: bool = False
    log_y: bool = False
    published: dict[str, list[tuple[float, float]]] = {}
    """Published values, by label."""


class RunSelection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The runs of one strategy in one case."""

    strategy: str
    case: str = ""


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cause of a result, and the same quantity in runs where that cause is switched off."""

    text: str
    of: RunSelection | None = None
    over: RunSelection | None = None


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A sentence that compares the quantity of `of`, or its ratio to that of `over`, with a published value."""

    quantity: str
    of: RunSelection
    over: RunSelection | None = None
    sentence: str
    """Contains {ours}, which is replaced by the mean and its interval."""
    published: str
    """The published value in words."""
    low: float | None = None
    high: float | None = None
    """The published value as a range, if the numbers are comparable."""
    better: Literal["higher", "lower"] = "higher"
    short: str = ""
    """The claim in a few words, for the first table of the results page."""
    published_short: str = ""
    """The published number, or "no number"."""
    cause: Cause | None = None
    tried: str = ""
    """What was tried where the cause of a difference is unknown."""


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A measurement of time per step against the number of micro-batches of a batch, on this machine."""

    batches: list[int]
    splits: list[int]
    repeats: int = 5
    published: dict[str, list[tuple[float, float]]] = {}


class StudyDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a study file says about a study, except what is run."""

    title: str
    original: str
    scaled: str
    expect: str
    minutes: float
    """Approximate duration on two cores."""
    columns: list[str]
    """Names of the quantities in the table."""
    epoch: int | None = None
    """The number of samples of an epoch."""
    figures: list[StudyFigure]
    claims: list[Claim]
    timing: Timing | None = None
    tuning_seeds: list[int] = []
    """Seeds that settings were chosen on; they are not reported."""
    tuning: str = ""
    """What was chosen on them."""


@dataclass(frozen=True)
class StudyCase:
    """One plan of a study."""

    label: str
    x: float | None
    engine: Engine
    plan: Plan


@dataclass(frozen=True)
class Study:
    """What `offbeat reproduce NAME` runs and draws."""

    name: str
    scale: Scale
    own: Path | None
    """The file of a user's own study; None for one of the package."""
    description: StudyDescription
    cases: tuple[StudyCase, ...]

    def experiments(self) -> Iterator[tuple[StudyCase, Experiment]]:
        """The experiments, seed by seed, so that an interrupted study has finished the same seeds of all cases."""
        for seed in dict.fromkeys(seed for case in self.cases for seed in case.plan.seeds):
            for case in self.cases:
                for experiment in case.plan.experiments():
                    if experiment.seed == seed:
                        yield case, experiment

    def case(self, label: str) -> StudyCase:
        for case in self.cases:
            if case.label == label:
                return case
        raise unknown("case", label, [case.label for case in self.cases])


@dataclass(frozen=True)
class StudyRun:
    """A run of a study, and its summary."""

    case: str
    records: RunRecords
    summary: Summary

    @property
    def strategy(self) -> str:
        return self.records.header.label

    @property
    def seed(self) -> int:
        return self.records.header.seed


def names() -> list[str]:
    """The names of the studies in the package, sorted."""
    return sorted(path.stem for path in directory().glob("*.toml") if "[base" in path.read_text(encoding="utf-8"))


def directory() -> Path:
    """The directory of the study files in the package."""
    return Path(str(resources.files("offbeat"))) / "lab" / "experiments"


def load_study(name: str, scale: Scale = "default", seeds: tuple[int, ...] | None = None) -> Study:
    """Load a study by name, or from a TOML file; `seeds` replaces those of the file."""
    path = Path(name) if name.endswith(".toml") else directory() / f"{name}.toml"
    if path.parent == directory() and path.stem not in names():
        raise unknown("study", name, names(), "or give the path of a TOML file; see 'offbeat reproduce --list'")
    require(scale in SCALES, f"there is no scale {scale!r}; type --scale default or --scale full")
    study = study_of(path.stem, read_toml(path, "study"), scale, seeds, str(path))
    return study if path.parent == directory() else dataclasses.replace(study, own=path)


def study_of(
    name: str, contents: Mapping[str, Any], scale: Scale, seeds: tuple[int, ...] | None = None, where: str = "the study"
) -> Study:
    """A study from the contents of its file.

    name: the name of the study
    contents: the table of the TOML file
    scale: whether the table `full` applies
    seeds: the seeds to run; None: those of the file
    where: the name of the file in error messages
    """
    table: dict[str, Any] = copy.deepcopy(dict(contents))
    full = table.pop("full", {})
    if scale == "full":
        table = _merged(table, full)
    base = table.pop("base", None)
    require(isinstance(base, dict), f"{where} has no table [base]; it says what is run, as an experiment file does")
    each = table.pop("each", {})
    cases = tuple(_case(base, each, case, seeds, where) for case in table.pop("case", [{}]))
    labels = [case.label for case in cases]
    require(len(set(labels)) == len(labels), f"{where} has two cases of one label; give each a label of its own")
    table["figures"], table["claims"] = table.pop("figure", []), table.pop("claim", [])
    try:
        description = msgspec.convert(table, StudyDescription)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{where} cannot be read: {error}") from None
    return Study(name, scale, None, description, cases)


def _case(
    base: dict[str, Any], each: dict[str, Any], changes: dict[str, Any], seeds: tuple[int, ...] | None, where: str
) -> StudyCase:
    changes = dict(changes)
    label, x, engine = changes.pop("label", ""), changes.pop("x", None), changes.pop("engine", "simulated")
    require(engine in ("simulated", "live"), f"{where}: engine is 'simulated' or 'live', not {engine!r}")
    common = _merged(copy.deepcopy(each), changes.pop("each", {}))
    table = _merged(copy.deepcopy(base), changes)
    if common and isinstance(table.get("strategy"), list):
        table["strategy"] = [_merged(dict(entry), common) for entry in table["strategy"]]
    if seeds is not None:
        table["seeds"] = list(seeds)
    plan = Plan.from_plain(table, f"{where}, case {label!r}" if label else where)
    return StudyCase(label, x, engine, plan)


def _merged(table: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into a table, in place: key by key, but a table with another `name` replaces the old one."""
    for key, value in changes.items():
        old = table.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping) and value.get("name") in (None, old.get("name")):
            table[key] = _merged(old, value)
        else:
            table[key] = copy.deepcopy(value)
    return table
