"""Options of commands: the helper that describes one, the sections of help pages, and options that commands share.

It imports nothing heavy, so that commands which need neither torch nor the configuration classes start at once.
Options that are derived from the fields of configuration classes are in `flags.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

RUN, LIVE, OUTPUT, CLUSTER = "Run", "Processes", "Output", "Cluster"
STRATEGY, OPTIMIZER, WORKLOAD = "Strategies", "Optimizer", "Workload"

_NOTES = {
    STRATEGY: "Each goes to every named strategy that has it; NAME.FIELD=VALUE sets it for one alone.",
    OPTIMIZER: "Without --optimizer, these change the optimizer that suits the workload.",
    WORKLOAD: "In brackets: which workloads have it, and its default.",
}
GROUPS = {
    section: Group(section, help=_NOTES.get(section, ""), sort_key=order)
    for order, section in enumerate((RUN, LIVE, OUTPUT, CLUSTER, STRATEGY, OPTIMIZER, WORKLOAD))
}


def option(
    text: str, metavar: str | None = None, name: str | Iterable[str] | None = None, *, section: str | None = None
) -> Parameter:
    """Describe one option of a command.

    Args:
        text: the help text, with the default in brackets at its end.
        metavar: what stands for the value on the help page; none for an option without a value.
        name: the flag or flags, where they do not follow from the name of the function's parameter.
        section: the section of the help page, one of `GROUPS`; none for the page's general section.
    """
    group = None if section is None else GROUPS[section]
    return Parameter(name=name, help=text, metavar=metavar, group=group, negative=(), show_default=False)


_JSON, _QUIET = "print one JSON object and nothing else", "show no progress while it runs"
JsonFlag = Annotated[bool, option(_JSON)]
QuietFlag = Annotated[bool, option(_QUIET)]
OutputJsonFlag = Annotated[bool, option(_JSON, section=OUTPUT)]
OutputQuietFlag = Annotated[bool, option(_QUIET, section=OUTPUT)]


@dataclass(frozen=True)
class Output:
    """Options of `simulate`, `compare` and `train` that say where results go and how they are shown."""

    out: Annotated[
        str | None,
        option("directory for the records [runs/WORKLOAD-NNN, the next that is free]", "DIR", section=OUTPUT),
    ] = None
    overwrite: Annotated[bool, option("replace the runs that --out holds already", section=OUTPUT)] = False
    json: OutputJsonFlag = False
    no_report: Annotated[bool, option("do not draw report.html", name="--no-report", section=OUTPUT)] = False
    quiet: OutputQuietFlag = False
