"""One legend for all that is drawn in a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from offbeat.lab.plots.looks import Look

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

COLUMNS_MAX = 6
HANDLE_INCHES = 0.62
SIGN_INCHES = 0.085


def add_legend(figure: Figure, looks: Mapping[str, Look], names: Mapping[str, str] | None = None) -> None:
    """Name the labels that are drawn on any axes, above them; `names` are what the legend calls them instead."""
    drawn = {label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]}
    shown = {(names or {}).get(label, label): look for label, look in looks.items() if label in drawn}
    place_legend(figure, [sign(name, look) for name, look in shown.items()])


def place_legend(figure: Figure, handles: list[Line2D]) -> None:
    """In as many columns as the longest name leaves room for."""
    if handles:
        longest = max(len(str(handle.get_label())) for handle in handles)
        columns = int(figure.get_figwidth() / (HANDLE_INCHES + SIGN_INCHES * longest))
        rows = math.ceil(len(handles) / max(1, min(columns, COLUMNS_MAX)))
        columns = math.ceil(len(handles) / rows)
        figure.legend(handles=handles, loc="outside upper left", ncols=columns, handlelength=2.6)


def sign(name: str, look: Look) -> Line2D:
    """A look as a legend shows it."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=look.colour, linestyle=look.dashes, marker=look.marker, markeredgewidth=0, label=name)
