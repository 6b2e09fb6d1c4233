"""Figures of one plot, panels of several plots, and the table of figures of the report.

A plot on one pair of axes has a name in the tables of `line_plots.py` and `distributions.py`. Each function that draws
takes runs and returns a matplotlib `Figure`; `style.save` and `style.svg_text` write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, unknown
from offbeat.lab.plots.distributions import HISTOGRAMS, distributions, draw_histogram_plot
from offbeat.lab.plots.line_plots import (
    LINE_PLOTS,
    QUALITY_OVER_BYTES,
    draw_line_plot,
    line_plot,
    metric_over_bytes,
)
from offbeat.lab.plots.rank_pairs import exchange_maps
from offbeat.lab.plots.style import FORMATS, WIDTH_INCHES, Groups, add_legend, new_figure, save_as, styled
from offbeat.lab.plots.timeline import timeline
from offbeat.records.exchanges import consensus_series, exchanges
from offbeat.records.schema import Round, RunRecords, Update, of_kind
from offbeat.records.thinning import Reads

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELLS: dict[str, Callable[..., None]] = {
    **{name: partial(draw_line_plot, name) for name in LINE_PLOTS},
    **{name: partial(draw_histogram_plot, name) for name in HISTOGRAMS},
}
"""The plots that a panel can hold, by name."""


def cell_reads(name: str) -> Reads:
    """The records that a plot of `CELLS` is drawn from."""
    return LINE_PLOTS[name].reads if name in LINE_PLOTS else HISTOGRAMS[name].reads


CELL_INCHES = (3.6, 2.5)
LEGEND_INCHES = 0.5


@styled
def plot(runs: Sequence[RunRecords], name: str) -> Figure:
    """One line plot by its name in `LINE_PLOTS`, with a legend."""
    groups = Groups.of(runs)
    spec = line_plot(name, runs)
    figure = new_figure(WIDTH_INCHES, spec.height_inches)
    draw_line_plot(name, figure.add_subplot(), groups)
    names = {label: spec.legend_name(label, group) for label, group in groups.runs.items()}
    add_legend(figure, groups.looks, names)
    return figure


@styled
def panel(runs: Sequence[RunRecords], cells: Sequence[Sequence[str]]) -> Figure:
    """Several plots with one legend. `cells` has their names in `CELLS`, row by row; "" leaves a cell empty."""
    require(any(name for row in cells for name in row), "a panel needs a cell; for example [['accuracy over time']]")
    for name in (name for row in cells for name in row):
        if name and name not in CELLS:
            raise unknown("cell", name, CELLS)
    across = max(len(row) for row in cells)
    groups = Groups.of(runs)
    width, height = CELL_INCHES
    figure = new_figure(width * across, height * len(cells) + LEGEND_INCHES)
    grid = figure.subplots(len(cells), across, squeeze=False)
    for row, names in zip(grid, cells, strict=True):
        for axes, name in zip(row, [*names, *[""] * (across - len(names))], strict=True):
            if name:
                CELLS[name](axes, groups)
            else:
                axes.remove()
    add_legend(figure, groups.looks)
    return figure


# The figures of the report


@dataclass(frozen=True)
class FigureSpec:
    """A figure of the report.

    title: what it shows.
    caption: how to read it.
    draw: draws it from runs.
    is_recorded: whether a run has records for it; the figure is left out if no run has.
    """

    title: str
    caption: str
    draw: Callable[[Sequence[RunRecords]], Figure]
    is_recorded: Callable[[RunRecords], bool]

    @property
    def key(self) -> str:
        """The title as a file name and as an anchor in the page."""
        return self.title.lower().replace(" ", "-")


def report_figures(runs: Sequence[RunRecords]) -> Iterator[FigureSpec]:
    """The figures for which these runs have records, in the order of the report."""
    metric = metric_over_bytes(runs).capitalize()
    is_estimated = any(series.estimated for series in map(consensus_series, runs) if series.points)
    estimated = ESTIMATED if is_estimated else ""
    for spec in REPORT_FIGURES:
        if any(spec.is_recorded(run) for run in runs):
            yield replace(
                spec, title=spec.title.format(metric=metric), caption=spec.caption.format(estimated=estimated)
            )


def write_figures(runs: Sequence[RunRecords], directory: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write each figure of the report as files of its own, named by its key; returns their paths."""
    try:
        return [
            path for spec in report_figures(runs) for path in save_as(spec.draw(runs), directory / spec.key, formats)
        ]
    except OSError as error:
        raise ConfigurationError(
            f"cannot write figures to {directory} ({error.strerror}); name another place with --figures"
        ) from None


