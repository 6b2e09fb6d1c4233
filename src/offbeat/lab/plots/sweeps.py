"""A quantity against a setting, such as the number of workers; and the time per sample against the micro-batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from offbeat.lab.plots.line_plots import set_logarithmic_y
from offbeat.lab.plots.looks import COLOURS, Look, looks
from offbeat.lab.plots.style import INK, WIDTH_INCHES, legend_handle, new_figure, place_legend, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from offbeat.lab.microbatching import MicrobatchCurve


HEIGHT_INCHES = 4.0
GREY = "#7f7f7f"


@dataclass(frozen=True)
class Point:
    """A mean at `x`, and the ends of its 95% interval, or None."""

    x: float
    mean: float
    low: float | None = None
    high: float | None = None


@styled
def sweep(
    x_label: str,
    y_label: str,
    series: Mapping[str, Sequence[Point]],
    log_x: bool = False,
    log_y: bool = False,
    reference: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    strategies: Mapping[str, str] | None = None,
) -> Figure:
    """One line with intervals per label, and published values as hollow grey markers.

    x_label, y_label: labels of the axes, with units
    series: the points of each label
    log_x, log_y: whether an axis is logarithmic
    reference: published values of a label, as pairs (x, y)
    strategies: the strategies of labels that are not names of strategies
    """
    published = reference or {}
    look_of = looks([*series, *published], strategies)
    figure = new_figure(WIDTH_INCHES, HEIGHT_INCHES)
    axes = figure.add_subplot()
    for label, points in series.items():
        _draw_measured(axes, points, look_of[label])
    for label, values in published.items():
        _draw_published(axes, values, look_of[label])
    if log_x:
        _set_logarithmic_x(axes, sorted({point.x for points in series.values() for point in points}))
    if log_y:
        means = [point.mean for points in series.values() for point in points]
        heights = np.array([*means, *(y for pairs in published.values() for _, y in pairs)])
        set_logarithmic_y(axes, heights)
        axes.set_ylim(0.7 * heights.min(), 1.4 * heights.max())  # an interval may reach below zero
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    handles = [legend_handle(label, look_of[label]) for label in series]
    for label in published:
        handles.append(legend_handle(f"{label}, published", look_of[label]))
        handles[-1].set(**_hollow(look_of[label]))
    place_legend(figure, handles)
    return figure


def _draw_measured(axes: Axes, points: Sequence[Point], look: Look) -> None:
    below = [point.mean - (point.mean if point.low is None else point.low) for point in points]
    above = [(point.mean if point.high is None else point.high) - point.mean for point in points]
    line, _, _ = axes.errorbar(
        [point.x for point in points],
        [point.mean for point in points],
        yerr=[below, above] if any(below) or any(above) else None,
        color=look.colour,
        linestyle=look.dashes,
        marker=look.marker,
        elinewidth=1.0,
        capthick=1.0,
    )
    line.set_markeredgewidth(0)


def _draw_published(axes: Axes, values: Sequence[tuple[float, float]], look: Look) -> None:
    (line,) = axes.plot([x for x, _ in values], [y for _, y in values], zorder=1.9)
    line.set(**_hollow(look))


def _hollow(look: Look) -> dict[str, object]:
    return {
        "color": GREY,
        "linestyle": look.dashes,
        "linewidth": 0.9,
        "marker": look.marker,
        "markersize": 7.0,
        "markerfacecolor": "none",
        "markeredgecolor": GREY,
        "markeredgewidth": 1.2,
    }


def _set_logarithmic_x(axes: Axes, settings: Sequence[float]) -> None:
    """A logarithmic x axis with a tick at each setting."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(settings))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


@styled
def microbatch_figure(curve: MicrobatchCurve) -> Figure:
    """The median time per sample of each micro-batch size, with error bars that hold half of the repeats.

    The knee is marked; the dashed line is 5% above the best.
    """
    times = {row.size: 1e3 * row.seconds_per_sample for row in curve.rows}
    errors = {row.size: 0.5 * (row.spread or 0.0) * times[row.size] for row in curve.rows}
    points = [Point(size, time, time - errors[size], time + errors[size]) for size, time in times.items()]
    labels = "samples in a micro-batch", "milliseconds per sample"
    figure = sweep(*labels, {f"{curve.workload}, one thread": points}, log_x=True, log_y=True)
    (axes,) = figure.axes
    axes.axhline(1e3 * curve.limit_seconds_per_sample, color=INK, linewidth=0.8, linestyle=(0, (5, 3)), alpha=0.6)
    knee = curve.knee, times[curve.knee]
    (ring,) = axes.plot(*knee, "o", markersize=11.0, markerfacecolor="none")
    ring.set(markeredgewidth=1.4, markeredgecolor=COLOURS[1])
    axes.annotate(f"knee: {curve.knee}", knee, (9, 9), textcoords="offset points")
    return figure
