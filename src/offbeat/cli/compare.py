"""`offbeat compare`: what an experiment file describes."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from offbeat.cli.flags import file_flags, given, takes
from offbeat.cli.resolve import plan_from_file
from offbeat.cli.running import carry_out


@takes(file_flags())
def compare(
    experiment: Annotated[
        str, Parameter(name="EXPERIMENT", help="a TOML file: a workload, strategies, a cluster, seeds")
    ],
    /,
    *,
    flags: Any,
    output: Any,
) -> int:
    """What the file describes, changed by what is given here."""
    return carry_out(plan_from_file(experiment, given(flags, file_flags())), output)
