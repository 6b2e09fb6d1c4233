"""Flags that are derived from the fields of configuration classes.

One flag sets all fields of its name: `--batch` sets the batch of every strategy that has one. Values are text here;
`plans.py` converts them to the types of the fields, as values of TOML files are converted.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter

from offbeat.cli.class_lookup import strategies, workloads
from offbeat.cli.options import CLUSTER, GROUPS, LIVE, OPTIMIZER, RUN, STRATEGY, WORKLOAD, Output
from offbeat.cluster.cluster import Cluster, Link
from offbeat.core.configuration import Family, Option, noun, options
from offbeat.core.optimizers import Optimizer
from offbeat.lab.experiment_plan import WHAT_RUNS, Plan
from offbeat.lab.live_runs import EVALUATE_LIVE
from offbeat.live.session_options import LiveOptions

ALIASES = {"optimizer.lr": "--lr"}
METAVARS = {
    "seeds": "N",
    "baseline": "LABEL",
    "cluster": "NAME|FILE",
    "optimizer": "NAME",
    "listen": "HOST:PORT",
    "token_file": "FILE",
    "tls": "MODE",
    "certificate": "FILE",
    "key": "FILE",
    "ca": "FILE",
    "transport": "NAME",
}
SHORTCUTS = {"acid": ("momentum", "acid")}
"""Flags without a value → the field they set, and its value; `--no-` before the flag sets the field to none."""
TOML_ONLY = ("workers", "measured", "size")
"""Fields of a cluster without a flag: too long for one, set by `offbeat calibrate` only, or by --workers."""
SIMULATED_ONLY = (
    "seconds_per_sample",
    "seconds_per_call",
    "seconds_per_round",
    "seconds_per_update",
    "speed_trace",
    "crash_seen_seconds",
    "seconds_per_evaluation",
    "seconds_per_worker_update",
    "cores",
)
"""Fields of a cluster that only matter in simulation."""
SIMULATED_RUNS_ONLY = ("batched",)
"""Settings of a plan that only matter in simulation."""

FlagValues = dict[str, dict[str, Any]]
"""Flags on a command line: section → path of the field → its text, or a bool for a flag without a value."""
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Flag:
    """A flag that sets a field."""

    section: str
    """The section of the help page, one of `GROUPS`."""
    path: str
    """The field that it sets; nested fields are joined by dots."""
    kind: Any
    """The type of the field."""
    text: str
    """What the field means."""
    default: str = ""
    """The default, which the help page shows in brackets; empty where the text has it, or where there is none."""

    @property
    def name(self) -> str:
        return flag_name(self.path)

    @property
    def attribute(self) -> str:
        return f"{self.section}_{self.path.replace('.', '_')}"

    @property
    def annotation(self) -> Any:
        names = [self.name, *filter(None, [ALIASES.get(self.path)])]
        is_switch = self.kind is bool
        value = None if is_switch else METAVARS.get(self.path) or metavar(self.kind)
        group = GROUPS[self.section]
        text = f"{self.text} [{self.default}]" if self.default else self.text
        parameter = Parameter(name=names, help=text, group=group, show_default=False, metavar=value)
        return Annotated[bool | None if is_switch else str | None, parameter]


def flag_name(path: str) -> str:
    return "--" + path.replace("_", "-")


@functools.cache
def run_flags() -> tuple[Flag, ...]:
    """Flags for settings of a plan and for the cluster."""
    seeds = "how many seeds to run, from 0 on, or which: 3,4,5; each draws its own initial parameters, data order and "
    fields = [item for item in options(Plan) if item.path not in (*WHAT_RUNS, "cluster")]
    fields.sort(key=lambda item: item.path not in ("workers", "seeds"))  # the help page begins with these
    flags = [_flag_of(RUN, item) for item in fields]
    settings = [
        dataclasses.replace(flag, text=seeds + "stragglers", default="1") if flag.path == "seeds" else flag
        for flag in flags
    ]
    settings.insert(2, Flag(RUN, "seed", int, "run this seed alone"))
    base = "a named cluster, or a TOML file; the flags below change it"
    return (*settings, Flag(CLUSTER, "cluster", Cluster, base, "uniform"), *_cluster_flags())


def _cluster_flags() -> Iterator[Flag]:
    for item in options(Cluster):
        if item.path == "link":
            for inner in options(Link):
                yield _flag_of(CLUSTER, inner, "link.")
        elif item.path not in TOML_ONLY:
            yield _flag_of(CLUSTER, item)


def _flag_of(section: str, item: Option, prefix: str = "") -> Flag:
    return Flag(section, prefix + item.path, item.kind, item.text, format_default(item.default))


@functools.cache
def file_flags() -> tuple[Flag, ...]:
    """Flags of `compare`: those of `run_flags`, without their defaults: the experiment file has those."""
    return tuple(dataclasses.replace(flag, default="") for flag in run_flags())


@functools.cache
def all_flags() -> tuple[Flag, ...]:
    """Flags of `simulate`, except those of `Output`."""
    of_strategies = [flag for flag in derive_flags(STRATEGY, strategies()) if flag.path != "optimizer"]
    names = ", ".join(Optimizer.members)
    optimizer = f"how parameters are updated: {names}, or with a rate: sgd:0.1 [the workload's default]"
    shortcuts = [
        Flag(STRATEGY, name, bool, f"the same as --{path} {value}") for name, (path, value) in SHORTCUTS.items()
    ]
    return (
        *run_flags(),
        *of_strategies,
        *shortcuts,
        Flag(OPTIMIZER, "optimizer", Optimizer, optimizer),
        *derive_flags(OPTIMIZER, Optimizer.members, "optimizer."),
        *derive_flags(WORKLOAD, workloads()),
    )


@functools.cache
def live_flags() -> tuple[Flag, ...]:
    """Flags of `train`, except those of `Output`: without `SIMULATED_ONLY`, and with those for processes."""
    workers = f"the size of the cluster, or else {live_defaults()['workers']}: one per core, 4 at the most"
    replaced = {
        "workers": {"text": "workers that compute", "default": workers},
        "evaluate": {"default": format_default(EVALUATE_LIVE)},
    }
    kept = [
        dataclasses.replace(flag, **replaced.get(flag.path, {})) if flag.section == RUN else flag
        for flag in all_flags()
        if not (flag.section == CLUSTER and flag.path in SIMULATED_ONLY)
        and not (flag.section == RUN and flag.path in SIMULATED_RUNS_ONLY)
    ]
    return (*kept, *(_flag_of(LIVE, item) for item in options(LiveOptions)))


def live_defaults() -> dict[str, Any]:
    """Defaults of settings for live runs, where they differ from those for simulations."""
    return {"workers": min(4, os.cpu_count() or 1), "evaluate": EVALUATE_LIVE}


def derive_flags(section: str, classes: Mapping[str, type[Any]], prefix: str = "") -> Iterator[Flag]:
    """One flag for each field name in these classes; fields of more classes come first.

    Args:
        section: the section of the help page.
        classes: configuration classes by name.
        prefix: what the path of each flag begins with, such as `optimizer.`.
    """
    by_path: dict[str, dict[str, Option]] = {}
    for name, cls in classes.items():
        for item in options(cls):
            by_path.setdefault(item.path, {})[name] = item
    for path, owners in sorted(by_path.items(), key=lambda entry: -len(entry[1])):
        kind = next(iter(owners.values())).kind
        yield Flag(section, prefix + path, kind, describe(owners, in_all=len(owners) == len(classes)))


def describe(owners: Mapping[str, Option], in_all: bool) -> str:
    """The help text of a flag: each distinct text of the field, with the classes that have it and their defaults."""
    by_text: dict[str, dict[str, list[str]]] = {}
    for name, item in owners.items():
        by_text.setdefault(item.text, {}).setdefault(format_default(item.default), []).append(name)
    parts = []
    for text, by_default in by_text.items():
        if in_all and len(by_text) == len(by_default) == 1:
            parts.append(f"{text} [{next(iter(by_default))}]")
        else:
            listed = "; ".join(f"{', '.join(names)}: {default}" for default, names in by_default.items())
            parts.append(f"{text} [{listed}]")
    return "; ".join(parts)


def format_default(default: Any) -> str:
    """A default in the notation of the command line."""
    if default is MISSING:
        return "must be given"
    if default is None or default == ():
        return "none"
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, float):
        return f"{default:.6g}"
    if isinstance(default, Family):
        fields = [format_default(getattr(default, item.path)) for item in options(type(default))]
        return ":".join([default.name, *fields])
    if isinstance(default, tuple):
        return ",".join(map(format_default, default))
    return str(default)


def metavar(kind: Any) -> str:
    """The placeholder for a value of this type on the help page."""
    inner = [part for part in members_of(kind) if part is not type(None)]
    if inner[0] in (int, float):
        return "N" if inner[0] is int else "X"
    if typing.get_origin(inner[0]) is tuple:
        return "LIST"
    return "WORD" if inner[0] is str else noun(inner[0]).upper()


def members_of(kind: Any) -> Iterable[Any]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def with_flags(flags: Iterable[Flag]) -> Callable[[Function], Function]:
    """Decorate a command: its parameter `flags` takes these flags, and its parameter `output`, if any, an `Output`."""
    fields = [(flag.attribute, flag.annotation, dataclasses.field(default=None)) for flag in flags]
    # Without this module name, cyclopts would treat the class as one of the standard library.
    holder = dataclasses.make_dataclass("Flags", fields, namespace={"__module__": __name__})

    def decorate(function: Function) -> Function:
        function.__annotations__["flags"] = Annotated[holder, Parameter(name="*")]
        defaults: dict[str, Any] = {"flags": holder()}
        if "output" in function.__annotations__:
            function.__annotations__["output"] = Annotated[Output, Parameter(name="*")]
            defaults["output"] = Output()
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **defaults}
        return function

    return decorate


def read_flags(values: Any, flags: Iterable[Flag]) -> FlagValues:
    """The flags that are on the command line; `values` is what the parameter `flags` of a command holds."""
    result: FlagValues = {section: {} for section in GROUPS}
    for flag in flags:
        value = getattr(values, flag.attribute)
        if value is not None and flag.path in SHORTCUTS:
            path, text = SHORTCUTS[flag.path]
            result[flag.section].setdefault(path, text if value else "none")
        elif value is not None:
            result[flag.section][flag.path] = value
    return result
