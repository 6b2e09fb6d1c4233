"""`offbeat replay`: the same again, byte for byte."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from cyclopts import Parameter

from offbeat.cli.class_lookup import find_strategy, load_files
from offbeat.cli.flags import strategies
from offbeat.cli.options import option
from offbeat.cli.output import EXPERIMENT, PAGE, print_comparison, print_status
from offbeat.core.configuration import from_plain
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError
from offbeat.lab.experiment import Experiment
from offbeat.lab.plots.figures import write_figures
from offbeat.lab.plots.style import FORMATS
from offbeat.lab.report.labels import with_distinct_labels, without_duplicates
from offbeat.lab.report.page import write_report
from offbeat.lab.simulated_runs import record_bytes, simulate_experiment
from offbeat.records.comparison import Comparison
from offbeat.records.files import HEADER, RECORDS, file_name, find_runs, read_run
from offbeat.records.schema import AnyRecord, RunHeader, Traffic

SHOWN_MAX = 200
"""Signs of a differing line that are printed."""


def replay(
    what: Annotated[str, Parameter(name="RUN|STRATEGY", help="the directory of a run, or the name of a strategy")],
    /,
    *,
    seed: Annotated[
        str | None, option("the seed of a test of this strategy under random faults, as a failure prints it", "N")
    ] = None,
    trace: Annotated[bool, option("with --seed: print every event and action")] = False,
    no_faults: Annotated[bool, option("with --seed: a cluster where nothing goes wrong")] = False,
) -> int:
    """Which of the two is meant shows in whether there is a seed."""
    if seed is not None:
        return _replay_test(what, from_plain(int, seed, "--seed"), trace, not no_faults)
    if what in strategies() and not (Path(what) / HEADER).exists():
        raise ConfigurationError(
            f"{what} is a strategy, and its test needs a seed; type: offbeat replay {what} --seed 0"
        )
    if trace or no_faults:
        flag = "--trace" if trace else "--no-faults"
        raise ConfigurationError(f"{flag} is for a test of a strategy; add --seed N")
    return _replay_run(Path(what))


def _replay_test(name: str, seed: int, trace: bool, faults: bool) -> int:
    from offbeat import testing

    if seed < 0:
        raise ConfigurationError(f"a seed is 0 or more, but {seed} was given")
    find_strategy(name)
    try:
        testing.replay(name, seed, trace, faults)
    except AssertionError as error:
        print_status(" ".join(str(error).split()) or "an invariant does not hold")
        return 1
    print(f"{name} with seed {seed}: every invariant holds")
    return 0


def _replay_run(directory: Path) -> int:
    header = read_run(directory).header
    experiment = _experiment(header, directory)
    recorded = (directory / RECORDS).read_bytes()
    again = record_bytes(_as_recorded(simulate_experiment(experiment).records.records, recorded))
    if again == recorded:
        print(f"identical: {len(recorded.splitlines()):,} records of {header.label}, seed {header.seed}")
        return 0
    number, before, after = _first_difference(recorded.splitlines(), again.splitlines())
    print_status(f"{directory / RECORDS} differs from line {number} on{_excuse(header)}")
    print(f"recorded: {before}\nnow:      {after}")
    return 1


def _as_recorded(records: Sequence[AnyRecord], recorded: bytes) -> list[AnyRecord]:
    """Without records of traffic where the recording has none, as those had not that are older than they."""
    counts = b'"record":"traffic"' in recorded
    return [record for record in records if counts or not isinstance(record, Traffic)]


def _experiment(header: RunHeader, directory: Path) -> Experiment:
    plain: dict[str, Any] | None = header.experiment
    if header.engine != "simulated":
        raise ConfigurationError(
            f"{directory} was run in real time, which does not repeat itself; name a simulated run"
        )
    if plain is None:
        raise ConfigurationError(f"{directory} held objects that cannot be written down, so it cannot be run again")
    strategies()
    load_files(plain, str(directory))
    try:
        return Experiment.from_plain(plain)
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"{directory / HEADER} does not hold a whole experiment ({error!r})") from None


def _first_difference(before: list[bytes], after: list[bytes]) -> tuple[int, str, str]:
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    return same + 1, _line(before, same), _line(after, same)


def _line(lines: list[bytes], index: int) -> str:
    text = lines[index].decode(errors="replace") if index < len(lines) else "(no such line)"
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def _excuse(header: RunHeader) -> str:
    if header.torch != torch.__version__:
        return f"; it was recorded with torch {header.torch} and this is {torch.__version__}, which may be why"
    return "; on another machine than the recording one that is to be expected, on the same one it is not"


# `offbeat report`: the page about runs that were recorded, and its figures as files.


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
    records = with_distinct_labels(without_duplicates(read))
    if len(records) < len(read):
        print_status(f"{len(read) - len(records)} of {len(read)} runs repeat another record for record, and count once")
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
