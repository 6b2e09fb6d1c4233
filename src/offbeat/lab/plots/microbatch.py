"""Time per sample against the size of micro-batches, with the knee marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.lab.plots.looks import COLOURS
from offbeat.lab.plots.style import INK, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from offbeat.lab.microbatching import MicrobatchCurve


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
