"""How quantities are distributed: several strategies on one pair of axes, or one beside another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from offbeat.lab.plots.line_plots import Cell, say_none_recorded
from offbeat.lab.plots.style import WIDTH_INCHES, Groups, new_figure, styled
from offbeat.records import curves
from offbeat.records.schema import RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 40
LOG_FROM = 20.0
"""Values that differ by this factor are put into bins of a logarithmic axis, if none of them is zero."""
FEW = 0.995
"""Of values with a long tail so many are shown; what is beyond is told in words."""


@dataclass(frozen=True)
class Quantity:
    """What is counted: in which unit, of what (`each`), and how it is read off the runs of one label."""

    label: str
    each: str
    values: Callable[[Sequence[RunRecords]], curves.Array]
    whole: bool = False
    """Whether values are whole numbers that deserve a bar each."""
    nothing: bool = False
    """Whether zeros alone mean that there is nothing to show."""


QUANTITIES = {
    "compute time": Quantity("compute time (s)", "rounds", curves.compute_seconds),
    "delay": Quantity("induced delay (s)", "rounds", curves.induced_seconds, nothing=True),
    "waiting": Quantity("waiting time (s)", "rounds", curves.idle_seconds, nothing=True),
    "sending": Quantity("send time (s)", "rounds", curves.send_seconds, nothing=True),
    "batch size": Quantity("batch size (samples)", "updates", curves.batch_sizes),
    "messages": Quantity("messages (per update)", "updates", curves.message_counts, whole=True),
    "staleness": Quantity("staleness (versions)", "messages", curves.stalenesses, whole=True),
}


@dataclass(frozen=True)
class Binned:
    """The values of each label, and the bins that all of them are put into."""

    quantity: Quantity
    values: dict[str, curves.Array]
    edges: curves.Array
    log: bool

    @classmethod
    def of(cls, quantity: Quantity, groups: Groups) -> Binned:
        values = {label: quantity.values(group) for label, group in groups.runs.items()}
        every = np.concatenate([np.empty(0), *values.values()])
        edges, log = _whole_edges(every) if quantity.whole else _edges(every)
        return cls(quantity, values, edges, log)

    @property
    def recorded(self) -> bool:
        return any((values.any() if self.quantity.nothing else values.size) for values in self.values.values())

    def only(self, label: str) -> Binned:
        return replace(self, values={label: self.values[label]})


def _edges(values: curves.Array) -> tuple[curves.Array, bool]:
    if not values.size or not values.any():
        return np.linspace(0.0, 1.0, BINS + 1), False
    low, high = float(values.min()), float(values.max())
    if low > 0 and high > LOG_FROM * low:
        return np.geomspace(low / 1.05, high * 1.05, BINS + 1), True
    most = float(np.quantile(values, FEW))
    return np.linspace(0.0, 1.05 * (most if high > 2 * most > 0 else high), BINS + 1), False


def _whole_edges(values: curves.Array) -> tuple[curves.Array, bool]:
    """As many whole numbers to a bin as to its neighbours, so that no bar stands for more of them than another."""
    highest = int(values.max()) if values.size else 0
    width = max(1, -(-(highest + 1) // BINS))
    return np.arange(0, max(highest + 1, 6) + width, width, dtype=np.float64) - 0.5, False


def draw_histogram(axes: Axes, binned: Binned, groups: Groups, *, density: bool = False) -> None:
    """One outline a label, or bars where there is one label alone."""
    alone = len(binned.values) == 1
    for label, values in binned.values.items():
        counts, _ = np.histogram(values, bins=binned.edges)
        if not counts.sum():
            continue
        share = counts / len(values)
        heights = share / np.diff(binned.edges) if density else 100.0 * share
        look = groups.looks[label]
        if alone:
            axes.stairs(heights, binned.edges, fill=True, color=look.colour, label=label)
        else:
            axes.stairs(heights, binned.edges, color=look.colour, linestyle=look.dashes, linewidth=1.5, label=label)
    axes.grid(False, axis="x")
    axes.set_xlim(binned.edges[0], binned.edges[-1])
    _mark(axes, binned)
    axes.set_ylim(bottom=0.0)


def _mark(axes: Axes, binned: Binned) -> None:
    """Ticks: whole numbers where there are no others, and powers of ten on a logarithmic axis."""
    from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

    if binned.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=binned.quantity.whole))


def _cell(name: str, *, density: bool = False) -> Cell:
    def draw(axes: Axes, groups: Groups) -> None:
        binned = Binned.of(QUANTITIES[name], groups)
        draw_histogram(axes, binned, groups, density=density)
        if not axes.patches:
            say_none_recorded(axes)
        axes.set_xlabel(binned.quantity.label)
        axes.set_ylabel("density (1/s)" if density else f"share of {binned.quantity.each} (%)")

    return draw


HISTOGRAMS: dict[str, Cell] = {
    "delay density": _cell("delay", density=True),
    "compute time": _cell("compute time"),
    "waiting": _cell("waiting"),
    "sending": _cell("sending"),
    "batch size": _cell("batch size"),
    "messages": _cell("messages"),
    "staleness": _cell("staleness"),
}


@styled
def distributions(runs: Sequence[RunRecords]) -> Figure:
    """A row for each label and a column for each quantity: what was recorded nowhere is left out."""
    groups = Groups.of(runs)
    every = [Binned.of(quantity, groups) for quantity in QUANTITIES.values()]
    columns = [binned for binned in every if binned.recorded] or every[:1]
    figure = new_figure(WIDTH_INCHES, 0.9 + 0.8 * len(groups.runs))
    table = figure.subplots(len(groups.runs), len(columns), sharex="col", squeeze=False)
    for row, label in zip(table, groups.runs, strict=True):
        for axes, binned in zip(row, columns, strict=True):
            draw_histogram(axes, binned.only(label), groups)
            _marked(axes, binned.values[label], float(binned.edges[-1]))
        row[0].set_title(label, color=groups.looks[label].colour, weight="bold", fontsize=9, pad=13, loc="left")
    for axes, binned in zip(table[-1], columns, strict=True):
        axes.set_xlabel(binned.quantity.label.replace(" (", "\n("), fontsize=8.5)
    figure.supylabel("share of rounds, updates or messages (%)", fontsize=8.5)
    return figure


def _marked(axes: Axes, values: curves.Array, right: float) -> None:
    """The height of the tallest bar at the axis, and the mean above, with what is beyond the right end."""
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
    said = f"mean {mean:.3g}" if mean < 1000 else f"mean {mean:,.0f}"
    said += f", {beyond:.1%} beyond" if beyond else ""
    axes.text(1, 1.02, said, transform=axes.transAxes, ha="right", va="bottom", fontsize=7)