def _line_figure(
    title: str, caption: str, name: str, is_recorded: Callable[[RunRecords], bool] | None = None
) -> FigureSpec:
    """A figure of one line plot; by default a run has records for it if its curve has points."""

    def has_points(run: RunRecords) -> bool:
        return len(line_plot(name, [run]).measure(run).over) > 0

    return FigureSpec(title, caption, partial(plot, name=name), is_recorded or has_points)


def _has_updates(run: RunRecords) -> bool:
    return any(of_kind(run, Update))


BAND = "The line is the mean over seeds, the band runs from the lowest to the highest seed"
ESTIMATED = (
    " Estimated: in a live run no process has all models, so the distances of the pairs that averaged are taken for "
    "those of all pairs. Where few pairs are neighbours, that is too low."
)
REPORT_FIGURES = (
    _line_figure(
        "Accuracy over time",
        f"Held-out accuracy; further left and higher is better. {BAND}; the dashed line is the target.",
        "accuracy over time",
    ),
    _line_figure(
        "Top-5 accuracy over time",
        f"How often the right class is among the five likeliest, held out. {BAND}.",
        "top-5 over time",
    ),
    _line_figure("Loss over time", f"Held-out loss; further left and lower is better. {BAND}.", "loss over time"),
    _line_figure(
        "Training loss over time",
        "The mean loss of the latest training samples, a fiftieth of all samples of a run, each at the parameters "
        f"before its update. {BAND}.",
        "training loss over time",
    ),
    _line_figure(
        "{metric} over bytes sent",
        "The same against the bytes that all ranks together had sent by then, message headers included; further left "
        f"is less traffic. {BAND}. Runs without records of traffic are left out.",
        QUALITY_OVER_BYTES,
    ),
    FigureSpec(
        "Computing and waiting",
        "The beginning of one run of each strategy, one row per rank. Full colour is computing, pale colour is "
        "induced delay, a thin line is waiting; the marks above, if there is a hub, are its updates.",
        timeline,
        lambda run: any(of_kind(run, Round)),
    ),
    _line_figure(
        "Samples applied over time",
        f"The steeper, the more samples per second are applied to the parameters. {BAND}.",
        "samples over time",
        _has_updates,
    ),
    FigureSpec(
        "Rounds and updates in detail",
        "Distributions over all seeds: how long rounds took, induced delay included, and how long workers waited "
        "before them; how many samples and messages each update had, and how many versions old a message was when it "
        "was applied. Each panel has its own height; the number beside it is the share of the tallest bar.",
        distributions,
        _has_updates,
    ),
    _line_figure(
        "Consensus distance over time",
        "How far the models of the peers are apart: the mean over peers of the squared distance from the mean of all "
        f"models, on a logarithmic axis. Lower is closer. {BAND}.{{estimated}}",
        "consensus over time",
        lambda run: bool(consensus_series(run).points),
    ),
    FigureSpec(
        "Exchanges of pairs",
        "How often each pair of peers averaged, in one run of each strategy: the darker, the more often; a blank cell "
        "is never. The bars on the right are the exchanges of each peer with all others.",
        exchange_maps,
        lambda run: bool(exchanges(run)),
    ),
)
"""All figures of the report, in its order."""
