"""`offbeat simulate`: strategies on a workload, in virtual time."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from offbeat.cli.flags import all_flags, given, takes
from offbeat.cli.resolve import plan_of
from offbeat.cli.running import carry_out


@takes(all_flags())
def simulate(
    *words: Annotated[
        str,
        Parameter(
            name="WORKLOAD STRATEGY...",
            help="a workload and one strategy or more, by name or as path/to/file.py:ClassName; "
            "amb.seconds=6.43 sets a field of amb alone, amb-2.seconds=5 of the second amb",
        ),
    ],
    flags: Any,
    output: Any,
) -> int:
    """What the words and flags describe."""
    return carry_out(plan_of(words, given(flags, all_flags())), output)
