"""Options of commands: helpers that describe one, the sections of help pages, and options that commands share.

Does not import torch, so that commands which do not need it start fast. Options that are derived from the fields of
configuration classes are in `flags.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Group, Parameter, Token

from offbeat.core.configuration import from_plain
from offbeat.core.validation import require
from offbeat.transports.tls import Tls

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
    parameter = Parameter(name=name, help=text, metavar=metavar, negative=(), show_default=False)
    # Not group=None: cyclopts would leave the option out of the help page.
    return parameter if section is None else Parameter.combine(parameter, Parameter(group=GROUPS[section]))


def number(metavar: str = "N", name: str | Iterable[str] | None = None, *, least: float = 0) -> Parameter:
    """Describe an option that takes a number; whole if the parameter is annotated as `int`.

    Args:
        metavar: what stands for the value on the help page.
        name: the flag or flags, where they do not follow from the name of the function's parameter.
        least: smaller numbers are refused.
    """

    def convert(kind: Any, tokens: Sequence[Token]) -> Any:
        flag = tokens[0].keyword or ""
        value = from_plain(kind, tokens[0].value, flag)
        require(value >= least, f"{flag} must be {least:g} or more, but is {value:g}")
        return value

    return Parameter(name=name, metavar=metavar, converter=convert, n_tokens=1)


BooleanFlag = Annotated[bool, Parameter(negative=())]
"""An option without a value. The text of this and the following is in the docstring of the command's function."""
Directory = Annotated[str | None, Parameter(metavar="DIR")]
File = Annotated[str | None, Parameter(metavar="FILE")]
Files = Annotated[tuple[str, ...], Parameter(metavar="FILE.py", negative=(), consume_multiple=False)]
HostPort = Annotated[str | None, Parameter(metavar="HOST:PORT")]
Label = Annotated[str | None, Parameter(metavar="LABEL")]
Name = Annotated[str | None, Parameter(metavar="NAME")]
RunDirectory = Annotated[str | None, Parameter(metavar="RUN")]

_JSON, _QUIET = "print one JSON object and nothing else", "show no progress while it runs"
JsonFlag = Annotated[bool, option(_JSON)]
QuietFlag = Annotated[bool, option(_QUIET)]
Jobs = Annotated[
    int | None,
    number(least=1),
    Parameter(help="how many runs to simulate at a time, with the same records [one on each core]", group=GROUPS[RUN]),
]
OutputJsonFlag = Annotated[bool, option(_JSON, section=OUTPUT)]
OutputQuietFlag = Annotated[bool, option(_QUIET, section=OUTPUT)]


@dataclass(frozen=True)
class TlsFlags:
    """Options of `launch`, `work` and `network` that say how connections are encrypted."""

    tls: Annotated[str, option("encrypt connections: auto (with other machines), on, off [auto]", "MODE")] = "auto"
    certificate: Annotated[
        str | None, option("certificate of your own; needs --key and --ca [made for the run]", "FILE")
    ] = None
    key: Annotated[str | None, option("the key of --certificate", "FILE")] = None
    ca: Annotated[str | None, option("authority that has signed the certificates of all machines", "FILE")] = None

    def settings(self) -> Tls:
        return Tls(mode=self.tls, certificate=self.certificate, key=self.key, ca=self.ca)


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
    track: Annotated[
        tuple[str, ...],
        option(
            "follow each run in tensorboard, wandb or mlflow; may be repeated [the records alone]",
            "TRACKER",
            section=OUTPUT,
        ),
    ] = ()
