"""A graph on a circle: a dot for each peer, a line for each edge, wider where it counts more than once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offbeat.lab.plots.looks import COLOURS
from offbeat.lab.plots.style import INK, new_figure, styled
from offbeat.topology import Topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELLED_MAX = 64
"""Up to so many peers each dot holds its rank."""


def layout(topology: Topology) -> NDArray[np.float64]:
    """Where the members stand, from -1 to 1: on a circle, the lowest on top, the others clockwise.

    One that is everybody's only neighbour stands in the middle.
    """
    others = [rank for rank in topology.members if rank != topology.members[0]]
    star = len(others) > 1 and all(set(topology.neighbours(rank)) == {topology.members[0]} for rank in others)
    around = len(others) if star else len(topology.members)
    angles = 2.0 * np.pi * np.arange(around) / around
    circle = np.column_stack([np.sin(angles), np.cos(angles)])
    return np.vstack([np.zeros((1, 2)), circle]) if star else circle


@styled
def graph_figure(topology: Topology, title: str) -> Figure:
    """The members in their places, with their ranks where there is room."""
    from matplotlib.collections import LineCollection

    peers = len(topology.members)
    places = layout(topology)
    index = {rank: place for place, rank in enumerate(topology.members)}
    counts = Counter(
        (index[rank], index[peer]) for rank in topology.members for peer in topology.neighbours(rank) if rank < peer
    )
    figure = new_figure(5.0, 5.2)
    axes = figure.add_subplot()
    lines = [places[list(pair)] for pair in counts]
    # Many lines hide one another; thin and pale ones show where they are dense.
    thin = min(1.0, 4.0 * peers / max(1, len(lines)))
    widths = [1.4 * thin * count for count in counts.values()]
    axes.add_collection(LineCollection(lines, linewidths=widths, colors=COLOURS[0], alpha=0.3 + 0.5 * thin, zorder=1))
    labelled = peers <= LABELLED_MAX
    size = 260.0 * min(1.0, 20.0 / peers) if labelled else 8.0
    axes.scatter(places[:, 0], places[:, 1], s=size, color="white", edgecolors=INK, linewidths=0.8, zorder=2)
    if labelled:
        font = min(9.0, 9.0 * (20.0 / peers) ** 0.5)
        for rank, (x, y) in zip(topology.members, places, strict=True):
            axes.text(x, y, str(rank), ha="center", va="center_baseline", fontsize=font, zorder=3)
    axes.set_title(title)
    axes.set_aspect("equal")
    axes.set_xlim(-1.15, 1.15)
    axes.set_ylim(-1.15, 1.15)
    axes.axis("off")
    return figure
