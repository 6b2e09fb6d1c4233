"""Curves on one pair of axes, each under a name; figures and panels are made of these.

A cell is told which runs to draw and sets its own labels and scales. How values are distributed is drawn in
`histograms.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from offbeat.lab.plots.style import INK, Groups
from offbeat.records import curves
from offbeat.records.metrics import Metric, target_of
from offbeat.records.schema import RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

Cell = Callable[["Axes", Groups], None]
Measure = Callable[[RunRecords], curves.Curve]

LOG_FROM = 10.0
"""A loss that falls by this factor is drawn on a logarithmic axis, and so are bytes that differ by it among runs."""
MARKER_EVERY = 0.16
"""Markers stand so far apart, in parts of the diagonal."""
TIME = "time (s)"
SAMPLES = "samples applied (samples)"
STEP = "step (updates)"
SENT = "sent by all ranks (bytes)"


def accuracy_over_time(axes: Axes, groups: Groups) -> None:
    """Held-out accuracy against time, with the target."""
    _evaluated(axes, groups, "accuracy", "seconds", TIME)


def accuracy_over_samples(axes: Axes, groups: Groups) -> None:
    """Held-out accuracy against samples applied."""
    _evaluated(axes, groups, "accuracy", "samples", SAMPLES)
    _counts(axes.xaxis)


def accuracy_over_steps(axes: Axes, groups: Groups) -> None:
    """Held-out accuracy against updates."""
    _evaluated(axes, groups, "accuracy", "steps", STEP)
    _counts(axes.xaxis)


def top5_over_time(axes: Axes, groups: Groups) -> None:
    """How often the right class is among the five likeliest, against time."""
    _evaluated(axes, groups, "accuracy_top5", "seconds", TIME)


def loss_over_time(axes: Axes, groups: Groups) -> None:
    """Held-out loss against time, on a logarithmic axis where it falls far."""
    _evaluated(axes, groups, "loss", "seconds", TIME)


def loss_over_samples(axes: Axes, groups: Groups) -> None:
    """Held-out loss against samples applied."""
    _evaluated(axes, groups, "loss", "samples", SAMPLES)
    _counts(axes.xaxis)


def training_loss_over_time(axes: Axes, groups: Groups) -> None:
    """The mean loss of the last training samples against time."""
    _drawn(axes, groups, curves.training_loss_curve, TIME, "training loss", log=True)


def training_loss_over_steps(axes: Axes, groups: Groups) -> None:
    """The mean loss of the last training samples against updates."""
    _drawn(axes, groups, lambda run: curves.training_loss_curve(run, "steps"), STEP, "training loss", log=True)
    _counts(axes.xaxis)


def learning_rate_over_time(axes: Axes, groups: Groups) -> None:
    """The learning rate against time."""
    _drawn(axes, groups, curves.learning_rate_curve, TIME, "learning rate")
    axes.set_ylim(bottom=0)


def learning_rate_over_steps(axes: Axes, groups: Groups) -> None:
    """The learning rate against updates."""
    _drawn(axes, groups, lambda run: curves.learning_rate_curve(run, "steps"), STEP, "learning rate")
    axes.set_ylim(bottom=0)
    _counts(axes.xaxis)


def samples_over_time(axes: Axes, groups: Groups) -> None:
    """Samples applied against time: the slope is the throughput."""
    _drawn(axes, groups, curves.samples_curve, TIME, SAMPLES)
    _counts(axes.yaxis)
    axes.set_ylim(bottom=0)


def steps_over_time(axes: Axes, groups: Groups) -> None:
    """Updates against time."""
    _drawn(axes, groups, curves.steps_curve, TIME, STEP)
    _counts(axes.yaxis)
    axes.set_ylim(bottom=0)


def bytes_over_time(axes: Axes, groups: Groups) -> None:
    """What all ranks together had sent against time."""
    from matplotlib.ticker import EngFormatter

    _drawn(axes, groups, curves.bytes_curve, TIME, SENT)
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.set_ylim(bottom=0)


def consensus_over_time(axes: Axes, groups: Groups) -> None:
    """How far apart peers are against time, on a logarithmic axis; strategies that keep one model are left out."""
    values = draw_curves(axes, groups, curves.consensus_curve)
    axes.set_xlabel(TIME)
    axes.set_ylabel("consensus (squared norm)")
    if values.size:
        logarithmic(axes, values)


def quality_over_bytes(axes: Axes, groups: Groups) -> None:
    """What the target is set in, or else the loss, against the bytes that all ranks together had sent.

    Bytes are on a logarithmic axis where one run sends many times as much as another: what is frugal is on the left.
    """
    from matplotlib.ticker import EngFormatter, NullFormatter

    metric = metric_over_bytes(groups.all)
    values = draw_curves(axes, groups, lambda run: curves.quality_over_bytes(run, metric))
    sent = [curves.quality_over_bytes(run, metric).over for run in groups.all]
    ends = [series[-1] for series in sent if len(series) and series[-1] > 0]
    if ends and max(ends) >= LOG_FROM * min(ends):
        axes.set_xscale("log")
        axes.set_xlim(left=min(series[series > 0].min() for series in sent if len(series) and series[-1] > 0))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.set_xlabel(SENT)
    axes.set_ylabel(f"held-out {metric}")
    _draw_targets(axes, groups, metric)
    if metric == "loss":
        _logarithmic_where_it_falls_far(axes, values)


def metric_over_bytes(runs: Sequence[RunRecords]) -> Metric:
    """The metric that is drawn against bytes."""
    return next((target.metric for run in runs if (target := target_of(run.header)) is not None), "loss")


CURVES: dict[str, Cell] = {
    "accuracy over time": accuracy_over_time,
    "accuracy over samples": accuracy_over_samples,
    "accuracy over steps": accuracy_over_steps,
    "top-5 over time": top5_over_time,
    "loss over time": loss_over_time,
    "loss over samples": loss_over_samples,
    "training loss over time": training_loss_over_time,
    "training loss over steps": training_loss_over_steps,
    "learning rate over time": learning_rate_over_time,
    "learning rate over steps": learning_rate_over_steps,
    "samples over time": samples_over_time,
    "steps over time": steps_over_time,
    "consensus over time": consensus_over_time,
    "bytes": bytes_over_time,
    "quality over bytes": quality_over_bytes,
}

HELD_OUT = {"accuracy": "held-out accuracy", "accuracy_top5": "held-out top-5 accuracy", "loss": "held-out loss"}


def _evaluated(axes: Axes, groups: Groups, measured: curves.Measured, over: curves.Over, x_label: str) -> None:
    def measure(run: RunRecords) -> curves.Curve:
        return curves.evaluation_curve(run, measured, over)

    _drawn(axes, groups, measure, x_label, HELD_OUT[measured], log=measured == "loss")
    _draw_targets(axes, groups, measured)


def _drawn(axes: Axes, groups: Groups, measure: Measure, x_label: str, y_label: str, *, log: bool = False) -> None:
    values = draw_curves(axes, groups, measure)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if log:
        _logarithmic_where_it_falls_far(axes, values)


def draw_curves(axes: Axes, groups: Groups, measure: Measure) -> np.ndarray:
    """One line a label, the mean over its runs, in a band from the lowest to the highest; returns the values of all."""
    drawn = []
    for place, (label, group) in enumerate(groups.runs.items()):
        measured = [measure(run) for run in group]
        over = curves.band([curves.thinned(curve) for curve in measured])
        drawn += [curve.values for curve in measured]
        if over is None:
            continue
        look = groups.looks[label]
        # Each label has its markers elsewhere, so that lines which lie on each other do not hide them.
        first = MARKER_EVERY * (0.25 + 0.75 * place / len(groups.runs))
        axes.plot(
            over.over,
            over.mean,
            color=look.colour,
            linestyle=look.dashes,
            marker=look.marker,
            markeredgewidth=0,
            markevery=(first, MARKER_EVERY),
            label=label,
        )
        if over.count > 1:
            axes.fill_between(over.over, over.low, over.high, color=look.colour, alpha=0.18, linewidth=0)
    axes.set_xlim(left=0)
    if not axes.lines:
        say_none_recorded(axes)
    return np.concatenate([np.empty(0), *drawn])


def say_none_recorded(axes: Axes) -> None:
    axes.text(0.5, 0.5, "none recorded", transform=axes.transAxes, ha="center", va="center", alpha=0.6)
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_targets(axes: Axes, groups: Groups, measured: curves.Measured) -> None:
    if not axes.lines:
        return
    for target in dict.fromkeys(target_of(run.header) for run in groups.all):
        if target is None or target.metric != measured:
            continue
        axes.axhline(target.value, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        above = measured == "loss"  # on the side where curves come from, and not where they end
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


def _logarithmic_where_it_falls_far(axes: Axes, values: np.ndarray) -> None:
    if values.size and values.min() > 0 and values.max() >= LOG_FROM * values.min():
        logarithmic(axes, values)


def logarithmic(axes: Axes, values: np.ndarray) -> None:
    """Over few decades, 2 and 5 are marked as well."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    few_decades = values.max() < 1000 * values.min()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_decades else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _counts(axis: Axis) -> None:
    """Large numbers in short: 25k, 1.5M."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))
