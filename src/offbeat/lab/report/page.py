"""The report: one HTML page with headline, table, figures and configurations, which needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from statistics import fmean
from string import Template

import msgspec

from offbeat.errors import ConfigurationError
from offbeat.lab.plots.figures import FigureSpec, report_figures
from offbeat.lab.report.formatting import fixed, number, plural, size
from offbeat.lab.report.html_parts import failures_html, figure_svg, notices_html, table_html
from offbeat.lab.report.table import columns, goal, headline
from offbeat.records.comparison import Comparison
from offbeat.records.schema import Flow, RunRecords


def write_report(runs: Sequence[RunRecords], path: Path, baseline: str | None = None) -> Path:
    """Write the page of `runs` to `path`; equal records give equal bytes. `baseline` is as for `Comparison.of`."""
    text = report_page(runs, baseline)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write the report to {path} ({error.strerror}); name another place with --out"
        ) from None
    return path


def report_page(runs: Sequence[RunRecords], baseline: str | None = None) -> str:
    """The HTML page of `runs`; `baseline` is as for `Comparison.of`."""
    comparison = Comparison.of(runs, baseline)
    here = resources.files(__package__)
    return Template(here.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(_title(comparison)),
        style=here.joinpath("page.css").read_text(encoding="utf-8"),
        headline=escape(headline(comparison)),
        about=escape(_about(comparison, runs)),
        failures=failures_html(comparison),
        table=table_html(comparison, columns(comparison)),
        meanings=_meanings(comparison),
        figures="\n".join(_figure(spec, runs) for spec in report_figures(runs)),
        traffic=_traffic(comparison),
        notices=notices_html(runs),
        configurations="\n".join(_configuration(run) for run in runs),
        versions=escape(_versions(runs)),
    )


def _title(comparison: Comparison) -> str:
    return f"{', '.join(comparison.strategies)} on {comparison.summaries[0].workload}"


def _about(comparison: Comparison, runs: Sequence[RunRecords]) -> str:
    headers = [run.header for run in runs]
    engines = {header.engine for header in headers}
    if len(engines) > 1:
        count = f"{len(runs)} runs, simulated and live"
    else:
        count = f"{plural(len(runs), 'run')} in {'virtual' if engines == {'simulated'} else 'wall-clock'} time"
    numel = " or ".join(f"{count:,}" for count in sorted({header.parameters for header in headers}))
    parts = [
        f"workload {comparison.summaries[0].workload}, a model of {numel} parameters",
        f"{' or '.join(map(str, sorted({header.workers for header in headers})))} workers",
        plural(len({header.seed for header in headers}), "seed"),
        count,
    ]
    if comparison.target:
        parts.append(f"target {goal(comparison.target)}")
    return "; ".join(parts) + "."


def _meanings(comparison: Comparison) -> str:
    return "\n".join(
        f"<dt>{escape(column.head.replace(chr(10), ' '))}</dt><dd>{escape(column.meaning)}</dd>"
        for column in columns(comparison)
    )


def _figure(spec: FigureSpec, runs: Sequence[RunRecords]) -> str:
    svg = figure_svg(spec, runs, f'aria-labelledby="{spec.key}"')
    return (
        f'<figure>\n<h2 id="{spec.key}">{escape(spec.title)}</h2>\n{svg}\n'
        f"<figcaption>{escape(spec.caption)}</figcaption>\n</figure>"
    )


def _traffic(comparison: Comparison) -> str:
    """The table of bytes by strategy and kind of message."""
    bodies = [_traffic_rows(comparison, strategy) for strategy in comparison.strategies]
    if not any(bodies):
        return ""
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("messages", "sent", "uncompressed", "compressed by"))
    lines = (
        '<section>\n<h2 id="traffic">What was sent</h2>',
        '<div class="wide" role="region" aria-labelledby="traffic" tabindex="0">\n<table aria-labelledby="traffic">',
        f'<thead><tr><th scope="col">strategy</th><th scope="col" class="kind">message</th>{heads}</tr></thead>',
        *filter(None, bodies),
        f'</table>\n</div>\n<p class="about">{escape(TRAFFIC)}</p>\n</section>',
    )
    return "\n".join(lines)


TRAFFIC = (
    "By all ranks together in a whole run, message headers included; means over seeds. Uncompressed is the size of the "
    "same messages without compression, and compressed by is its ratio to what was sent."
)


def _traffic_rows(comparison: Comparison, strategy: str) -> str:
    runs = [summary.traffic for summary in comparison.runs_of(strategy) if summary.traffic]
    kinds = {kind: [run.get(kind, Flow(0, 0, 0)) for run in runs] for run in runs for kind in run}
    rows = []
    for kind, flows in sorted(kinds.items(), key=lambda item: -sum(flow.bytes for flow in item[1])):
        messages = fmean(flow.messages for flow in flows)
        sent, uncompressed = fmean(flow.bytes for flow in flows), fmean(flow.bytes_uncompressed for flow in flows)
        cells = (number(messages), size(sent), size(uncompressed), f"{fixed(uncompressed / sent)}×")
        rows.append(f'<td class="kind">{escape(kind)}</td>' + "".join(f"<td>{cell}</td>" for cell in cells))
    if not rows:
        return ""
    rows[0] = f'<th scope="rowgroup" rowspan="{len(rows)}">{escape(strategy)}</th>{rows[0]}'
    return "<tbody>\n" + "\n".join(f"<tr>{row}</tr>" for row in rows) + "\n</tbody>"


def _configuration(run: RunRecords) -> str:
    header = run.header
    if header.experiment is None:
        body = "<p>The configuration of this run holds objects that cannot be written down.</p>"
    else:
        text = msgspec.json.format(msgspec.json.encode(header.experiment), indent=2).decode()
        body = f"<pre>{escape(text)}</pre>"
    return f"<details><summary>{escape(header.label)}, seed {header.seed}</summary>{body}</details>"


def _versions(runs: Sequence[RunRecords]) -> str:
    versions = sorted({(run.header.offbeat, run.header.torch) for run in runs})
    return "; ".join(f"offbeat {offbeat} with torch {torch}" for offbeat, torch in versions)
