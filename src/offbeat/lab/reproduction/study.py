"""A study: runs that belong together, what is drawn and said of them, and what others have published.

It is read from a file of `offbeat/experiments`. Its table `base` is that of an experiment file; each `[[case]]` changes
something of it, and has a label and perhaps a number, `x`, by which cases are drawn against each other. What `each`
holds, of the study or of a case, goes to each strategy. What `[full]` says takes the place of what stands outside of it
where the original's sizes are asked for.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from offbeat.core.configuration import read_toml
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, unknown
from offbeat.lab.experiment import Experiment, Plan
from offbeat.records.metrics import Summary
from offbeat.records.schema import RunRecords

SCALES = ("default", "full")
Scale = Literal["default", "full"]
Engine = Literal["simulated", "live"]


class StudyFigure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A figure: a panel of `cells`, or else a quantity against the cases' `x`."""

    file: str
    caption: str
    cells: list[list[str]] = []
    """Names of small plots, row by row."""
    cases: list[str] = []
    """The cases that are drawn; none: all."""
    strategies: list[str] = []
    """The labels that are drawn; none: all."""
    by: Literal["strategy", "case", "both"] = "strategy"
    """What tells lines apart: the label of a strategy, of a case, or of both."""
    x: str = ""
    y: str = ""
    """The quantity, by its name in `quantities.py`."""
    log_x: bool = False
    log_y: bool = False
    published: dict[str, list[tuple[float, float]]] = {}
    """Values of others, by label."""


class RunSelection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Runs of one strategy in one case."""

    strategy: str
    case: str = ""


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One sentence: a quantity of `of`, or how often that of `over` goes into it, beside what was published."""

    quantity: str
    of: RunSelection
    over: RunSelection | None = None
    sentence: str
    """Holds {ours}, for a number with its interval."""
    published: str
    """What others have found, in words."""
    low: float | None = None
    high: float | None = None
    """The same as numbers, where it is comparable: from, to."""
    better: Literal["higher", "lower"] = "higher"


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Time per step against the number of parts that a batch is cut into, measured where the command runs."""

    batches: list[int]
    splits: list[int]
    repeats: int = 5
    published: dict[str, list[tuple[float, float]]] = {}


class StudyDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a file says of a study, besides what is run."""

    title: str
    original: str
    scaled: str
    expect: str
    minutes: float
    """About how long it takes on two cores."""
    columns: list[str]
    """Quantities of the table."""
    epoch: int | None = None
    """How many samples an epoch has."""
    figures: list[StudyFigure]
    claims: list[Claim]
    timing: Timing | None = None


@dataclass(frozen=True)
class StudyCase:
    """One plan of a study."""

    label: str
    x: float | None
    engine: Engine
    plan: Plan


@dataclass(frozen=True)
class Study:
    """Everything that `offbeat reproduce NAME` does. `own` is the file that it was read from, unless that ships."""

    name: str
    scale: Scale
    own: Path | None
    description: StudyDescription
    cases: tuple[StudyCase, ...]

    def experiments(self) -> Iterator[tuple[StudyCase, Experiment]]:
        """Seed by seed, so that a study that is broken off still compares like with like."""
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
    """A run, and its summary."""

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
    """The studies that there are, in the order in which they are shown."""
    return sorted(path.stem for path in directory().glob("*.toml") if "[base" in path.read_text(encoding="utf-8"))


def directory() -> Path:
    """Where the files of studies are."""
    return Path(str(resources.files("offbeat"))) / "lab" / "experiments"


def load_study(name: str, scale: Scale = "default", seeds: tuple[int, ...] | None = None) -> Study:
    """A study by its name, or from a file of one's own."""
    path = Path(name) if name.endswith(".toml") else directory() / f"{name}.toml"
    if path.parent == directory() and path.stem not in names():
        raise unknown("study", name, names(), "or give the path of a TOML file; see 'offbeat reproduce --list'")
    require(scale in SCALES, f"there is no scale {scale!r}; type --scale default or --scale full")
    study = study_of(path.stem, read_toml(path, "study"), scale, seeds, str(path))
    return study if path.parent == directory() else dataclasses.replace(study, own=path)


def study_of(
    name: str, given: Mapping[str, Any], scale: Scale, seeds: tuple[int, ...] | None = None, where: str = "the study"
) -> Study:
    """A study from the table of its file."""
    table: dict[str, Any] = copy.deepcopy(dict(given))
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
    """The table with what was changed; tables are merged key by key, unless one of another name takes their place."""
    for key, value in changes.items():
        old = table.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping) and value.get("name") in (None, old.get("name")):
            table[key] = _merged(old, value)
        else:
            table[key] = copy.deepcopy(value)
    return table
