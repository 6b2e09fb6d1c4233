"""`offbeat calibrate` writes a measured cluster for `simulate`; `offbeat microbatch` measures micro-batch sizes."""

from __future__ import annotations

import dataclasses
import os
import re
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tomli_w
from cyclopts import Parameter
from rich.table import Table

from offbeat.cli.class_lookup import workloads
from offbeat.cli.flags import Flag, derive_flags, live_flags, read_flags, with_flags
from offbeat.cli.live_view import RunWatcher
from offbeat.cli.options import LIVE, OUTPUT, RUN, WORKLOAD, OutputJsonFlag, OutputQuietFlag, option
from offbeat.cli.output import console, print_json, print_lines, print_status, refuse_unwritable, table
from offbeat.cli.plans import live_of, workload_of
from offbeat.cluster.stragglers import StragglerModel
from offbeat.core.configuration import from_plain, to_plain
from offbeat.core.validation import require
from offbeat.lab.calibration import MICROBATCH, Calibration, MeasuredWorker
from offbeat.lab.calibration import SECONDS as CALIBRATE_SECONDS
from offbeat.lab.calibration import calibrate as measure_cluster
from offbeat.lab.live_runs import DEFAULT_LIVE_WORKERS
from offbeat.lab.microbatching import BATCH, BATCH_NORM_MIN, MicrobatchCurve
from offbeat.lab.microbatching import SECONDS as MICROBATCH_SECONDS
from offbeat.lab.microbatching import microbatch as measure_microbatches
from offbeat.lab.plots.style import save
from offbeat.lab.plots.sweeps import microbatch_figure
from offbeat.lab.report.formatting import number, percent
from offbeat.launch.process_settings import hub_or_worker_name, keep_freed_memory
from offbeat.launch.rank_info import read_rank_info

FILE = "cluster.toml"
CALIBRATE_KINDS: dict[str, Any] = {"workers": int, "seconds": float, "microbatch": int, "straggle": StragglerModel}


def calibrate_flags() -> tuple[Flag, ...]:
    """The options of `calibrate`: workers and duration, processes, and the fields of the workload."""
    texts = {
        "workers": f"workers that compute [{DEFAULT_LIVE_WORKERS}]",
        "seconds": f"how long to measure; starting processes takes up to 15 seconds more [{CALIBRATE_SECONDS:g}]",
        "microbatch": f"samples per forward and backward call that you will train with [{MICROBATCH}]",
        "straggle": "what you will induce to disturb rounds; it is measured with, and not part of the file [none]",
    }
    other = ("checkpoint_seconds", "records_max_bytes", "transport")
    kept = [flag for flag in live_flags() if flag.section == LIVE and flag.path not in other]
    return (*(Flag(RUN, path, CALIBRATE_KINDS[path], text) for path, text in texts.items()), *kept, *_workload_flags())


def _workload_flags() -> tuple[Flag, ...]:
    return tuple(derive_flags(WORKLOAD, workloads()))


@with_flags(calibrate_flags())
def calibrate(
    *words: Annotated[
        str, Parameter(name="WORKLOAD", help="a workload by name or as path/to/file.py:ClassName; NAME.FIELD=VALUE")
    ],
    out: Annotated[str, option(f"the file to write [{FILE}]", "FILE", section=OUTPUT)] = FILE,
    overwrite: Annotated[bool, option("replace the file if it is there already", section=OUTPUT)] = False,
    json: OutputJsonFlag = False,
    quiet: OutputQuietFlag = False,
    flags: Any,
) -> int:
    """What the words and flags describe, measured."""
    place = read_rank_info()
    require(
        place.alone,
        f"{place.launcher} has started {place.processes} of these, but calibrate starts its processes itself; type it "
        "once, and let other machines join with --listen",
    )
    flag_values = read_flags(flags, calibrate_flags())
    workload = workload_of(words, flag_values)
    path = Path(out)
    require(path.suffix == ".toml", f"--out is a TOML file, so that simulate takes it, but {out} was given")
    require(overwrite or not path.exists(), f"{out} is there already; add --overwrite, or name another with --out")
    require(path.parent.is_dir(), f"there is no directory {path.parent}; make it first, or name another with --out")
    require(os.access(path.parent, os.W_OK), f"{path.parent} cannot be written to; name another place with --out")
    sizes = {name: from_plain(CALIBRATE_KINDS[name], text, f"--{name}") for name, text in flag_values[RUN].items()}
    live = live_of(flag_values)
    require(sizes.get("workers", 1) >= 1, f"--workers must be 1 or more, but is {sizes.get('workers')}")

    def starts(seconds: float) -> None:
        joined = "" if live.listen is None else ", once all workers have joined"
        if not quiet:
            print_status(f"measuring takes about {seconds:g} seconds{joined}")

    def begins(number: int, total: int, what: str) -> None:
        if not quiet:
            print_status(f"[{number}/{total}] {what}")

    keep_freed_memory()  # as in the processes of a live run
    calibration = measure_cluster(workload, live=live, watcher=_Watcher(), on_start=starts, on_probe=begins, **sizes)
    with refuse_unwritable(path):
        path.write_text(as_toml(calibration, out), encoding="utf-8")
    if json:
        print_json({**_calibration_to_plain(calibration), "file": out})
    else:
        _print_calibration(calibration, out)
    return 0


