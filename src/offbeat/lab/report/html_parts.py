"""Parts of pages that notebooks show as well: the table of a comparison, failures, notices, a figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from offbeat.lab.plots.figures import FigureSpec
from offbeat.lab.plots.style import svg_text
from offbeat.lab.report.formatting import plural
from offbeat.lab.report.table import Column
from offbeat.records.comparison import Comparison
from offbeat.records.schema import Notice, RunRecords, of_kind

NOTICES_MAX = 50


def failures_html(comparison: Comparison) -> str:
    """The runs that failed, at the top, since the numbers below include them."""
    failed = [summary for summary in comparison.summaries if summary.failure is not None]
    if not failed:
        return ""
    items = "\n".join(
        f"<li><b>{escape(summary.strategy)}</b>, seed {summary.seed}: {escape(summary.failure or '')}</li>"
        for summary in failed
    )
    count = f"{len(failed)} of {plural(len(comparison.summaries), 'run')} failed"
    return f'<section class="failures" role="alert"><h2>{count}</h2>\n<ul>\n{items}\n</ul></section>'


def table_html(comparison: Comparison, shown: Sequence[Column]) -> str:
    """Head and body of the table with these columns, a row for each strategy."""
    heads = "".join(f'<th scope="col">{escape(column.head).replace(chr(10), "<br>")}</th>' for column in shown)
    rows = []
    for strategy in comparison.strategies:
        cells = "".join(f"<td>{escape(column.cell(comparison, strategy))}</td>" for column in shown)
        rows.append(f'<tr><th scope="row">{escape(strategy)}</th>{cells}</tr>')
    return f'<thead><tr><th scope="col">strategy</th>{heads}</tr></thead>\n<tbody>\n' + "\n".join(rows) + "\n</tbody>"


def figure_svg(spec: FigureSpec, runs: Sequence[RunRecords], label: str) -> str:
    """A figure of the report as an SVG element, which has the colour of the text around it.

    spec: the figure
    runs: the runs that it shows
    label: the attribute that names it to a screen reader
    """
    return svg_text(spec.draw(runs)).replace("<svg ", f'<svg role="img" {label} ', 1)


def notices_html(runs: Sequence[RunRecords]) -> str:
    """The notices, equal ones of a strategy once, with their number."""
    counts = Counter((run.header.label, notice.text) for run in runs for notice in of_kind(run, Notice))
    if not counts:
        return ""
    items = [
        f"<li><b>{escape(label)}</b>: {escape(text)}{f' ({count} times)' if count > 1 else ''}</li>"
        for (label, text), count in list(counts.items())[:NOTICES_MAX]
    ]
    if len(counts) > NOTICES_MAX:
        items.append(f"<li>and {len(counts) - NOTICES_MAX} more, in the records</li>")
    return "<section>\n<h2>Notices</h2>\n<ul>\n" + "\n".join(items) + "\n</ul>\n</section>"
