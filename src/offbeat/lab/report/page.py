"""One HTML file that tells what came out of the runs, and opens without a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from statistics import fmean
from string import Template

import msgspec

from offbeat.errors import ConfigurationError
from offbeat.lab.plots.figures import FigureSpec, report_figures
from offbeat.lab.plots.style import svg_text
from offbeat.lab.report.formatting import fixed, number, plural, size
from offbeat.lab.report.table import columns, goal, headline
from offbeat.records.comparison import Comparison
from offbeat.records.schema import Flow, Notice, RunRecords, of_kind

NOTICES_MAX = 50


def write_report(runs: Sequence[RunRecords], path: Path, baseline: str | None = None) -> Path:
    """Write the page about `runs` to `path`; the same records give the same bytes."""
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
    """The page as text."""
    comparison = Comparison.of(runs, baseline)
    here = resources.files(__package__)
    return Template(here.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(_title(comparison)),
        style=here.joinpath("page.css").read_text(encoding="utf-8"),
        headline=escape(headline(comparison)),
        about=escape(_about(comparison, runs)),
        troubles=_troubles(comparison),
        table=_table(comparison),
        meanings=_meanings(comparison),
        figures="\n".join(_figure(spec, runs) for spec in report_figures(runs)),
        traffic=_traffic(comparison),
        notices=_notices(runs),
        configurations="\n".join(_configuration(run) for run in runs),
        versions=escape(_versions(runs)),
    )


def _title(comparison: Comparison) -> str:
    return f"{', '.join(comparison.strategies)} on {comparison.summaries[0].workload}"


def _about(comparison: Comparison, runs: Sequence[RunRecords]) -> str:
    workers = " or ".join(str(count) for count in sorted({run.header.workers for run in runs}))
    seeds = len({run.header.seed for run in runs})
    simulated = {run.header.engine for run in runs}
    clock = "virtual time" if simulated == {"simulated"} else "wall-clock time" if simulated == {"live"} else "both"
    size = " or ".join(f"{count:,}" for count in sorted({run.header.parameters for run in runs}))
    parts = [
        f"workload {comparison.summaries[0].workload}, a model of {size} parameters",
        f"{workers} workers",
        plural(seeds, "seed"),
        f"{plural(len(runs), 'run')} in {clock}" if clock != "both" else f"{len(runs)} runs, simulated and live",
    ]
    if comparison.target:
        parts.append(f"target {goal(comparison.target)}")
    return "; ".join(parts) + "."


def _troubles(comparison: Comparison) -> str:
    """Failures stand at the top: every number below them is of a run that did not end well."""
    failed = [summary for summary in comparison.summaries if summary.failure is not None]
    if not failed:
        return ""
    items = "\n".join(
        f"<li><b>{escape(summary.strategy)}</b>, seed {summary.seed}: {escape(summary.failure or '')}</li>"
        for summary in failed
    )
    count = f"{len(failed)} of {plural(len(comparison.summaries), 'run')} failed"
    return f'<section class="failures" role="alert"><h2>{count}</h2>\n<ul>\n{items}\n</ul></section>'


def _table(comparison: Comparison) -> str:
    shown = columns(comparison)
    heads = "".join(f'<th scope="col">{escape(column.head).replace(chr(10), "<br>")}</th>' for column in shown)
    rows = []
    for strategy in comparison.strategies:
        cells = "".join(f"<td>{escape(column.cell(comparison, strategy))}</td>" for column in shown)
        rows.append(f'<tr><th scope="row">{escape(strategy)}</th>{cells}</tr>')
    return f'<thead><tr><th scope="col">strategy</th>{heads}</tr></thead>\n<tbody>\n' + "\n".join(rows) + "\n</tbody>"


def _meanings(comparison: Comparison) -> str:
    return "\n".join(
        f"<dt>{escape(column.head.replace(chr(10), ' '))}</dt><dd>{escape(column.meaning)}</dd>"
        for column in columns(comparison)
    )


def _figure(spec: FigureSpec, runs: Sequence[RunRecords]) -> str:
    svg = svg_text(spec.draw(runs)).replace("<svg ", f'<svg role="img" aria-labelledby="{spec.key}" ', 1)
    return (
        f'<figure>\n<h2 id="{spec.key}">{escape(spec.title)}</h2>\n{svg}\n'
        f"<figcaption>{escape(spec.caption)}</figcaption>\n</figure>"
    )


def _traffic(comparison: Comparison) -> str:
    """What was sent in which kind of message, with and without compression."""
    bodies = [_traffic_of(comparison, strategy) for strategy in comparison.strategies]
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
    "By all ranks together in a whole run, heads of messages included; means over seeds. Uncompressed is what the same "
    "messages would have weighed, and compressed by is how many times that is what was sent."
)


def _traffic_of(comparison: Comparison, strategy: str) -> str:
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


def _notices(runs: Sequence[RunRecords]) -> str:
    """Equal notices of one strategy are said once, with their number."""
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


def _configuration(run: RunRecords) -> str:
    header = run.header
    if header.experiment is None:
        body = "<p>This run held objects that cannot be written down, so it cannot be repeated from here.</p>"
    else:
        text = msgspec.json.format(msgspec.json.encode(header.experiment), indent=2).decode()
        body = f"<pre>{escape(text)}</pre>"
    return f"<details><summary>{escape(header.label)}, seed {header.seed}</summary>{body}</details>"


def _versions(runs: Sequence[RunRecords]) -> str:
    versions = sorted({(run.header.offbeat, run.header.torch) for run in runs})
    return "; ".join(f"offbeat {offbeat} with torch {torch}" for offbeat, torch in versions)
