"""A quantity against a setting: a delay, a number of workers, a number of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """The mean of what was measured at `x`, and the ends of its 95% interval, None where there is none."""

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
    """One line a label with its intervals; values that others have published are hollow and grey, with its marker.

    `strategies` says which strategy a label stands for, where it is not itself the name of one.
    """
    published = reference or {}
    style = looks([*series, *published], strategies)
    figure = new_figure(WIDTH_INCHES, HEIGHT_INCHES)
    axes = figure.add_subplot()
    for label, points in series.items():
        _measured(axes, points, style[label])
    for label, values in published.items():
        _published(axes, values, style[label])
    if log_x:
        _logarithmic_in_settings(axes, sorted({point.x for points in series.values() for point in points}))
    if log_y:
        means = [point.mean for points in series.values() for point in points]
        heights = np.array([*means, *(y for pairs in published.values() for _, y in pairs)])
        set_logarithmic_y(axes, heights)
        axes.set_ylim(0.7 * heights.min(), 1.4 * heights.max())  # an interval may reach below zero
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    signs = [legend_handle(label, style[label]) for label in series]
    for label in published:
        signs.append(legend_handle(f"{label}, published", style[label]))
        signs[-1].set(**_hollow(style[label]))
    place_legend(figure, signs)
    return figure


def _measured(axes: Axes, points: Sequence[Point], look: Look) -> None:
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


def _published(axes: Axes, values: Sequence[tuple[float, float]], look: Look) -> None:
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


def _logarithmic_in_settings(axes: Axes, settings: Sequence[float]) -> None:
    """A tick at each setting that was tried."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(settings))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


# Time per sample against the size of micro-batches, with the knee marked.


@styled
def microbatch_figure(curve: MicrobatchCurve) -> Figure:
    """Medians, with half of the repeats between the ends of the bars; the dashed line is 5% above the best."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    sizes = [row.size for row in curve.rows]
    milliseconds = [1e3 * row.seconds_per_sample for row in curve.rows]
    halves = [0.5 * (row.spread or 0.0) * each for row, each in zip(curve.rows, milliseconds, strict=True)]
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.errorbar(sizes, milliseconds, yerr=halves, marker="o", color=COLOURS[0])
    axes.axhline(1e3 * curve.limit_seconds_per_sample, color=INK, linewidth=0.8, linestyle=(0, (5, 3)), alpha=0.6)
    place = sizes.index(curve.knee)
    ring: dict[str, Any] = {
        "markersize": 11.0,
        "markerfacecolor": "none",
        "markeredgewidth": 1.4,
        "markeredgecolor": COLOURS[1],
    }
    axes.plot(sizes[place], milliseconds[place], "o", **ring)
    axes.annotate(f"knee: {curve.knee}", (sizes[place], milliseconds[place]), (9, 9), textcoords="offset points")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("samples in a micro-batch")
    axes.set_ylabel("milliseconds per sample")
    axes.set_title(f"{curve.workload}, one thread")
    return figure
