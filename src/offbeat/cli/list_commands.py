"""`offbeat strategies`, `offbeat workloads` and `offbeat clusters`: lists of names, or one entry in full."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, replace
from typing import Annotated, Any

import tomli_w
from cyclopts import Parameter

from offbeat.cli import class_lookup, flags
from offbeat.cli.class_lookup import find_strategy, find_workload
from offbeat.cli.options import JsonFlag, option
from offbeat.cli.output import console, print_json, table
from offbeat.cluster.presets import PRESETS, SUMMARIES
from offbeat.core.configuration import options, to_plain
from offbeat.core.workload import NamedWorkload
from offbeat.errors import unknown
from offbeat.lab.workloads.images import ImageWorkload
from offbeat.lab.workloads.models import Model

Name = Annotated[str | None, Parameter(name="NAME", help="show this one in full", show_default=False)]
Counts = Annotated[bool, option("show parameters, examples and classes instead; needs no data")]


def strategies(name: Name = None, /, *, json: JsonFlag = False) -> int:
    """List the strategies, or print the fields of one with their defaults."""
    return _members("strategies", class_lookup.strategies(), name, json, find_strategy)


def workloads(name: Name = None, /, *, counts: Counts = False, json: JsonFlag = False) -> int:
    """List the workloads, or print the fields of one with their defaults."""
    if counts:
        classes = list(class_lookup.workloads().values()) if name is None else [find_workload(name)[0]]
        return _print_counts([row for cls in classes for row in _counted(cls)], json)
    return _members("workloads", class_lookup.workloads(), name, json, find_workload)


def clusters(name: Name = None, /, *, json: JsonFlag = False) -> int:
    """List the named clusters, or print one as TOML, from which to start a file of your own."""
    if name is not None and name not in PRESETS:
        raise unknown("cluster", name, PRESETS)
    if json:
        entries = {
            key: {"name": key, "summary": SUMMARIES[key], "cluster": to_plain(cluster)}
            for key, cluster in PRESETS.items()
        }
        print_json({"clusters": list(entries.values())} if name is None else entries[name])
    elif name is not None:
        print(f"# {name}: {SUMMARIES[name]}\n\n{tomli_w.dumps(to_plain(PRESETS[name]))}", end="")
    else:
        console().print(table(["cluster", "what it is"], [[key, SUMMARIES[key]] for key in PRESETS]))
    return 0


Find = Callable[[str], tuple[type[Any], str]]


def _members(plural: str, known: Mapping[str, type[Any]], name: str | None, json: bool, find: Find) -> int:
    if name is not None:
        cls, label = find(name)
        if json:
            print_json(_plain(label, cls))
        else:
            _print_one(label, cls)
    elif json:
        print_json({plural: [_plain(key, cls) for key, cls in known.items()]})
    else:
        rows = [[key, cls.summary, cls.paper] for key, cls in known.items()]
        console().print(table([plural, "what it is", "paper or source"], rows))
    return 0


def _counted(cls: type[NamedWorkload]) -> Iterator[dict[str, Any]]:
    """The sizes of a workload with its default model, then with the other models that are usual for its data."""
    workload = cls()
    yield {"workload": cls.name, **vars(workload.size())}
    if isinstance(workload, ImageWorkload):
        for model in Model.members.values():
            if model.usual == cls.name and not isinstance(workload.model, model):
                yield {"workload": cls.name, **vars(replace(workload, model=model()).size())}


def _print_counts(rows: list[dict[str, Any]], json: bool) -> int:
    if json:
        print_json({"counts": rows})
        return 0
    heads = ["workload", "model", "parameters", "training examples", "test examples", "classes"]
    cells = []
    for row in rows:
        counts = (row[key] for key in ("parameters", "train", "test", "classes"))
        cells.append([row["workload"], row["model"], *("–" if count is None else f"{count:,}" for count in counts)])
    console().print(table(heads, cells, right=heads[2:]))
    return 0


def _print_one(name: str, cls: type[Any]) -> None:
    out = console()
    for text in (f"{name}: {cls.summary}" if cls.summary else name, inspect.getdoc(cls), cls.paper):
        if text:
            out.print(f"{text}\n", markup=False)
    rows = [[item.flag, flags.format_default(item.default), item.text] for item in options(cls)]
    out.print(table(["flag", "default", "meaning"], rows))


def _plain(name: str, cls: type[Any]) -> dict[str, Any]:
    fields = [
        {
            "name": item.path,
            "flag": item.flag,
            "default": None if item.default is MISSING else to_plain(item.default),
            "meaning": item.text,
        }
        for item in options(cls)
    ]
    return {"name": name, "summary": cls.summary, "paper": cls.paper, "fields": fields}
