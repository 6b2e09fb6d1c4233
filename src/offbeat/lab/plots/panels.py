"""Several small plots in one figure, by name, with one legend for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offbeat.core.validation import require
from offbeat.errors import unknown
from offbeat.lab.plots.cells import CURVES, Cell
from offbeat.lab.plots.groups import Groups
from offbeat.lab.plots.histograms import HISTOGRAMS
from offbeat.lab.plots.legend import add_legend
from offbeat.lab.plots.style import new_figure, styled
from offbeat.records.files import RunRecords

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELLS: dict[str, Cell] = {**CURVES, **HISTOGRAMS}
CELL_INCHES = (3.6, 2.5)
LEGEND_INCHES = 0.5


@styled
def panel(runs: Sequence[RunRecords], cells: Sequence[Sequence[str]]) -> Figure:
    """A plot for each name of `cells`, row by row; "" leaves a place empty. `CELLS` lists the names."""
    require(any(name for row in cells for name in row), "a panel needs a cell; for example [['accuracy over time']]")
    for name in (name for row in cells for name in row):
        if name and name not in CELLS:
            raise unknown("cell", name, CELLS)
    across = max(len(row) for row in cells)
    groups = Groups.of(runs)
    width, height = CELL_INCHES
    figure = new_figure(width * across, height * len(cells) + LEGEND_INCHES)
    table = figure.subplots(len(cells), across, squeeze=False)
    for row, names in zip(table, cells, strict=True):
        for axes, name in zip(row, [*names, *[""] * (across - len(names))], strict=True):
            if name:
                CELLS[name](axes, groups)
            else:
                axes.remove()
    add_legend(figure, groups.looks)
    return figure
