"""`offbeat report`: the page about runs that were recorded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from offbeat.cli.output import PAGE, print_comparison
from offbeat.comparison import Comparison
from offbeat.records.files import find_runs, read_run
from offbeat.report.page import write_report
from offbeat.validation import require


def report(
    *runs: Annotated[str, Parameter(name="RUN...", help="directories of runs, or directories that hold some")],
    out: Annotated[
        str | None, Parameter(help="the page to write [report.html beside the runs]", metavar="PAGE")
    ] = None,
    baseline: Annotated[
        str | None,
        Parameter(
            help="the label that speed-ups are measured against [fmb, or else the first]",
            metavar="LABEL",
            show_default=False,
        ),
    ] = None,
) -> int:
    """The page and the table, from records alone."""
    require(bool(runs), "no run is named; type, for example: offbeat report runs/digits-001")
    found = find_runs(Path(run) for run in runs)
    records = [read_run(run) for run in found]
    path = Path(out) if out else Path(os.path.commonpath(found)) / PAGE
    comparison = Comparison.of(records, baseline)
    print_comparison(comparison, [f"page: {write_report(records, path, baseline)}"])
    return 0