class _Watcher(RunWatcher):
    """Prints each sentence once, although every probe repeats it, such as the address at which workers join."""

    def __init__(self) -> None:
        super().__init__(hub_or_worker_name)
        self._printed: set[str] = set()

    def say(self, sentence: str) -> None:
        if sentence not in self._printed:
            self._printed.add(sentence)
            super().say(sentence)


def next_line(calibration: Calibration, file: str) -> str:
    """The command that simulates on the measured cluster."""
    return (
        f"offbeat simulate {calibration.workload} fmb async-fmb --cluster {file} --workers {len(calibration.workers)}"
    )


def as_toml(calibration: Calibration, file: str) -> str:
    """The cluster as TOML, below comments that describe it."""
    day = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    count = len(calibration.workers)
    head = (
        f"# {calibration.workload} on {count} worker{'' if count == 1 else 's'}, measured {day}.\n"
        "# Seconds are means; speed_trace holds what varied around them, in the order of time.\n"
        f"# To simulate on it: {next_line(calibration, file)}\n\n"
    )
    return head + _compact(tomli_w.dumps(to_plain(calibration.cluster)))


def _compact(text: str) -> str:
    """Wrap lists of numbers, which tomli_w writes with one number per line."""

    def wrapped(match: re.Match[str]) -> str:
        return (
            "[\n"
            + textwrap.fill(" ".join(match[1].split()), 116, initial_indent="    ", subsequent_indent="    ")
            + "\n]"
        )

    return re.sub(r"\[\n((?:    [-+.\de]+,\n){9,})\]", wrapped, text)


def _spread(worker: MeasuredWorker) -> dict[str, float]:
    return dict(zip(("p50", "p90", "max"), map(float, np.percentile(worker.speed_factors, [50, 90, 100])), strict=True))


def _calibration_to_plain(calibration: Calibration) -> dict[str, Any]:
    workers = [
        {
            "worker": worker.worker,
            **{f"seconds_{name}": value for name, value in dataclasses.asdict(worker.cost).items()},
            "spread": _spread(worker),
            "link": to_plain(worker.link),
        }
        for worker in calibration.workers
    ]
    update = calibration.seconds_per_update
    cluster = to_plain(calibration.cluster)
    return {"workload": calibration.workload, "workers": workers, "seconds_per_update": update, "cluster": cluster}


def _print_calibration(calibration: Calibration, file: str) -> None:
    heads = ("worker", "ms/sample", "ms/call", "ms/round", "spread p50", "p90", "max", "latency ms", "MB/s")
    console().print(table(heads, map(_cells, calibration.workers), right=heads))
    evaluation = calibration.cluster.seconds_per_evaluation
    print_lines("", f"an update takes {calibration.seconds_per_update * 1e3:.3g} ms, an evaluation {evaluation:.3g} s")
    print_lines(f"cluster: {file}", f"next:    {next_line(calibration, file)}", wrap=False)


def _cells(worker: MeasuredWorker) -> Sequence[str]:
    cost, limit = worker.cost, worker.link.bytes_per_second
    times = [cost.per_sample, cost.per_call, cost.per_round]
    return [
        str(worker.worker),
        *(f"{1e3 * value:.3g}" for value in times),
        *(f"{value:.2f}" for value in _spread(worker).values()),
        f"{1e3 * worker.link.latency_seconds:.3g}",
        "-" if limit is None else f"{limit / 1e6:,.0f}",
    ]


# offbeat microbatch


MICROBATCH_KINDS: dict[str, Any] = {"batch": int, "sizes": tuple[int, ...], "seconds": float}
PUBLISHED = (
    "published for a CNN on CIFAR-10 and batches of 256: accuracy .534 in one part, .501 in 16 parts, .302 in 64, "
    ".085 in 256"
)


def microbatch_flags() -> tuple[Flag, ...]:
    """The options of `microbatch`: sizes and duration, and the fields of the workload."""
    texts = {
        "batch": f"samples per update that you will train with [{BATCH}]",
        "sizes": "sizes of micro-batches to measure, such as 8,16,32 [the powers of two up to the batch]",
        "seconds": f"how long to measure [{MICROBATCH_SECONDS:g}]",
    }
    return (
        *(Flag(RUN, path, MICROBATCH_KINDS[path], text) for path, text in texts.items()),
        *derive_flags(WORKLOAD, workloads()),
    )


