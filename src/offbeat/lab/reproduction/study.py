"""Studies: the runs of a published experiment, their figures, and claims that compare them with published numbers.

A study is read from a TOML file of `lab/experiments`. Its table `base` is that of an experiment file. Each `[[case]]`
changes some of it; it has a label, and may have a number `x`, which figures draw cases against, and an `epoch` of its
own. The table `each`, of the study or of a case, is merged into every strategy. At scale `full`, the table `[full]` is
merged into the study.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from offbeat.core.configuration import read_toml
from offbeat.core.validation import require
from offbeat.core.workload import NamedWorkload
from offbeat.engine.experiment import Experiment
from offbeat.errors import ConfigurationError, quoted, shortened, unknown
from offbeat.lab.experiment_plan import Plan, strategy_entries
from offbeat.records.metrics import Summary
from offbeat.records.schema import RunRecords

Scale = Literal["default", "full"]
SCALES: tuple[Scale, ...] = get_args(Scale)
Engine = Literal["simulated", "live"]
SETTINGS_FILE = "published_settings.toml"
"""The settings of the originals, among the study files."""


CASE_KEYS: dict[str, Any] = {"label": "", "x": None, "engine": "simulated", "epoch": None}
"""The keys of a case that do not change the table `base`, with their defaults."""


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

    def has(self, case: str, strategy: str) -> bool:
        """Whether the runs of this strategy in this case are drawn."""
        return (not self.cases or case in self.cases) and (not self.strategies or strategy in self.strategies)

    def label(self, case: str, strategy: str) -> str:
        """The label of the line of these runs."""
        return {"strategy": strategy, "case": case, "both": f"{strategy}, {case}"}[self.by]


class RunSelection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The runs of one strategy in one case."""

    strategy: str
    case: str = ""


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Why ours differs: the quantity of a claim in runs where that is switched off."""

    text: str
    of: RunSelection
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
    """The claim in a few words, for a table."""
    published_short: str = ""
    """The published number, for a table."""
    cause: Cause | None = None
    """Why ours differs, if that is known."""
    tried: str = ""
    """What was tried to find the cause, if it is not known, or what it leaves unexplained."""

    @property
    def sides(self) -> list[RunSelection]:
        """The runs that it is about, those without the cause included."""
        sides = [self.of, self.over, *((self.cause.of, self.cause.over) if self.cause else ())]
        return [side for side in sides if side is not None]


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
    """The number of samples of an epoch, of all cases that set none; None: that of the training data of each case."""
    tuning_seeds: list[int] = []
    """The seeds that hyper-parameters were chosen on; none of them is reported."""
    tuning: str = ""
    """What was chosen on these seeds, and among which values."""
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
    epoch: int | None = None
    """The number of samples of an epoch; None: that of the study."""


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
        for seed in self.seeds:
            for case in self.cases:
                for experiment in case.plan.experiments():
                    if experiment.seed == seed:
                        yield case, experiment

    @property
    def seeds(self) -> list[int]:
        """The seeds of any case, in their order."""
        return list(dict.fromkeys(seed for case in self.cases for seed in case.plan.seeds))

    def first_seeds(self, count: int) -> tuple[int, ...]:
        """So many seeds: those of the study, and then the next numbers that nothing was tuned on."""
        own, tuned = self.seeds, set(self.description.tuning_seeds)
        more = (seed for seed in itertools.count(max(own) + 1) if seed not in tuned)
        return tuple(itertools.islice(itertools.chain(own, more), count))

    def names_read(self, case: str) -> set[str]:
        """The quantities and cells of figures that are computed from the runs of a case."""
        description = self.description
        drawn = [figure for figure in description.figures if not figure.cases or case in figure.cases]
        return {
            *description.columns,
            *(claim.quantity for claim in description.claims if any(side.case == case for side in claim.sides)),
            *(figure.y for figure in drawn if figure.y),
            *(cell for figure in drawn for row in figure.cells for cell in row if cell),
        }

    def epoch_samples(self, label: str) -> int:
        """The number of samples of an epoch of a case: as it says, or the study, or else of its training data."""
        case = self.case(label)
        return case.epoch or self.description.epoch or _training_examples(case.plan.workload)

    def case(self, label: str) -> StudyCase:
        """The case of that label; raises ConfigurationError if there is none."""
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


@functools.cache
def _training_examples(workload: NamedWorkload) -> int:
    return workload.size().train


def names() -> list[str]:
    """The names of the studies in the package, sorted."""
    files = (path for path in directory().glob("*.toml") if path.name != SETTINGS_FILE)
    return sorted(path.stem for path in files if "[base" in path.read_text(encoding="utf-8"))


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
    table = table_at(contents, scale)
    base = table.pop("base", None)
    require(isinstance(base, dict), f"{where} has no table [base]; it says what is run, as an experiment file does")
    each, changes = table.pop("each", {}), table.pop("case", [{}])
    require(isinstance(changes, list), f"{where}: a case is a table [[case]], but case is {quoted(changes)}")
    cases = tuple(_case(base, each, case, seeds, where) for case in changes)
    labels = [case.label for case in cases]
    require(len(set(labels)) == len(labels), f"{where} has two cases of one label; give each a label of its own")
    table["figures"], table["claims"] = table.pop("figure", []), table.pop("claim", [])
    try:
        description = msgspec.convert(table, StudyDescription)
    except (msgspec.ValidationError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise ConfigurationError(f"{where} cannot be read: {shortened(error)}") from None
    return Study(name, scale, None, description, cases)


def table_at(contents: Mapping[str, Any], scale: Scale) -> dict[str, Any]:
    """The table of a study file at a scale: a copy, into which the table `full` is merged at that scale."""
    table: dict[str, Any] = copy.deepcopy(dict(contents))
    full = _checked_table(table.pop("full", {}), "full")
    return _merged(table, full) if scale == "full" else table


def case_table(base: Mapping[str, Any], each: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The table of an experiment file for one case: a copy.

    base, each: the tables of these names of the study
    changes: the table of the case; empty: that of the study without any case
    """
    changes = {key: value for key, value in _checked_table(changes, "case").items() if key not in CASE_KEYS}
    common = _merged(copy.deepcopy(_checked_table(each, "each")), _checked_table(changes.pop("each", {}), "each"))
    table = _merged(copy.deepcopy(dict(base)), changes)
    if common and isinstance(table.get("strategy"), list):
        table["strategy"] = [_merged(entry, common) for entry in strategy_entries(table["strategy"], "a study")]
    return table


