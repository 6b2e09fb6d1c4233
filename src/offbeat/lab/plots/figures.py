"""The figures over all seeds: quality against time and bytes, training loss, samples and distance against time.

Every function takes runs and returns a matplotlib `Figure`; `style.save` and `style.svg_text` write it. Who
computes and who waits is drawn in `timeline.py`, and how rounds and updates are made up in `histograms.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, unknown
from offbeat.lab.plots import line_plots as cells
from offbeat.lab.plots.distributions import HISTOGRAMS, distributions
from offbeat.lab.plots.line_plots import CURVES, Cell, metric_over_bytes
from offbeat.lab.plots.rank_pairs import who_talked_to_whom
from offbeat.lab.plots.style import FORMATS, WIDTH_INCHES, Groups, add_legend, new_figure, save_as, styled
from offbeat.lab.plots.timeline import timeline
from offbeat.records import curves
from offbeat.records.exchanges import consensus_series, exchanges
from offbeat.records.metrics import evaluations
from offbeat.records.schema import Round, RunRecords, Traffic, Update

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


# Several small plots in one figure, by name, with one legend for all.


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


# The figures about runs, each with what it shows: for the page, and for files of their own.


@dataclass(frozen=True)
class Drawing:
    """One figure: its title, how to read it, and how it is drawn."""

    title: str
    caption: str
    runs: Sequence[RunRecords]
    draw: Callable[[Sequence[RunRecords]], Figure]

    @property
    def key(self) -> str:
        """What it shows, as the name of a file and of a place in the page."""
        return self.title.lower().replace(" ", "-")

    @property
    def figure(self) -> Figure:
        return self.draw(self.runs)


def drawings(runs: Sequence[RunRecords]) -> Iterator[Drawing]:
    """What can be drawn of these runs, in the order of the page."""
    curve = [evaluation for run in runs for evaluation in evaluations(run)]
    if any(evaluation.accuracy is not None for evaluation in curve):
        yield Drawing("Accuracy over time", ACCURACY, runs, accuracy_over_time)
    if any(len(curves.evaluation_curve(run, "accuracy_top5").over) for run in runs):
        yield Drawing("Top-5 accuracy over time", TOP5, runs, top5_over_time)
    if curve:
        yield Drawing("Loss over time", LOSS, runs, loss_over_time)
    if any(len(curves.training_loss_curve(run).over) for run in runs):
        yield Drawing("Training loss over time", TRAINING_LOSS, runs, training_loss_over_time)
    if curve and any(isinstance(record, Traffic) for run in runs for record in run.records):
        name = metric_over_bytes(runs).capitalize()
        yield Drawing(f"{name} over bytes sent", OVER_BYTES, runs, quality_over_bytes)
    if any(isinstance(record, Round) for run in runs for record in run.records):
        yield Drawing("Who computes and who waits", TIMELINE, runs, timeline)
    if any(isinstance(record, Update) for run in runs for record in run.records):
        yield Drawing("Samples applied over time", SAMPLES, runs, samples_over_time)
        yield Drawing("Rounds and updates in detail", DISTRIBUTIONS, runs, distributions)
    yield from _of_peers(runs)


def _of_peers(runs: Sequence[RunRecords]) -> Iterator[Drawing]:
    """Of runs whose peers have a model each."""
    series = [found for run in runs if (found := consensus_series(run)).points]
    if series:
        estimated = any(one.estimated for one in series)
        caption = CONSENSUS + ESTIMATED * estimated
        yield Drawing("Consensus distance over time", caption, runs, consensus_over_time)
    if any(exchanges(run) for run in runs):
        yield Drawing("Who talked to whom", PAIRS, runs, who_talked_to_whom)


def write_figures(runs: Sequence[RunRecords], directory: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write each figure as files of its own, named by what it shows."""
    try:
        return [path for drawn in drawings(runs) for path in save_as(drawn.figure, directory / drawn.key, formats)]
    except OSError as error:
        raise ConfigurationError(
            f"cannot write figures to {directory} ({error.strerror}); name another place with --figures"
        ) from None


BAND = "The line is the mean over seeds, the band runs from the lowest to the highest seed"
ACCURACY = f"Held-out accuracy; further left and higher is better. {BAND}; the dashed line is the target."
TOP5 = f"How often the right class is among the five likeliest, held out. {BAND}."
LOSS = f"Held-out loss; further left and lower is better. {BAND}."
TRAINING_LOSS = (
    "The mean loss of the samples that were trained on last, a fiftieth of all of a run, before they changed the "
    f"parameters. {BAND}."
)
OVER_BYTES = (
    "The same against what all ranks together had sent by then, heads of messages included; further left is less "
    f"traffic. {BAND}. Runs that did not count their traffic are left out."
)
TIMELINE = (
    "The beginning of one run of each strategy, one row a rank. Full colour is computing, pale colour is delay that "
    "was put in on purpose, a thin line is waiting; the marks above, where there is a hub, are its updates. Look for "
    "thin lines: that is time paid for and not used."
)
SAMPLES = f"The steeper, the more samples a second go into the parameters. {BAND}."
DISTRIBUTIONS = (
    "How often what happened, over all seeds: how long rounds took, induced delay included, and how long they were "
    "waited for; how many samples and messages each update was made of, and how many versions old a message was when "
    "it was applied. Each panel has its own height; the number beside it is the tallest bar's share."
)
CONSENSUS = (
    "How far the peers' models are apart: the mean over peers of the squared distance from the mean of all models, on "
    f"a logarithmic axis. Lower is closer together. {BAND}."
)
ESTIMATED = (
    " Estimated: nobody sees all models of a live run at once, so the distances of the pairs that averaged are taken "
    "for those of all pairs. Where few pairs are neighbours, that is too low."
)
PAIRS = (
    "How often each two peers averaged, in one run of each strategy: the darker, the more often, and blank is never. "
    "The bars beside it are how often each peer averaged with any other."
)