@with_flags(microbatch_flags())
def microbatch(
    *words: Annotated[
        str, Parameter(name="WORKLOAD", help="a workload by name or as path/to/file.py:ClassName; NAME.FIELD=VALUE")
    ],
    plot: Annotated[
        str | None, option("draw the curve to this file, .png, .svg or .pdf [none]", "FILE", section=OUTPUT)
    ] = None,
    json: OutputJsonFlag = False,
    flags: Any,
) -> int:
    """What the words and flags describe, measured."""
    flag_values = read_flags(flags, microbatch_flags())
    workload = workload_of(words, flag_values)
    chosen = {name: from_plain(MICROBATCH_KINDS[name], text, f"--{name}") for name, text in flag_values[RUN].items()}
    keep_freed_memory()  # as in the processes of a live run
    curve = measure_microbatches(workload, **chosen)
    place = None if plot is None else save(microbatch_figure(curve), Path(plot))
    if json:
        print_json(_curve_to_plain(curve))
        return 0
    console().print(_curve_table(curve))
    print_lines("", *sentences(curve))
    if place is not None:
        print_lines(f"written: {place}", wrap=False)
    return 0


def sentences(curve: MicrobatchCurve) -> list[str]:
    """The recommended size, its cost, and warnings."""
    size, knee, largest = curve.recommendation, curve.knee, curve.rows[-1].size
    parts = -(-curve.batch // size)
    took = f"a batch of {curve.batch} takes {_time(curve.seconds_per_step(size))} in {_parts(parts)}"
    if largest == curve.batch and size != largest:
        change = curve.seconds_per_step(size) / curve.seconds_per_step(largest) - 1.0
        took += f", {percent(abs(change))} {'more' if change >= 0 else 'less'} than in one part"
    lines = [f"Take --microbatch {size}: {took}."]
    if size == knee:
        lines.append(f"The knee is at {knee}, the smallest size whose time per sample is within 5% of the best.")
    if knee == largest and len(curve.rows) > 1:
        lines.append("Time per sample still falls at the largest size, so a larger one may be faster yet.")
    if curve.batch_norm and min(knee, size) < BATCH_NORM_MIN:
        lines.append(_about_batch_norm(knee, size))
    if curve.refused:
        lines.append("Batch norm has no statistics of a single sample, so 1 was not measured.")
    if curve.left_out:
        missing = ", ".join(map(str, curve.left_out))
        lines.append(f"There was no time for {missing}; add --seconds.")
    return lines


def _about_batch_norm(knee: int, size: int) -> str:
    below = f"batch norm suffers from micro-batches of fewer than {BATCH_NORM_MIN} samples ({PUBLISHED})"
    if size < BATCH_NORM_MIN:
        return f"Beware: the model has batch norm, and {below}; raise --batch or --sizes."
    return f"The knee is at {knee}, but the model has batch norm, and {below}."


def _time(seconds: float) -> str:
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(1e3 * seconds)} ms"


def _parts(count: int) -> str:
    return "one part" if count == 1 else f"{count} parts"


def _curve_table(curve: MicrobatchCurve) -> Table:
    title = f"{curve.workload}, {curve.parameters:,} parameters, one thread"
    heads = ["micro-batch", "ms per sample", "of the best", "spread", "repeats", f"ms per step of {curve.batch}", ""]
    rows = [
        (
            str(row.size),
            number(1e3 * row.seconds_per_sample),
            f"{row.seconds_per_sample / curve.best.seconds_per_sample:.2f}",
            percent(row.spread),
            str(row.repeats),
            number(1e3 * curve.seconds_per_step(row.size)),
            "←" if row.size == curve.recommendation else "",
        )
        for row in curve.rows
    ]
    return table(heads, rows, right=heads[:-1], title=title)


def _curve_to_plain(curve: MicrobatchCurve) -> dict[str, Any]:
    rows = [
        {
            "size": row.size,
            "seconds_per_call": row.seconds_per_call,
            "seconds_per_sample": row.seconds_per_sample,
            "spread": row.spread,
            "repeats": row.repeats,
            "seconds_per_step": curve.seconds_per_step(row.size),
        }
        for row in curve.rows
    ]
    return {
        "workload": curve.workload,
        "parameters": curve.parameters,
        "batch": curve.batch,
        "batch_norm": curve.batch_norm,
        "seconds_per_round": curve.seconds_per_round,
        "rows": rows,
        "knee": curve.knee,
        "recommendation": curve.recommendation,
        "refused": list(curve.refused),
        "left_out": list(curve.left_out),
    }
