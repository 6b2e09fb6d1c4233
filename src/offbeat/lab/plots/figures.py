"""Figures over all runs: one plot, a panel of several plots, and the list of figures that the report shows.

Plots on one pair of axes have names, from the tables of `line_plots.py` and `distributions.py`. Every function that
draws takes runs and returns a matplotlib `Figure`; `style.save` and `style.svg_text` write it.
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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELLS: dict[str, Callable[..., None]] = {
    **{name: partial(draw_line_plot, name) for name in LINE_PLOTS},
    **{name: partial(draw_histogram_plot, name) for name in HISTOGRAMS},
}
"""The plots that a panel can hold, by name."""
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
    """Several plots with one legend for all. `cells` names them row by row, from `CELLS`; "" leaves a place empty."""
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
    is_recorded: whether a run has something to show in it; without any such run the figure is left out.
    """

    title: str
    caption: str
    draw: Callable[[Sequence[RunRecords]], Figure]
    is_recorded: Callable[[RunRecords], bool]

    @property
    def key(self) -> str:
        """The title as the name of a file and of an anchor in the page."""
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


def _line_figure(title: str, caption: str, name: str) -> FigureSpec:
    return FigureSpec(
        title, caption, partial(plot, name=name), lambda run: bool(len(line_plot(name, [run]).measure(run).over))
    )


def _has_updates(run: RunRecords) -> bool:
    return any(of_kind(run, Update))


BAND = "The line is the mean over seeds, the band runs from the lowest to the highest seed"
ESTIMATED = (
    " Estimated: nobody sees all models of a live run at once, so the distances of the pairs that averaged are taken "
    "for those of all pairs. Where few pairs are neighbours, that is too low."
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
        "The mean loss of the samples that were trained on last, a fiftieth of all of a run, before they changed the "
        f"parameters. {BAND}.",
        "training loss over time",
    ),
    _line_figure(
        "{metric} over bytes sent",
        "The same against what all ranks together had sent by then, heads of messages included; further left is less "
        f"traffic. {BAND}. Runs that did not count their traffic are left out.",
        QUALITY_OVER_BYTES,
    ),
    FigureSpec(
        "Who computes and who waits",
        "The beginning of one run of each strategy, one row a rank. Full colour is computing, pale colour is delay "
        "that was put in on purpose, a thin line is waiting; the marks above, where there is a hub, are its updates. "
        "Look for thin lines: that is time paid for and not used.",
        timeline,
        lambda run: any(of_kind(run, Round)),
    ),
    FigureSpec(
        "Samples applied over time",
        f"The steeper, the more samples a second go into the parameters. {BAND}.",
        partial(plot, name="samples over time"),
        _has_updates,
    ),
    FigureSpec(
        "Rounds and updates in detail",
        "How often what happened, over all seeds: how long rounds took, induced delay included, and how long they were "
        "waited for; how many samples and messages each update was made of, and how many versions old a message was "
        "when it was applied. Each panel has its own height; the number beside it is the tallest bar's share.",
        distributions,
        _has_updates,
    ),
    FigureSpec(
        "Consensus distance over time",
        "How far the peers' models are apart: the mean over peers of the squared distance from the mean of all models, "
        f"on a logarithmic axis. Lower is closer together. {BAND}.{{estimated}}",
        partial(plot, name="consensus over time"),
        lambda run: bool(consensus_series(run).points),
    ),
    FigureSpec(
        "Who talked to whom",
        "How often each two peers averaged, in one run of each strategy: the darker, the more often, and blank is "
        "never. The bars beside it are how often each peer averaged with any other.",
        exchange_maps,
        lambda run: bool(exchanges(run)),
    ),
)
"""All figures of the report, in its order."""
