"""Timelines of computing and waiting: one panel per strategy, one row per rank, updates of the hub as ticks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from offbeat.lab.plots.line_plots import TIME
from offbeat.lab.plots.looks import Look
from offbeat.lab.plots.style import INK, WIDTH_INCHES, Groups, new_figure, styled
from offbeat.records import curves
from offbeat.records.metrics import summarize
from offbeat.records.schema import RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS_MAX = 16
ROW_INCHES = 0.125
PANEL_INCHES = 0.42
WAITING_ALPHA = 0.28
DELAYED_ALPHA = 0.4


@styled
def timeline(runs: Sequence[RunRecords], seconds: float | None = None) -> Figure:
    """The first `seconds` of one run per strategy; None: about ten rounds of the slowest.

    The runs have the same seed if all strategies have one in common.
    """
    groups = Groups.of(runs)
    shown = groups.one_of_each()
    window = seconds or curves.timeline_seconds(list(shown.values()))
    rows = {label: curves.segments(run, window) for label, run in shown.items()}
    heights = [PANEL_INCHES + ROW_INCHES * (1 + min(len(rows[label]), ROWS_MAX)) for label in shown]
    figure = new_figure(WIDTH_INCHES, 0.8 + sum(heights))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (label, run) in zip(panels, shown.items(), strict=True):
        _panel(axes, run, rows[label], groups.looks[label], window)
    panels[-1].set_xlabel(TIME.label)
    figure.supylabel("rank", fontsize=8.5)
    _legend(figure, with_hub=any(len(curves.hub_updates(run)) for run in shown.values()))
    return figure


def _panel(axes: Axes, run: RunRecords, rows: dict[int, list[curves.Segment]], look: Look, window: float) -> None:
    ranks = list(rows)[:ROWS_MAX]
    _rows(axes, [rows[rank] for rank in ranks], look, window)
    ticks = curves.hub_updates(run)
    ticks = ticks[ticks <= window]
    if len(ticks):
        axes.vlines(ticks, -0.42, 0.42, color=INK, linewidth=0.8)
    labels = ["hub"] if len(ticks) else []
    positions = list(range(0 if labels else 1, len(ranks) + 1))
    axes.set_yticks(positions, [*labels, *(str(rank) for rank in ranks)], fontsize=6.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(ranks) + 0.6, -0.6 if labels else 0.4)
    axes.set_xlim(0, window)
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.set_title(run.header.label, color=look.colour, weight="bold", pad=2)
    axes.set_title(_note(run, len(rows)), loc="right", fontsize=8, pad=2)


def _rows(axes: Axes, rows: list[list[curves.Segment]], look: Look, window: float) -> None:
    waiting, computing, delayed = Bars(window), Bars(window), Bars(window)
    for row, segments in enumerate(rows, start=1):
        for segment in segments:
            compute_start = segment.start + segment.induced_seconds
            waiting.add(segment.start - segment.idle_seconds, segment.start, row, 0.1)
            delayed.add(segment.start, compute_start, row, 0.4)
            computing.add(compute_start, compute_start + segment.compute_seconds, row, 0.4)
    waiting.draw(axes, INK, WAITING_ALPHA)
    computing.draw(axes, look.colour, 1.0)
    delayed.draw(axes, look.colour, DELAYED_ALPHA)


class Bars:
    """Many bars as one path, which takes a tenth of the bytes of separate shapes."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._corners: list[tuple[float, float]] = []

    def add(self, start: float, stop: float, row: float, half: float) -> None:
        """Add a bar from `start` to `stop` seconds; a thin gap at its end separates consecutive rounds."""
        start = max(start, 0.0)
        if stop <= start or start >= self._window:
            return
        gap = self._window / 900
        stop = max(min(stop, self._window) - gap, start + gap)
        self._corners += [(start, row - half), (stop, row - half), (stop, row + half), (start, row + half), (0, 0)]

    def draw(self, axes: Axes, colour: str, alpha: float) -> None:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        if self._corners:
            bar = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
            path = Path(self._corners, bar * (len(self._corners) // len(bar)))
            axes.add_patch(PathPatch(path, facecolor=colour, alpha=alpha, linewidth=0))


def _note(run: RunRecords, ranks: int) -> str:
    share = summarize(run).idle_share
    notes = [] if share is None else [f"waiting {share:.0%} of the whole run"]
    if ranks > ROWS_MAX:
        notes.append(f"{ROWS_MAX} of {ranks} ranks shown")
    return ", ".join(notes)


def _legend(figure: Figure, with_hub: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grey = "#7f7f7f"
    handles = [
        Patch(facecolor=grey, label="computing"),
        Patch(facecolor=grey, alpha=DELAYED_ALPHA, label="induced delay"),
        Line2D([], [], color=INK, alpha=WAITING_ALPHA, linewidth=2.5, label="waiting"),
    ]
    if with_hub:
        handles.append(Line2D([], [], color=INK, linestyle="", marker="|", markersize=8, label="update of the hub"))
    figure.legend(handles=handles, loc="outside upper left", ncols=4, handlelength=1.6)
