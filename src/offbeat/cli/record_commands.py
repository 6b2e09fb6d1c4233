"""Commands on recorded runs.

`offbeat replay` repeats a simulated run and compares the records byte for byte, or repeats a randomised test of a
strategy from its seed. `offbeat report` draws the page about runs, and its figures as files.
"""

from __future__ import annotations

import itertools
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import Parameter

from offbeat.cli.class_lookup import find_strategy, strategies
from offbeat.cli.experiment_commands import read_experiment
from offbeat.cli.options import BooleanFlag, Directory, Files, Label, number
from offbeat.cli.output import EXPERIMENT, PAGE, print_comparison, print_status
from offbeat.core.validation import require
from offbeat.lab.plots.figures import write_figures
from offbeat.lab.plots.style import FORMATS
from offbeat.lab.report.labels import with_distinct_labels, without_duplicates
from offbeat.lab.report.page import write_report
from offbeat.lab.simulated_runs import record_bytes, simulate_experiment
from offbeat.records.comparison import Comparison
from offbeat.records.files import HEADER, RECORDS, file_name, find_runs, read_run
from offbeat.records.schema import RunHeader

SHOWN_MAX = 200
"""Characters of a differing line that are printed."""


def replay(
    what: Annotated[str, Parameter(name="RUN|STRATEGY")],
    /,
    *,
    seed: Annotated[int | None, number()] = None,
    trace: BooleanFlag = False,
    no_faults: BooleanFlag = False,
    allow: Files = (),
) -> int:
    """Repeat a test of a strategy if a seed is given, and a recorded run otherwise.

    Args:
        what: the directory of a run, or the name of a strategy
        seed: the seed of a test of this strategy under random faults, as a failure prints it
        trace: with --seed: print every event and action
        no_faults: with --seed: a cluster without faults
        allow: a file with a class of the run, which is run as Python; may be repeated
    """
    if seed is not None:
        return _replay_test(what, seed, trace, not no_faults)
    require(
        what not in strategies() or (Path(what) / HEADER).exists(),
        f"{what} is a strategy, and its test needs a seed; type: offbeat replay {what} --seed 0",
    )
    flag = "--trace" if trace else "--no-faults"
    require(not (trace or no_faults), f"{flag} is for a test of a strategy; add --seed N")
    return _replay_run(Path(what), allow)


def _replay_test(name: str, seed: int, trace: bool, faults: bool) -> int:
    from offbeat import testing

    find_strategy(name)
    try:
        testing.replay(name, seed, trace, faults)
    except AssertionError as error:
        print_status(" ".join(str(error).split()) or "an invariant does not hold")
        return 1
    print(f"{name} with seed {seed}: every invariant holds")
    return 0


def _replay_run(directory: Path, allowed: Iterable[str]) -> int:
    header = read_run(directory).header
    require(header.engine == "simulated", f"{directory} is a live run, which is not repeatable; name a simulated run")
    require(
        header.experiment is not None,
        f"{directory} has a workload or strategy without a name, so its header does not describe it; repeat its script",
    )
    recorded = (directory / RECORDS).read_bytes()
    repeated = record_bytes(simulate_experiment(read_experiment(header, directory, allowed)).records.records)
    if repeated == recorded:
        print(f"identical: {len(recorded.splitlines()):,} records of {header.label}, seed {header.seed}")
        return 0
    pairs = itertools.zip_longest(recorded.splitlines(), repeated.splitlines())
    line, (before, after) = next((number, pair) for number, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    print_status(f"{directory / RECORDS} differs from line {line} on{_likely_reason(header)}")
    print(f"recorded: {_shortened(before)}\nnow:      {_shortened(after)}")
    return 1


def _shortened(line: bytes | None) -> str:
    text = "(no such line)" if line is None else line.decode(errors="replace")
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def _likely_reason(header: RunHeader) -> str:
    if header.torch != torch.__version__:
        return f"; it was recorded with torch {header.torch} and this is {torch.__version__}, which may be why"
    return "; on another machine than the recording one this is expected, on the same one it is an error"


def report(
    *runs: Annotated[str, Parameter(name="RUN...")],
    out: Annotated[str | None, Parameter(metavar="PAGE")] = None,
    baseline: Label = None,
    figures: Directory = None,
    format: Annotated[
        tuple[Literal["png", "svg", "pdf"], ...], Parameter(negative="", show_choices=False, metavar="FORMAT")
    ] = (),
) -> int:
    """Draw the page and print the table.

    Args:
        runs: directories of runs, or directories that hold some
        out: the page to write [report.html beside the runs]
        baseline: the label that speed-ups refer to [fmb, or else the first]
        figures: also write each figure as files of its own, into this directory
        format: what --figures writes: png, svg or pdf, once for each that is wanted [all three]
    """
    require(bool(runs), "no run is named; type, for example: offbeat report runs/digits-001")
    require(
        figures is not None or not format, "--format is for figures; add --figures DIR, the directory to write them to"
    )
    directories = list(dict.fromkeys(run for path in runs for run in _in_planned_order(find_runs([Path(path)]))))
    runs_read = [read_run(run) for run in directories]
    records = with_distinct_labels(without_duplicates(runs_read))
    repeated = len(runs_read) - len(records)
    if repeated:
        print_status(f"{repeated} of {len(runs_read)} runs repeat another record for record, and count once")
    path = Path(out) if out else _common_parent(directories) / PAGE
    comparison = Comparison.of(records, baseline)
    places = [f"page: {write_report(records, path, baseline)}"]
    if figures is not None:
        formats = tuple(dict.fromkeys(format)) or FORMATS
        written = write_figures(records, Path(figures), formats)
        places.append(f"figures: {figures} ({len(written) // len(formats)}, each as {', '.join(formats)})")
    print_comparison(comparison, places)
    return 0


def _common_parent(runs: list[Path]) -> Path:
    """The directory that holds all runs; their paths may be absolute or relative."""
    mixed = len({run.is_absolute() for run in runs}) > 1
    return Path(os.path.commonpath([run.absolute() for run in runs] if mixed else runs))


def _in_planned_order(runs: Iterable[Path]) -> list[Path]:
    """The runs of each directory in the order of the experiment file beside them: by strategy, then by seed."""
    order = {run: (index, *_planned_index(run)) for index, run in enumerate(runs)}
    parents = {run.parent: index for run, (index, *_) in reversed(order.items())}
    return sorted(order, key=lambda run: (parents[run.parent], *order[run][1:], order[run][0]))


def _planned_index(run: Path) -> tuple[int, int]:
    """The index of the run's strategy in the experiment file, and the seed; a run that is not in it comes last."""
    name, _, seed = run.name.rpartition("-seed")
    try:
        plan = tomllib.loads((run.parent / EXPERIMENT).read_text(encoding="utf-8"))
        labels = [file_name(str(strategy.get("label") or strategy["name"])) for strategy in plan["strategy"]]
        return labels.index(name), int(seed)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return 1 << 30, 0
