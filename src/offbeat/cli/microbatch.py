"""`offbeat microbatch`: how large micro-batches should be, for a workload on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich import box
from rich.table import Table

from offbeat.cli.flags import GROUPS, OUTPUT, RUN, WORKLOAD, Flag, derived, given, takes, workloads
from offbeat.cli.output import console, print_json
from offbeat.cli.resolve import workload_of
from offbeat.core.configuration import from_plain
from offbeat.lab.microbatching import BATCH, BATCH_NORM_MIN, SECONDS, MicrobatchCurve
from offbeat.lab.microbatching import microbatch as measure
from offbeat.lab.plots.microbatch import microbatch_figure
from offbeat.lab.plots.style import save
from offbeat.lab.report.numbers import number, percent
from offbeat.launch.process_settings import keep_memory

KINDS: dict[str, Any] = {"batch": int, "sizes": tuple[int, ...], "seconds": float}
PUBLISHED = (
    "published for a CNN on CIFAR-10 and batches of 256: accuracy .534 in one part, .501 in 16 parts, .302 in 64, "
    ".085 in 256"
)


def microbatch_flags() -> tuple[Flag, ...]:
    """What is measured and for how long, and the fields of the workload."""
    texts = {
        "batch": f"samples per update that you will train with [{BATCH}]",
        "sizes": "sizes of micro-batches to measure, such as 8,16,32 [the powers of two up to the batch]",
        "seconds": f"how long to measure [{SECONDS:g}]",
    }
    return (*(Flag(RUN, path, KINDS[path], text) for path, text in texts.items()), *derived(WORKLOAD, workloads()))


def _output(text: str, metavar: str | None = None) -> Parameter:
    return Parameter(help=text, metavar=metavar, group=GROUPS[OUTPUT], negative=(), show_default=False)


@takes(microbatch_flags())
def microbatch(
    *words: Annotated[
        str, Parameter(name="WORKLOAD", help="a workload by name or as path/to/file.py:ClassName; NAME.FIELD=VALUE")
    ],
    plot: Annotated[str | None, _output("draw the curve to this file, .png, .svg or .pdf [none]", "FILE")] = None,
    json: Annotated[bool, _output("print one JSON object and nothing else")] = False,
    flags: Any,
) -> int:
    """What the words and flags describe, measured."""
    told = given(flags, microbatch_flags())
    workload = workload_of(words, told)
    chosen = {name: from_plain(KINDS[name], text, f"--{name}") for name, text in told[RUN].items()}
    keep_memory()  # as in the processes of a live run
    curve = measure(workload, **chosen)
    place = None if plot is None else save(microbatch_figure(curve), Path(plot))
    if json:
        print_json(_plain(curve))
        return 0
    screen = console()
    screen.print(_table(curve))
    screen.print()
    for sentence in sentences(curve):
        screen.print(sentence, markup=False, soft_wrap=not screen.is_terminal)
    if place is not None:
        screen.print(f"written: {place}", markup=False, soft_wrap=True)
    return 0


def sentences(curve: MicrobatchCurve) -> list[str]:
    """What follows from the curve: a size to take, what it costs, and what to beware of."""
    size, knee, largest = curve.recommendation, curve.knee, curve.rows[-1].size
    parts = -(-curve.batch // size)
    took = f"a batch of {curve.batch} takes {_time(curve.seconds_per_step(size))} in {_parts(parts)}"
    if largest == curve.batch and size != largest:
        change = curve.seconds_per_step(size) / curve.seconds_per_step(largest) - 1.0
        took += f", {percent(abs(change))} {'more' if change >= 0 else 'less'} than in one part"
    said = [f"Take --microbatch {size}: {took}."]
    if size == knee:
        said.append(f"The knee is at {knee}, the smallest size whose time per sample is within 5% of the best.")
    if knee == largest and len(curve.rows) > 1:
        said.append("Time per sample still falls at the largest size, so a larger one may be faster yet.")
    if curve.batch_norm and min(knee, size) < BATCH_NORM_MIN:
        said.append(_about_batch_norm(knee, size))
    if curve.refused:
        said.append("Batch norm has no statistics of a single sample, so 1 was not measured.")
    if curve.left_out:
        missing = ", ".join(map(str, curve.left_out))
        said.append(f"There was no time for {missing}; add --seconds.")
    return said


def _about_batch_norm(knee: int, size: int) -> str:
    below = f"batch norm suffers from micro-batches of fewer than {BATCH_NORM_MIN} samples ({PUBLISHED})"
    if size < BATCH_NORM_MIN:
        return f"Beware: the model has batch norm, and {below}; raise --batch or --sizes."
    return f"The knee is at {knee}, but the model has batch norm, and {below}."


def _time(seconds: float) -> str:
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(1e3 * seconds)} ms"


def _parts(count: int) -> str:
    return "one part" if count == 1 else f"{count} parts"


def _table(curve: MicrobatchCurve) -> Table:
    title = f"{curve.workload}, {curve.parameters:,} parameters, one thread"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.show_edge = table.pad_edge = False
    for head in ("micro-batch", "ms per sample", "of the best", "spread", "repeats", f"ms per step of {curve.batch}"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in curve.rows:
        table.add_row(
            str(row.size),
            number(1e3 * row.seconds_per_sample),
            f"{row.seconds_per_sample / curve.best.seconds_per_sample:.2f}",
            percent(row.spread),
            str(row.repeats),
            number(1e3 * curve.seconds_per_step(row.size)),
            "←" if row.size == curve.recommendation else "",
        )
    return table


def _plain(curve: MicrobatchCurve) -> dict[str, Any]:
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
