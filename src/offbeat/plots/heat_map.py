"""Heat maps of what goes from rank to rank: a panel for each quantity, a row for each sender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from offbeat.plots.style import INK, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUMBERS_RANKS_MAX = 16
"""Up to so many ranks each cell holds its number."""


@dataclass(frozen=True)
class Panel:
    """One quantity. None stands for a pair that has none, such as a rank and itself."""

    title: str
    values: Sequence[Sequence[float | None]]
    more_is_better: bool


@styled
def heat_maps(panels: Sequence[Panel]) -> Figure:
    """The panels side by side, each on a scale from zero."""
    from matplotlib.figure import Figure

    ranks = max(len(panel.values) for panel in panels)
    side = min(1.6 + 0.55 * ranks, 9.0)
    figure = Figure(figsize=(side * len(panels) + 0.6, side), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(figure, axes, panel)
    return figure


def _draw(figure: Figure, axes: Axes, panel: Panel) -> None:
    values = np.array([[np.nan if value is None else value for value in row] for row in panel.values])
    top = float(np.nanmax(values)) if np.isfinite(values).any() else 1.0
    colours = "Blues" if panel.more_is_better else "Oranges"
    image = axes.imshow(values, cmap=colours, vmin=0.0, vmax=top)
    axes.grid(False)
    axes.set_title(panel.title)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    ticks = range(0, len(values), max(1, len(values) // 16))
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    figure.colorbar(image, ax=axes, shrink=0.8)
    if len(values) > NUMBERS_RANKS_MAX:
        return
    for row, column in zip(*np.nonzero(np.isfinite(values)), strict=True):
        value = float(values[row, column])
        ink = "white" if value > 0.6 * top else INK
        axes.text(column, row, f"{value:.3g}", ha="center", va="center", color=ink, fontsize=8)
