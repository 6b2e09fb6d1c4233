"""Heat maps of pairs of ranks, and drawings of graphs of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offbeat.lab.plots.looks import COLOURS, Look
from offbeat.lab.plots.style import INK, WIDTH_INCHES, Groups, new_figure, styled
from offbeat.records.exchanges import exchange_counts
from offbeat.records.schema import RunRecords
from offbeat.topology.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


NUMBERS_RANKS_MAX = 16
"""The number of ranks up to which each cell shows its value."""
ACROSS = 2
PAIRS_INCHES = 3.3
WHITE_FROM = 0.7
"""The share of the scale from which text on a cell is white."""


@dataclass(frozen=True)
class HeatMap:
    """A quantity of pairs of ranks."""

    title: str
    values: Sequence[Sequence[float | None]]
    """A row for each sender; None for a pair without a value, such as a rank and itself."""
    more_is_better: bool


@styled
def heat_maps(maps: Sequence[HeatMap]) -> Figure:
    """The heat maps side by side, each with a scale from zero."""
    ranks = max(len(heat_map.values) for heat_map in maps)
    side = min(1.6 + 0.55 * ranks, 9.0)
    figure = new_figure(side * len(maps) + 0.6, side)
    for axes, heat_map in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
        values = np.array(heat_map.values, dtype=np.float64)
        top = float(np.nanmax(values)) if np.isfinite(values).any() else 1.0
        image = _draw(axes, values, top, "Blues" if heat_map.more_is_better else "Oranges")
        axes.set_title(heat_map.title)
        axes.set_xlabel("to rank")
        axes.set_ylabel("from rank")
        figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


@styled
def exchange_maps(runs: Sequence[RunRecords]) -> Figure:
    """The number of exchanges of each pair of peers, and beside it of each peer, in one run per strategy.

    Strategies without exchanges are left out; the others share one scale.
    """
    groups = Groups.of(runs)
    counts = {label: rows for label, run in groups.one_of_each().items() if (rows := exchange_counts(run))}
    down = max(1, math.ceil(len(counts) / ACROSS))
    figure = new_figure(WIDTH_INCHES, 0.1 + PAIRS_INCHES * down)
    panels = figure.subplots(down, ACROSS, squeeze=False)
    for axes in panels.flat[len(counts) :]:
        axes.set_axis_off()
    if not counts:
        panels[0, 0].text(0.5, 0.5, "none recorded", transform=panels[0, 0].transAxes, ha="center", alpha=0.6)
    top = float(max((count for rows in counts.values() for row in rows for count in row), default=1))
    for axes, (label, rows) in zip(panels.flat, counts.items(), strict=False):
        image = _draw(axes, np.array([[count or np.nan for count in row] for row in rows]), top, "Blues", ticks_max=10)
        axes.set_title(label, color=groups.looks[label].colour, weight="bold")
        axes.set_xlabel("with rank")
        axes.set_ylabel("exchanges of rank")
        _draw_totals(axes, [sum(row) for row in rows], groups.looks[label])
    if any(len(rows) > NUMBERS_RANKS_MAX for rows in counts.values()):
        bar = figure.colorbar(image, ax=panels, shrink=0.8, aspect=30, label="exchanges of two ranks")
        assert bar.solids is not None
        bar.solids.set_rasterized(True)  # otherwise each shade is a path
    return figure


def _draw_totals(beside: Axes, totals: Sequence[int], look: Look) -> None:
    """The sum of each row as a bar, to the right of the heat map."""
    axes = beside.inset_axes((1.05, 0, 0.32, 1), sharey=beside)
    axes.barh(range(len(totals)), totals, height=0.8, color=look.colour)
    axes.set_xlim(0, 1.05 * max(totals))
    axes.set_xticks([0, max(totals)], ["0", f"{max(totals):,}"])
    axes.set_xlabel("with any (exchanges)")
    axes.tick_params(axis="y", labelleft=False, length=0)
    axes.grid(False)


def _draw(axes: Axes, values: np.ndarray, top: float, colours: str, ticks_max: int = 16) -> AxesImage:
    image = axes.imshow(values, cmap=colours, vmin=0.0, vmax=top, interpolation="none")
    axes.grid(False)
    ticks = range(0, len(values), max(1, -(-len(values) // ticks_max)))
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    if len(values) <= NUMBERS_RANKS_MAX:
        size = 8.0 if len(values) <= 10 else 6.0 if top < 1000 else 4.8
        for row, column in zip(*np.nonzero(np.isfinite(values)), strict=True):
            value = float(values[row, column])
            ink = "white" if value > WHITE_FROM * top else "black"
            axes.text(column, row, _cell(value), ha="center", va="center", color=ink, fontsize=size)
    return image


def _cell(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


# Graphs


LABELLED_MAX = 64
"""The number of peers up to which each node shows its rank."""


def layout(topology: Topology) -> NDArray[np.float64]:
    """The positions of the members, from -1 to 1: on a circle, the lowest rank on top, the others clockwise.

    The centre of a star is in the middle.
    """
    others = [rank for rank in topology.members if rank != topology.members[0]]
    star = len(others) > 1 and all(set(topology.neighbours(rank)) == {topology.members[0]} for rank in others)
    around = len(others) if star else len(topology.members)
    angles = 2.0 * np.pi * np.arange(around) / around
    circle = np.column_stack([np.sin(angles), np.cos(angles)])
    return np.vstack([np.zeros((1, 2)), circle]) if star else circle


@styled
def graph_figure(topology: Topology, title: str) -> Figure:
    """A graph on a circle: a node for each member, a line for each edge, wider if the edge counts several times."""
    from matplotlib.collections import LineCollection

    peers = len(topology.members)
    positions = layout(topology)
    index = {rank: number for number, rank in enumerate(topology.members)}
    counts = Counter(
        (index[rank], index[peer]) for rank in topology.members for peer in topology.neighbours(rank) if rank < peer
    )
    figure = new_figure(5.0, 5.2)
    axes = figure.add_subplot()
    lines = [positions[list(pair)] for pair in counts]
    # Many lines are drawn thin and pale, so that they do not hide each other.
    thin = min(1.0, 4.0 * peers / max(1, len(lines)))
    widths = [1.4 * thin * count for count in counts.values()]
    axes.add_collection(LineCollection(lines, linewidths=widths, colors=COLOURS[0], alpha=0.3 + 0.5 * thin, zorder=1))
    labelled = peers <= LABELLED_MAX
    size = 260.0 * min(1.0, 20.0 / peers) if labelled else 8.0
    axes.scatter(positions[:, 0], positions[:, 1], s=size, color="white", edgecolors=INK, linewidths=0.8, zorder=2)
    if labelled:
        font = min(9.0, 9.0 * (20.0 / peers) ** 0.5)
        for rank, (x, y) in zip(topology.members, positions, strict=True):
            axes.text(x, y, str(rank), ha="center", va="center_baseline", fontsize=font, zorder=3)
    axes.set_title(title)
    axes.set_aspect("equal")
    axes.set_xlim(-1.15, 1.15)
    axes.set_ylim(-1.15, 1.15)
    axes.axis("off")
    return figure
