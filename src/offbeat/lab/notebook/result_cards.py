"""What notebooks show of a run, its summary, its records, and a comparison: the table and figures of the report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from offbeat.core.notebook_html import notebook_html
from offbeat.core.workload import Target
from offbeat.errors import MissingDependency
from offbeat.lab.notebook.card import card, paragraph, table
from offbeat.lab.plots.figures import FigureSpec, report_figures
from offbeat.lab.report.formatting import plural
from offbeat.lab.report.html_parts import failures_html, figure_svg, notices_html, table_html
from offbeat.lab.report.table import RATIOS, Column, columns, goal, headline
from offbeat.lab.simulated_runs import Run
from offbeat.records.comparison import Comparison
from offbeat.records.metrics import Summary, target_of
from offbeat.records.schema import RunRecords

FIGURES = {"accuracy": "accuracy-over-time", "loss": "loss-over-time"}
"""The figure of each metric: that of the target is drawn, or the first with records."""
TIMELINE = "computing-and-waiting"


@notebook_html.register
def comparison_card(comparison: Comparison) -> str:
    """Headline, table and figures of a comparison."""
    return card(
        headline(comparison),
        failures_html(comparison),
        f"<table>{table_html(comparison, _shown(comparison))}</table>",
        paragraph(_about(comparison), quiet=True),
        *_figures(comparison.runs, comparison.target),
        notices_html(comparison.runs),
    )


@notebook_html.register
def run_card(run: Run) -> str:
    """Outcome, table and figures of a run."""
    records, target = run.records, target_of(run.records.header)
    return card(
        f"{_title(run.summary)}, seed {run.summary.seed}: {outcome(run.summary, target)}",
        _row(run.summary, target),
        *_figures([records], target),
        notices_html([records]),
    )


@notebook_html.register
def summary_card(summary: Summary) -> str:
    """Outcome and table of a run, without figures."""
    return card(f"{_title(summary)}, seed {summary.seed}: {outcome(summary, None)}", _row(summary, None))


@notebook_html.register
def records_card(run: RunRecords) -> str:
    """How many records of each kind there are."""
    header = run.header
    rows = [(kind, f"{count:,}") for kind, count in run.counts().items()]
    return card(
        f"Records of {header.label} on {header.workload}, seed {header.seed}",
        table(("kind", "records"), rows, right=("records",)),
        paragraph('to_pandas("round") makes a table of the records of one kind.', quiet=True) if rows else "",
    )


def outcome(summary: Summary, target: Target | None) -> str:
    """How a run has ended, in a phrase; `target` is what it was timed against, None if that is unknown."""
    if summary.failure is not None:
        return f"failed: {summary.failure}"
    what = "the target" if target is None else goal(target)
    if summary.seconds_to_target is not None:
        return f"{what} reached after {summary.seconds_to_target:.1f} s of {summary.seconds:.1f} s"
    trained = f"{summary.samples:,} samples in {summary.seconds:.1f} s"
    return trained if target is None else f"{what} not reached; {trained}"


def _title(summary: Summary) -> str:
    return f"{summary.strategy} on {summary.workload}, {plural(summary.workers, 'worker')}"


def _row(summary: Summary, target: Target | None) -> str:
    """The table of one run: that of a comparison without the ratios to a baseline."""
    alone = Comparison.of_summaries([summary], target)
    shown = [column for column in _shown(alone) if column not in RATIOS]
    return f"<table>{table_html(alone, shown)}</table>"


def _shown(comparison: Comparison) -> list[Column]:
    return [column for column in columns(comparison) if not column.on_page_only]


def _about(comparison: Comparison) -> str:
    seeds = len({summary.seed for summary in comparison.summaries})
    means = "Means over seeds, ± half of a 95% interval; " if seeds > 1 else ""
    workers = " or ".join(map(str, sorted({summary.workers for summary in comparison.summaries})))
    text = f"workload {comparison.summaries[0].workload}, {workers} workers, {plural(seeds, 'seed')}"
    return f"{means}{text}." if means else f"{text[0].upper()}{text[1:]}."


def _figures(runs: Sequence[RunRecords], target: Target | None) -> list[str]:
    """The figure of the metric and the timeline, as far as they are recorded; without matplotlib, what installs it."""
    specs = {spec.key: spec for spec in report_figures(runs)} if runs else {}
    metric = FIGURES.get(target.metric if target else "", "")
    first = next((key for key in (metric, *FIGURES.values()) if key in specs), None)
    try:
        return [_figure(specs[key], runs) for key in (first, TIMELINE) if key in specs]
    except MissingDependency as missing:
        return [paragraph(f"No figures: {missing}", quiet=True)]


def _figure(spec: FigureSpec, runs: Sequence[RunRecords]) -> str:
    svg = figure_svg(spec, runs, f'aria-label="{escape(spec.title)}"')
    return f'<figure>\n{svg}\n<figcaption class="quiet">{escape(spec.caption)}</figcaption>\n</figure>'
