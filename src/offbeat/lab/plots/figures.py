"""The figures over all seeds: quality against time and bytes, training loss, samples and distance against time.

Every function takes runs and returns a matplotlib `Figure`; `style.save` and `style.svg_text` write it. Who
computes and who waits is drawn in `timeline.py`, and how rounds and updates are made up in `histograms.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from offbeat.lab.plots import cells
from offbeat.lab.plots.groups import Groups
from offbeat.lab.plots.legend import add_legend
from offbeat.lab.plots.style import WIDTH_INCHES, new_figure, styled
from offbeat.records.exchanges import consensus_series
from offbeat.records.files import RunRecords

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def accuracy_over_time(runs: Sequence[RunRecords]) -> Figure:
    """Held-out accuracy against time: the mean over seeds, and a band from the lowest to the highest seed."""
    return _one(cells.accuracy_over_time, Groups.of(runs), 4.0)


@styled
def top5_over_time(runs: Sequence[RunRecords]) -> Figure:
    """How often the right class is among the five likeliest, against time."""
    return _one(cells.top5_over_time, Groups.of(runs), 4.0)


@styled
def loss_over_time(runs: Sequence[RunRecords]) -> Figure:
    """Held-out loss against time, on a logarithmic axis where it falls far."""
    return _one(cells.loss_over_time, Groups.of(runs), 4.0)


@styled
def training_loss_over_time(runs: Sequence[RunRecords]) -> Figure:
    """The mean loss of the last training samples against time."""
    return _one(cells.training_loss_over_time, Groups.of(runs), 3.6)


@styled
def quality_over_bytes(runs: Sequence[RunRecords]) -> Figure:
    """What the target is set in, or else the loss, against the bytes that all ranks together had sent."""
    return _one(cells.quality_over_bytes, Groups.of(runs), 4.0)


@styled
def samples_over_time(runs: Sequence[RunRecords]) -> Figure:
    """Samples applied against time: the slope is the throughput."""
    return _one(cells.samples_over_time, Groups.of(runs), 3.2)


@styled
def consensus_over_time(runs: Sequence[RunRecords]) -> Figure:
    """How far apart peers are against time, on a logarithmic axis; strategies that keep one model are left out."""
    groups = Groups.of(runs)
    names = {label: _consensus_name(label, group) for label, group in groups.runs.items()}
    return _one(cells.consensus_over_time, groups, 3.6, names)


def _consensus_name(label: str, group: Sequence[RunRecords]) -> str:
    series = [consensus_series(run) for run in group]
    estimated = any(one.estimated for one in series if one.points)
    return f"{label}, estimated from exchanges" if estimated else label


def _one(cell: cells.Cell, groups: Groups, height: float, names: Mapping[str, str] | None = None) -> Figure:
    figure = new_figure(WIDTH_INCHES, height)
    cell(figure.add_subplot(), groups)
    add_legend(figure, groups.looks, names)
    return figure
