"""Draw every figure of docs/results.md again and write the page, from records alone:

    python docs/draw_results.py

The records are in docs/results/NAME.zip, as `offbeat reproduce NAME --save docs/results/NAME.zip` has written them.
Nothing is trained, and nothing on the page is written by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

from offbeat.lab.reproduction.findings import Findings, compute_findings, format_interval, quantity
from offbeat.lab.reproduction.runs import BatchTiming, open_results, read_study, read_timings
from offbeat.lab.reproduction.study import Study, StudyRun, names
from offbeat.lab.reproduction.study_figures import TIMING_CAPTION, TIMING_FILE, draw_all

DOCS = Path(__file__).parent
RECORDS = DOCS / "results"
IMAGES = DOCS / "images" / "results"
PAGE = DOCS / "results.md"

HEAD = """# Results

Published results, run again by one command each on a machine with two cores, without a GPU. Every number and figure
here is drawn from run records by `python docs/draw_results.py`, or `make results`; nothing is written by hand. The
records are in [results](results), one archive a study. `offbeat reproduce --redraw docs/results/NAME.zip` draws one of
them, `offbeat reproduce NAME` runs it anew, and `--scale full` with the original's sizes.

Numbers are means over seeds; ± is half of a 95% interval (Student's t), and sentences have its ends in brackets.
*Agrees* means that the interval meets what was published. Where models and data are smaller than the original's, which
is said each time, agreement is of ratios, and an accuracy is not the original's.
"""


def section(study: Study, runs: list[StudyRun], timed: list[BatchTiming]) -> str:
    """One study as text."""
    text, findings = study.description, compute_findings(study, runs)
    parts = [
        f"## {study.name}: {text.title}",
        f"- The original: {text.original}.\n- Here: {text.scaled}.\n- To be expected: {text.expect}.",
        *(finding.sentence for finding in findings.sentences),
        table(study, findings),
    ]
    if timed:
        parts.append(timing_table(timed))
    captions = {figure.file: figure.caption for figure in text.figures}
    if text.timing is not None:
        captions[TIMING_FILE] = TIMING_CAPTION
    for file, caption in captions.items():
        parts.append(f"![{caption}](images/results/{study.name}/{file}.svg)\n\n*{caption}*")
    seeds = sorted({run.seed for run in runs})
    parts.append(f"{len(runs)} runs, seeds {', '.join(map(str, seeds))}. Again: `offbeat reproduce {study.name}`.")
    return "\n\n".join(parts)


def table(study: Study, findings: Findings) -> str:
    columns = study.description.columns
    cases = any(row.case for row in findings.rows)
    lines = [[*(["case"] if cases else []), "strategy", *(quantity(name).head for name in columns)]]
    for row in findings.rows:
        cells = [format_interval(row.cells[name], quantity(name), row.runs) for name in columns]
        lines.append([*([row.case] if cases else []), row.strategy, *cells])
    return as_markdown(lines)


def timing_table(timed: list[BatchTiming]) -> str:
    lines = [["batch", "parts", "time per step, median (s)"]]
    for row in timed:
        lines.append([str(row.batch), str(row.parts), f"{sorted(row.seconds)[len(row.seconds) // 2]:.4g}"])
    return as_markdown(lines)


def as_markdown(lines: list[list[str]]) -> str:
    head, *rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rows])


def page(draw: bool) -> str:
    """The whole page; with `draw`, its figures as well."""
    parts = [HEAD]
    for name in names():
        path = RECORDS / f"{name}.zip"
        if not path.is_file():
            continue
        with open_results(path) as directory:
            study, runs = read_study(directory)
            timed = read_timings(directory)
            if draw:
                draw_all(study, runs, timed, IMAGES / name, ("svg",))
            parts.append(section(study, runs, timed))
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(draw=True), encoding="utf-8")
    print(f"written: {PAGE}", file=sys.stderr)
