"""Histograms: how quantities of rounds, updates and messages are distributed.

Labels share one pair of axes, or have a row each. `HISTOGRAMS` is the table of quantities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from offbeat.lab.plots.line_plots import write_none_recorded
from offbeat.lab.plots.style import WIDTH_INCHES, Groups, new_figure, styled
from offbeat.records import curves
from offbeat.records.schema import Round, RunRecords, Update
from offbeat.records.thinning import STALENESS, Reads, fields_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 40
LOG_FROM = 20.0
"""The ratio of largest to smallest value from which bins are logarithmic, if no value is zero."""
SHOWN_QUANTILE = 0.995
"""The share of values with a long tail that is shown; the share beyond is written as text."""


@dataclass(frozen=True)
class Histogram:
    """One quantity.

    label: the quantity and its unit.
    counted: what has one value: rounds, updates or messages.
    values: reads the values from the runs of one label.
    reads: the records that they are read from.
    is_whole: whether values are whole numbers.
    ignores_zeros: whether values that are all zero mean that nothing was recorded.
    is_density: whether a plot shows a probability density instead of shares.
    """

    label: str
    counted: str
    values: Callable[[Sequence[RunRecords]], curves.Array]
    reads: Reads
    is_whole: bool = False
    ignores_zeros: bool = False
    is_density: bool = False


def _of_field(
    label: str, kind: type[Round | Update], field: str, *, is_whole: bool = False, is_delay: bool = False
) -> Histogram:
    """A field of rounds or updates as a quantity."""
    counted = "rounds" if kind is Round else "updates"
    values = partial(curves.field_values, kind, field)
    return Histogram(label, counted, values, fields_of(kind, field), is_whole, is_delay)


HISTOGRAMS = {
    "compute time": _of_field("compute time (s)", Round, "seconds"),
    "delay density": replace(_of_field("induced delay (s)", Round, "induced_seconds", is_delay=True), is_density=True),
    "waiting": _of_field("waiting time (s)", Round, "idle_seconds", is_delay=True),
    "sending": _of_field("send time (s)", Round, "send_seconds", is_delay=True),
    "batch size": _of_field("batch size (samples)", Update, "samples"),
    "messages": _of_field("messages (per update)", Update, "messages", is_whole=True),
    "staleness": Histogram("staleness (versions)", "messages", curves.stalenesses, STALENESS, is_whole=True),
}


@dataclass(frozen=True)
class Binned:
    """The values of each label, and the bins, which all labels share."""

    histogram: Histogram
    values: dict[str, curves.Array]
    edges: curves.Array
    log: bool

    @classmethod
    def of(cls, histogram: Histogram, groups: Groups) -> Binned:
        values = {label: histogram.values(group) for label, group in groups.runs.items()}
        every = np.concatenate([np.empty(0), *values.values()])
        edges, log = _whole_edges(every) if histogram.is_whole else _edges(every)
        return cls(histogram, values, edges, log)

    @property
    def is_recorded(self) -> bool:
        return any((values.any() if self.histogram.ignores_zeros else values.size) for values in self.values.values())

    def only(self, label: str) -> Binned:
        return replace(self, values={label: self.values[label]})


def _edges(values: curves.Array) -> tuple[curves.Array, bool]:
    if not values.size or not values.any():
        return np.linspace(0.0, 1.0, BINS + 1), False
    low, high = float(values.min()), float(values.max())
    if low > 0 and high > LOG_FROM * low:
        return np.geomspace(low / 1.05, high * 1.05, BINS + 1), True
    most = float(np.quantile(values, SHOWN_QUANTILE))
    return np.linspace(0.0, 1.05 * (most if high > 2 * most > 0 else high), BINS + 1), False


def _whole_edges(values: curves.Array) -> tuple[curves.Array, bool]:
    """Bins of equal numbers of whole values."""
    highest = int(values.max()) if values.size else 0
    width = max(1, -(-(highest + 1) // BINS))
    return np.arange(0, max(highest + 1, 6) + width, width, dtype=np.float64) - 0.5, False


def _draw_bars(axes: Axes, binned: Binned, groups: Groups, *, is_density: bool = False) -> None:
    """One outline per label, or filled bars if there is only one label."""
    alone = len(binned.values) == 1
    for label, values in binned.values.items():
        counts, _ = np.histogram(values, bins=binned.edges)
        if not counts.sum():
            continue
        share = counts / len(values)
        heights = share / np.diff(binned.edges) if is_density else 100.0 * share
        look = groups.looks[label]
        if alone:
            axes.stairs(heights, binned.edges, fill=True, color=look.colour, label=label)
        else:
            axes.stairs(heights, binned.edges, color=look.colour, linestyle=look.dashes, linewidth=1.5, label=label)
    axes.grid(False, axis="x")
    axes.set_xlim(binned.edges[0], binned.edges[-1])
    _set_ticks(axes, binned)
    axes.set_ylim(bottom=0.0)


def _set_ticks(axes: Axes, binned: Binned) -> None:
    """Ticks at whole numbers for whole values, and at powers of ten on a logarithmic axis."""
    from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

    if binned.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=binned.histogram.is_whole))


def draw_histogram_plot(name: str, axes: Axes, groups: Groups) -> None:
    """Draw one quantity of the table, all labels on one pair of axes."""
    binned = Binned.of(HISTOGRAMS[name], groups)
    _draw_bars(axes, binned, groups, is_density=binned.histogram.is_density)
    if not axes.patches:
        write_none_recorded(axes)
    axes.set_xlabel(binned.histogram.label)
    axes.set_ylabel("density (1/s)" if binned.histogram.is_density else f"share of {binned.histogram.counted} (%)")


@styled
def distributions(runs: Sequence[RunRecords]) -> Figure:
    """A row for each label and a column for each quantity that any run has recorded."""
    groups = Groups.of(runs)
    every = [Binned.of(histogram, groups) for histogram in HISTOGRAMS.values()]
    columns = [binned for binned in every if binned.is_recorded] or every[:1]
    figure = new_figure(WIDTH_INCHES, 0.9 + 0.8 * len(groups.runs))
    table = figure.subplots(len(groups.runs), len(columns), sharex="col", squeeze=False)
    for row, label in zip(table, groups.runs, strict=True):
        for axes, binned in zip(row, columns, strict=True):
            _draw_bars(axes, binned.only(label), groups)
            _annotate(axes, binned.values[label], float(binned.edges[-1]))
        row[0].set_title(label, color=groups.looks[label].colour, weight="bold", fontsize=9, pad=13, loc="left")
    for axes, binned in zip(table[-1], columns, strict=True):
        axes.set_xlabel(binned.histogram.label.replace(" (", "\n("), fontsize=8.5)
    figure.supylabel("share of rounds, updates or messages (%)", fontsize=8.5)
    return figure


def _annotate(axes: Axes, values: curves.Array, right: float) -> None:
    """Write the height of the tallest bar at the axis, and above it the mean and the share beyond the right end."""
    axes.tick_params(labelsize=7.5)
    if not axes.patches:
        axes.text(0.5, 0.4, "none", transform=axes.transAxes, ha="center", fontsize=7.5, alpha=0.6)
        axes.set_yticks([])
        return
    top = axes.dataLim.y1
    axes.set_ylim(0, 1.08 * top)
    axes.set_yticks([0, top], ["", f"{top:.0f}" if top >= 1 else f"{top:.1g}"])
    beyond = float((values > right).mean())
    mean = float(values.mean())
    text = f"mean {mean:.3g}" if mean < 1000 else f"mean {mean:,.0f}"
    text += f", {beyond:.1%} beyond" if beyond else ""
    axes.text(1, 1.02, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=7)
