"""The figures over all seeds: quality against time and bytes, samples against time, and how updates are made up.

Every function takes runs and returns a matplotlib `Figure`; `style.save` and `style.svg_text` write it. Who
computes and who waits is drawn in `timeline.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from offbeat import curves
from offbeat.analysis import Metric, Target, target_of
from offbeat.exchanges import consensus_series
from offbeat.plots.style import INK, Look, looks, styled
from offbeat.records.files import RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 9.0
LOG_FROM = 10.0
"""A loss that falls by this factor is drawn on a logarithmic axis, and so are bytes that differ by it among runs."""
BINS = 40


def one_of_each(runs: Sequence[RunRecords]) -> dict[str, RunRecords]:
    """One run of each strategy under its label, of the same seed where one is common to all strategies."""
    groups = by_strategy(runs)
    common = set.intersection(*({run.header.seed for run in group} for group in groups.values())) if groups else set()
    seed = min(common, default=None)
    return {label: next((run for run in group if run.header.seed == seed), group[0]) for label, group in groups.items()}


def by_strategy(runs: Sequence[RunRecords]) -> dict[str, list[RunRecords]]:
    """Runs under their labels, in order of first appearance."""
    groups: dict[str, list[RunRecords]] = {}
    for run in runs:
        groups.setdefault(run.header.label, []).append(run)
    return groups


@styled
def accuracy_over_time(runs: Sequence[RunRecords]) -> Figure:
    """Held-out accuracy against time: the mean over seeds, and a band from the lowest to the highest seed."""
    figure, axes = _quality(runs, "accuracy")
    axes.set_ylabel("held-out accuracy")
    return figure


@styled
def loss_over_time(runs: Sequence[RunRecords]) -> Figure:
    """Held-out loss against time, on a logarithmic axis where it falls far."""
    figure, axes = _quality(runs, "loss")
    axes.set_ylabel("held-out loss")
    _logarithmic_where_it_falls_far(axes, runs)
    return figure


@styled
def quality_over_bytes(runs: Sequence[RunRecords]) -> Figure:
    """What the target is set in, or else the loss, against the bytes that all ranks together had sent.

    Bytes are on a logarithmic axis where one run sends many times as much as another: what is frugal is on the left.
    """
    from matplotlib.ticker import EngFormatter, NullFormatter

    metric = metric_over_bytes(runs)
    figure, axes = _quality(runs, metric, curves.quality_over_bytes)
    axes.set_xlabel("sent by all ranks together")
    sent = [curves.quality_over_bytes(run, metric).seconds for run in runs]
    ends = [series[-1] for series in sent if len(series) and series[-1] > 0]
    if ends and max(ends) >= LOG_FROM * min(ends):
        axes.set_xscale("log")
        axes.set_xlim(left=min(series[series > 0].min() for series in sent if len(series) and series[-1] > 0))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.set_ylabel(f"held-out {metric}")
    if metric == "loss":
        _logarithmic_where_it_falls_far(axes, runs)
    return figure


def metric_over_bytes(runs: Sequence[RunRecords]) -> Metric:
    """The metric that is drawn against bytes."""
    return next((target.metric for run in runs if (target := target_of(run.header)) is not None), "loss")


def _logarithmic_where_it_falls_far(axes: Axes, runs: Sequence[RunRecords]) -> None:
    values = np.concatenate([curves.evaluation_curve(run, "loss").values for run in runs] or [np.empty(0)])
    if values.size and values.min() > 0 and values.max() >= LOG_FROM * values.min():
        _logarithmic(axes, values)


def _logarithmic(axes: Axes, values: np.ndarray) -> None:
    """Over few decades, 2 and 5 are marked as well."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    few_decades = values.max() < 1000 * values.min()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_decades else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())


@styled
def samples_over_time(runs: Sequence[RunRecords]) -> Figure:
    """Samples applied against time: the slope is the throughput."""
    figure, axes = _canvas(3.2)
    bands = {label: [curves.samples_curve(run) for run in group] for label, group in by_strategy(runs).items()}
    _draw_bands(axes, bands)
    axes.set_ylabel("samples applied")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylim(bottom=0)
    _legend(figure, axes)
    return figure


@styled
def consensus_over_time(runs: Sequence[RunRecords]) -> Figure:
    """How far apart peers are against time, on a logarithmic axis; strategies that keep one model are left out."""
    figure, axes = _canvas(3.6)
    groups = by_strategy(runs)
    drawn = {label: [curves.consensus_curve(run) for run in group] for label, group in groups.items()}
    names = {label: _consensus_name(label, group) for label, group in groups.items()}
    _draw_bands(axes, drawn, names)
    axes.set_ylabel("consensus distance (squared)")
    values = np.concatenate([curve.values for group in drawn.values() for curve in group] or [np.empty(0)])
    if values.size:
        _logarithmic(axes, values)
    _legend(figure, axes)
    return figure


