"""`offbeat report`: the page about runs that were recorded, and its figures as files."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from offbeat.cli.output import EXPERIMENT, PAGE, print_comparison, say
from offbeat.core.validation import require
from offbeat.lab.plots.style import FORMATS
from offbeat.lab.report.drawings import write_figures
from offbeat.lab.report.labels import told_apart, without_repeats
from offbeat.lab.report.page import write_report
from offbeat.records.comparison import Comparison
from offbeat.records.files import file_name, find_runs, read_run


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
    figures: Annotated[
        str | None, Parameter(help="also write each figure as files of its own, into this directory", metavar="DIR")
    ] = None,
    format: Annotated[
        tuple[Literal["png", "svg", "pdf"], ...],
        Parameter(
            help="what --figures writes: png, svg or pdf, once for each that is wanted [all three]",
            negative="",
            show_default=False,
            show_choices=False,
            metavar="FORMAT",
        ),
    ] = (),
) -> int:
    """The page and the table, from records alone."""
    require(bool(runs), "no run is named; type, for example: offbeat report runs/digits-001")
    require(figures is not None or not format, "--format is for figures; say where to put them with --figures DIR")
    found = list(dict.fromkeys(run for path in runs for run in _as_planned(find_runs([Path(path)]))))
    read = [read_run(run) for run in found]
    records = told_apart(without_repeats(read))
    if len(records) < len(read):
        say(f"{len(read) - len(records)} of {len(read)} runs repeat another record for record, and count once")
    path = Path(out) if out else _above(found) / PAGE
    comparison = Comparison.of(records, baseline)
    places = [f"page: {write_report(records, path, baseline)}"]
    if figures is not None:
        formats = tuple(dict.fromkeys(format)) or FORMATS
        written = write_figures(records, Path(figures), formats)
        places.append(f"figures: {figures} ({len(written) // len(formats)}, each as {', '.join(formats)})")
    print_comparison(comparison, places)
    return 0


def _above(runs: list[Path]) -> Path:
    """The directory that holds them all, however each of them was named."""
    mixed = len({run.is_absolute() for run in runs}) > 1
    return Path(os.path.commonpath([run.absolute() for run in runs] if mixed else runs))


def _as_planned(found: Iterable[Path]) -> list[Path]:
    """Runs that lie together in the order in which their strategies were given, which the file beside them knows."""
    order = {run: (place, *_planned(run)) for place, run in enumerate(found)}
    homes = {run.parent: place for run, (place, *_) in reversed(order.items())}
    return sorted(order, key=lambda run: (homes[run.parent], *order[run][1:], order[run][0]))


def _planned(run: Path) -> tuple[int, int]:
    """The place of the strategy among those that were planned, and the seed; what is not known comes last."""
    name, _, seed = run.name.rpartition("-seed")
    try:
        plan = tomllib.loads((run.parent / EXPERIMENT).read_text(encoding="utf-8"))
        labels = [file_name(str(strategy.get("label") or strategy["name"])) for strategy in plan["strategy"]]
        return labels.index(name), int(seed)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return 1 << 30, 0