def _checked_table(value: Any, name: str) -> dict[str, Any]:
    """A part of a study file that must be a table; raises ConfigurationError if it is none."""
    require(isinstance(value, Mapping), f"in a study {name} is a table of keys and values, but it is {quoted(value)}")
    return dict(value)


def _case(
    base: dict[str, Any], each: dict[str, Any], changes: dict[str, Any], seeds: tuple[int, ...] | None, where: str
) -> StudyCase:
    changes = _checked_table(changes, "case")
    label, x, engine, epoch = (changes.get(key, default) for key, default in CASE_KEYS.items())
    require(epoch is None or isinstance(epoch, int), f"{where}: epoch is a number of samples, not {quoted(epoch)}")
    require(engine in ("simulated", "live"), f"{where}: engine is 'simulated' or 'live', not {quoted(engine)}")
    require(isinstance(label, str), f"{where}: the label of a case is a word, not {quoted(label)}")
    is_number = isinstance(x, int | float) and not isinstance(x, bool)
    require(x is None or is_number, f"{where}: the x of a case is a number, not {quoted(x)}")
    table = case_table(base, each, changes)
    if seeds is not None:
        table["seeds"] = list(seeds)
    plan = Plan.from_plain(table, f"{where}, case {label!r}" if label else where)
    return StudyCase(label, x, engine, plan, epoch)


def _merged(table: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into a table, in place: key by key, but a table with another `name` replaces the old one."""
    for key, value in changes.items():
        old = table.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping) and value.get("name") in (None, old.get("name")):
            table[key] = _merged(old, value)
        else:
            table[key] = copy.deepcopy(value)
    return table