def _consensus_name(label: str, group: Sequence[RunRecords]) -> str:
    series = [consensus_series(run) for run in group]
    estimated = any(one.estimated for one in series if one.points)
    return f"{label}, estimated from exchanges" if estimated else label


@styled
def updates_made_of(runs: Sequence[RunRecords]) -> Figure:
    """Two histograms per strategy: samples per update, and the staleness of the messages applied."""
    groups = by_strategy(runs)
    figure = _figure(1.0 + 0.72 * len(groups))
    panels = figure.subplots(len(groups), 2, sharex="col", squeeze=False)
    style = looks(groups)
    sizes = {label: curves.batch_sizes(group) for label, group in groups.items()}
    stale = {label: curves.staleness_counts(group) for label, group in groups.items()}
    size_edges, log = _size_edges([size for group in sizes.values() for size in group])
    stale_edges = _staleness_edges(max((age for counts in stale.values() for age in counts), default=0))
    for (left, right), label in zip(panels, groups, strict=True):
        _histogram(left, np.array(sizes[label]), None, size_edges, style[label])
        counts = stale[label]
        _histogram(right, np.array(list(counts)), np.array(list(counts.values())), stale_edges, style[label])
        left.set_title(label, color=style[label].colour, weight="bold", pad=3)
    if log:
        panels[-1][0].set_xscale("log")
    panels[-1][0].set_xlabel("samples per update")
    panels[-1][1].set_xlabel("staleness of a message, in versions")
    panels[-1][1].xaxis.get_major_locator().set_params(integer=True)
    return figure


def _size_edges(sizes: list[int]) -> tuple[np.ndarray, bool]:
    low, high = (max(1, min(sizes)), max(sizes)) if sizes else (1, 1)
    if high > 20 * low:
        return np.geomspace(low / 1.05, high * 1.05, BINS + 1), True
    return np.linspace(0, high * 1.05, BINS + 1), False


def _staleness_edges(oldest: int) -> np.ndarray:
    """Whole versions to a bin, so that no bar stands for more of them than its neighbour."""
    width = max(1, -(-(oldest + 1) // BINS))
    return np.arange(0, max(oldest + 1, 6) + width, width) - 0.5


def _histogram(axes: Axes, values: np.ndarray, weights: np.ndarray | None, edges: np.ndarray, look: Look) -> None:
    heights, _ = np.histogram(values, bins=edges, weights=weights)
    axes.grid(False, axis="x")
    if not heights.sum():
        axes.set_yticks([])
        axes.text(0.5, 0.4, "none recorded", transform=axes.transAxes, ha="center", alpha=0.6)
        return
    shares = heights / heights.sum()
    axes.bar(edges[:-1], shares, width=0.92 * np.diff(edges), align="edge", color=look.colour)
    axes.set_ylim(0, 1.08 * shares.max())
    axes.set_yticks([0, shares.max()], ["", f"{shares.max():.0%}"])
    axes.set_title(f"mean {np.average(values, weights=weights):.3g}", loc="right", fontsize=8, pad=3)


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_INCHES, height), layout="constrained")


def _canvas(height: float) -> tuple[Figure, Axes]:
    figure = _figure(height)
    axes = figure.add_subplot()
    axes.set_xlabel("seconds since the run began")
    return figure, axes


def _quality(
    runs: Sequence[RunRecords],
    metric: Metric,
    curve: Callable[[RunRecords, Metric], curves.Curve] = curves.evaluation_curve,
) -> tuple[Figure, Axes]:
    figure, axes = _canvas(4.0)
    groups = by_strategy(runs)
    _draw_bands(axes, {key: [curve(run, metric) for run in group] for key, group in groups.items()})
    for target in dict.fromkeys(target_of(run.header) for run in runs):
        if target is not None and target.metric == metric:
            _draw_target(axes, target)
    _legend(figure, axes)
    return figure, axes


def _draw_bands(axes: Axes, groups: dict[str, list[curves.Curve]], names: Mapping[str, str] | None = None) -> None:
    """One line and one band a strategy; `names` say what the legend calls them, where that is not their label."""
    style = looks(groups)
    names = names or {}
    for label, group in groups.items():
        over = curves.band([curves.thinned(curve) for curve in group])
        if over is None:
            continue
        look = style[label]
        axes.plot(over.seconds, over.mean, color=look.colour, linestyle=look.dashes, label=names.get(label, label))
        if over.count > 1:
            axes.fill_between(over.seconds, over.low, over.high, color=look.colour, alpha=0.18, linewidth=0)
    axes.set_xlim(left=0)
    if not axes.lines:
        axes.text(0.5, 0.5, "none recorded", transform=axes.transAxes, ha="center", alpha=0.6)


def _draw_target(axes: Axes, target: Target) -> None:
    axes.axhline(target.value, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"target {target.value:g}",
        (1, target.value),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
    )


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=min(len(labels), 6), handlelength=1.8)
