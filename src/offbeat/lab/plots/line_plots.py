"""Line plots: one quantity of runs against another, on one pair of axes.

`LINE_PLOTS` is the table of them: what is measured, and what each axis shows. `draw_line_plot` draws any of them; a
new plot is one more row. Histograms are in `distributions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from offbeat.lab.plots.style import INK, Groups
from offbeat.records import curves, thinning
from offbeat.records.exchanges import consensus_series
from offbeat.records.metrics import Metric, target_of
from offbeat.records.schema import RunRecords, Update
from offbeat.records.thinning import Reads, fields_of, union

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Measure = Callable[[RunRecords], curves.Curve]

WIDE = 10.0
"""The ratio of largest to smallest value from which an axis with the scale `log if wide` is logarithmic."""
MARKER_EVERY = 0.16
"""The distance of markers on a line, as a share of the diagonal of the axes."""


@dataclass(frozen=True)
class AxisStyle:
    """What one axis shows.

    label: the quantity, with its unit in brackets.
    unit: the unit at ticks, whose numbers are then short, as 25k for 25000; "" for counts, None for plain numbers.
    from_zero: whether a y axis begins at zero. An x axis always does, unless it is logarithmic.
    scale: linear, logarithmic, or logarithmic only where values differ by a factor of `WIDE`.
    """

    label: str
    unit: str | None = None
    from_zero: bool = False
    scale: Literal["linear", "log", "log if wide"] = "linear"


@dataclass(frozen=True)
class LinePlot:
    """One line plot.

    measure: the curve of one run.
    reads: the records that it is computed from.
    x, y: the axes.
    metric: the held-out metric on the y axis, whose target is drawn as a dashed line; None: no target is drawn.
    height_inches: the height of a figure that holds this plot alone.
    legend_name: the name of a label in the legend of such a figure, from the label and its runs.
    """

    measure: Measure
    reads: Reads
    x: AxisStyle
    y: AxisStyle
    metric: curves.HeldOutMetric | None = None
    height_inches: float = 4.0
    legend_name: Callable[[str, Sequence[RunRecords]], str] = lambda label, runs: label


TIME = AxisStyle("time (s)")
SAMPLES = AxisStyle("samples applied (samples)", "", from_zero=True)
STEPS = AxisStyle("step (updates)", "", from_zero=True)
SENT = AxisStyle("sent by all ranks (bytes)", "B", from_zero=True)
TRAINING_LOSS = AxisStyle("training loss", scale="log if wide")
LEARNING_RATE = AxisStyle("learning rate", from_zero=True)
CONSENSUS = AxisStyle("consensus (squared norm)", scale="log")
HELD_OUT = {
    "accuracy": AxisStyle("held-out accuracy"),
    "accuracy_top5": AxisStyle("held-out top-5 accuracy"),
    "loss": AxisStyle("held-out loss", scale="log if wide"),
}


def _held_out(metric: curves.HeldOutMetric, over: curves.Over, x: AxisStyle) -> LinePlot:
    reads = union([thinning.EVALUATIONS, thinning.STEPS if over == "steps" else {}])
    return LinePlot(partial(curves.evaluation_curve, metric=metric, over=over), reads, x, HELD_OUT[metric], metric)


def _consensus_name(label: str, runs: Sequence[RunRecords]) -> str:
    series = [consensus_series(run) for run in runs]
    estimated = any(one.estimated for one in series if one.points)
    return f"{label}, estimated from exchanges" if estimated else label


QUALITY_OVER_BYTES = "quality over bytes"
_RATES = fields_of(Update, "at", "learning_rate")
LINE_PLOTS: dict[str, LinePlot] = {
    "accuracy over time": _held_out("accuracy", "seconds", TIME),
    "accuracy over samples": _held_out("accuracy", "samples", SAMPLES),
    "accuracy over steps": _held_out("accuracy", "steps", STEPS),
    "top-5 over time": _held_out("accuracy_top5", "seconds", TIME),
    "loss over time": _held_out("loss", "seconds", TIME),
    "loss over samples": _held_out("loss", "samples", SAMPLES),
    "training loss over time": LinePlot(
        curves.training_loss_curve, thinning.TRAINING_LOSS, TIME, TRAINING_LOSS, height_inches=3.6
    ),
    "training loss over steps": LinePlot(
        partial(curves.training_loss_curve, over="steps"),
        union([thinning.TRAINING_LOSS, thinning.STEPS]),
        STEPS,
        TRAINING_LOSS,
    ),
    "learning rate over time": LinePlot(curves.learning_rate_curve, _RATES, TIME, LEARNING_RATE),
    "learning rate over steps": LinePlot(
        partial(curves.learning_rate_curve, over="steps"),
        union([_RATES, thinning.STEPS]),
        STEPS,
        LEARNING_RATE,
    ),
    "samples over time": LinePlot(curves.samples_curve, thinning.SAMPLES, TIME, SAMPLES, height_inches=3.2),
    "steps over time": LinePlot(curves.steps_curve, thinning.STEPS, TIME, STEPS),
    "consensus over time": LinePlot(
        curves.consensus_curve, thinning.CONSENSUS, TIME, CONSENSUS, height_inches=3.6, legend_name=_consensus_name
    ),
    "bytes": LinePlot(curves.bytes_curve, thinning.TRAFFIC, TIME, SENT),
    QUALITY_OVER_BYTES: LinePlot(
        partial(curves.quality_over_bytes, metric="loss"),
        union([thinning.EVALUATIONS, thinning.TRAFFIC]),
        replace(SENT, scale="log if wide"),
        HELD_OUT["loss"],
        "loss",
    ),
}


def line_plot(name: str, runs: Sequence[RunRecords]) -> LinePlot:
    """The plot of that name; the metric of quality over bytes is that of the target of the runs, or else the loss."""
    plot = LINE_PLOTS[name]
    if name == QUALITY_OVER_BYTES:
        metric = metric_over_bytes(runs)
        plot = replace(
            plot, measure=partial(curves.quality_over_bytes, metric=metric), y=HELD_OUT[metric], metric=metric
        )
    return plot


def metric_over_bytes(runs: Sequence[RunRecords]) -> Metric:
    """The metric that is drawn against bytes."""
    return next((target.metric for run in runs if (target := target_of(run.header)) is not None), "loss")


def draw_line_plot(name: str, axes: Axes, groups: Groups) -> None:
    """Draw one plot of the table: a line per label, the axes, and the target."""
    plot = line_plot(name, groups.all)
    drawn = _draw_lines(axes, groups, plot.measure)
    _style_x(axes, plot.x, drawn)
    _style_y(axes, plot.y, np.concatenate([np.empty(0), *(curve.values for curve in drawn)]))
    if plot.metric is not None:
        _draw_targets(axes, groups, plot.metric)


def _draw_lines(axes: Axes, groups: Groups, measure: Measure) -> list[curves.Curve]:
    """For each label the mean over its runs, and a band from lowest to highest; returns the curves of all runs."""
    drawn = []
    for index, (label, group) in enumerate(groups.runs.items()):
        measured = [measure(run) for run in group]
        drawn += measured
        band = curves.band([curves.thinned(curve) for curve in measured])
        if band is None:
            continue
        look = groups.looks[label]
        # The offset of markers differs by label, so that lines on top of each other do not hide them.
        first = MARKER_EVERY * (0.25 + 0.75 * index / len(groups.runs))
        axes.plot(
            band.over,
            band.mean,
            color=look.colour,
            linestyle=look.dashes,
            marker=look.marker,
            markeredgewidth=0,
            markevery=(first, MARKER_EVERY),
            label=label,
        )
        if band.count > 1:
            axes.fill_between(band.over, band.low, band.high, color=look.colour, alpha=0.18, linewidth=0)
    axes.set_xlim(left=0)
    if not axes.lines:
        write_none_recorded(axes)
    return drawn


def write_none_recorded(axes: Axes) -> None:
    """Write on empty axes that the runs have no such records."""
    axes.text(0.5, 0.5, "none recorded", transform=axes.transAxes, ha="center", va="center", alpha=0.6)
    axes.set_xticks([])
    axes.set_yticks([])


def _style_x(axes: Axes, style: AxisStyle, drawn: Sequence[curves.Curve]) -> None:
    from matplotlib.ticker import EngFormatter, NullFormatter

    positive = [curve.over for curve in drawn if len(curve.over) and curve.over[-1] > 0]
    ends = [over[-1] for over in positive]
    if style.scale == "log if wide" and ends and max(ends) >= WIDE * min(ends):
        axes.set_xscale("log")
        axes.set_xlim(left=min(over[over > 0].min() for over in positive))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if style.unit is not None:
        axes.xaxis.set_major_formatter(EngFormatter(unit=style.unit, sep=" " if style.unit else ""))
    axes.set_xlabel(style.label)


def _style_y(axes: Axes, style: AxisStyle, values: np.ndarray) -> None:
    from matplotlib.ticker import EngFormatter

    if style.unit is not None:
        axes.yaxis.set_major_formatter(EngFormatter(unit=style.unit, sep=" " if style.unit else ""))
    if style.from_zero:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(style.label)
    wide = values.size and values.min() > 0 and values.max() >= WIDE * values.min()
    if values.size and (style.scale == "log" or (style.scale == "log if wide" and wide)):
        set_logarithmic_y(axes, values)


def set_logarithmic_y(axes: Axes, values: np.ndarray) -> None:
    """Make the y axis logarithmic; over fewer than three decades of `values`, 2 and 5 are marked as well."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    few_decades = values.max() < 1000 * values.min()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_decades else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _draw_targets(axes: Axes, groups: Groups, metric: curves.HeldOutMetric) -> None:
    if not axes.lines:
        return
    for target in dict.fromkeys(target_of(run.header) for run in groups.all):
        if target is None or target.metric != metric:
            continue
        axes.axhline(target.value, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        above = metric == "loss"  # the side that curves start from
        axes.annotate(
            f"target {target.value:g}",
            (1, target.value),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3 if above else -3),
            textcoords="offset points",
            ha="right",
            va="bottom" if above else "top",
            fontsize=8.5,
        )
