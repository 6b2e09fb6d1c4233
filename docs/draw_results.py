"""Draw every figure of docs/results.md again and write the page, from records alone:

    python docs/draw_results.py

The records are in docs/results/NAME.zip, as `offbeat reproduce NAME --save docs/results/NAME.zip` has written them.
Nothing is trained, and nothing on the page is written by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

from offbeat.lab.report.formatting import markdown_table
from offbeat.lab.reproduction.findings import Finding, Findings, claim_unit, compute_findings, format_interval
from offbeat.lab.reproduction.quantities import quantity
from offbeat.lab.reproduction.runs import read_study
from offbeat.lab.reproduction.study import Claim, Study, StudyRun, load_study, names
from offbeat.lab.reproduction.study_archive import open_results
from offbeat.lab.reproduction.study_figures import TIMING_CAPTION, TIMING_FILE, draw_all
from offbeat.lab.reproduction.timings import BatchTiming, read_timings

DOCS = Path(__file__).parent
RECORDS = DOCS / "results"
IMAGES = DOCS / "images" / "results"
PAGE = DOCS / "results.md"

ABOUT = """
Published results, run again by one command each on a machine with two cores, without a GPU. Every number and figure
here is drawn from run records by `python docs/draw_results.py`, or `make results`; nothing is written by hand. The
records that this takes are in [results](results), one archive a study. `offbeat reproduce --redraw
docs/results/NAME.zip` draws one of them, `offbeat reproduce NAME` runs it anew, and `--scale full` with the original's
sizes. [Reproducing](reproducing.md) has every setting of the originals beside ours.

Numbers are means over seeds; ± is half of a 95% interval (Student's t), and sentences have its ends in brackets.
*Agrees*: half of the interval is at most a quarter of the mean, and the interval meets what was published. *Differs*:
it does not meet it; the sentence names the cause, with the number where that is switched off, or what was tried.
*Cannot tell*: it meets it and is wider than that; the number of seeds that would do is estimated from how much these
vary. Where hyper-parameters were chosen here, a study says on which seeds, and reports others. Where models and data
are smaller than the original's, which is said each time, agreement is of ratios, and an accuracy is not the original's.
"""


def overview_row(study: Study, claim: Claim, finding: Finding) -> list[str]:
    """One claim in the first table of the page."""
    return [
        claim.short or claim.sentence.format(ours="…"),
        claim.published_short or claim.published,
        format_interval(finding.ours, claim_unit(claim), finding.seeds),
        verdict_text(finding),
        f"`offbeat reproduce {study.name}`",
    ]


def verdict_text(finding: Finding) -> str:
    if not finding.seeds:
        return "not run yet"
    return "no number to compare" if finding.verdict is None else str(finding.verdict)


def overview(studies: list[tuple[Study, Findings]]) -> str:
    """The first table of the page: every claim of every study."""
    lines = [["claim", "published", "ours", "verdict", "command"]]
    for study, findings in studies:
        claims = study.description.claims
        lines += [
            overview_row(study, claim, finding) for claim, finding in zip(claims, findings.sentences, strict=True)
        ]
    return markdown_table(lines)


def section(study: Study, findings: Findings, runs: list[StudyRun], timed: list[BatchTiming]) -> str:
    """One study as text."""
    text = study.description
    begin = [
        f"## {study.name}: {text.title}",
        f"- The original: {text.original}.\n- Here: {text.scaled}.\n- To be expected: {text.expect}.",
    ]
    if not runs:
        minutes = f"about {text.minutes:g} minutes on two cores"
        return "\n\n".join([*begin, f"Not run at these settings yet: `offbeat reproduce {study.name}`, {minutes}."])
    parts = [
        *begin,
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
    seeds = listed({run.seed for run in runs})
    if text.tuning_seeds:
        parts.append(f"Chosen on seeds {listed(set(text.tuning_seeds))}: {text.tuning}; reported on seeds {seeds}.")
    parts.append(f"{len(runs)} runs, seeds {seeds}. Again: `offbeat reproduce {study.name}`.")
    return "\n\n".join(parts)


def listed(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def table(study: Study, findings: Findings) -> str:
    columns = study.description.columns
    cases = any(row.case for row in findings.rows)
    lines = [[*(["case"] if cases else []), "strategy", *(quantity(name).head for name in columns)]]
    for row in findings.rows:
        cells = [format_interval(row.cells[name], quantity(name), row.runs) for name in columns]
        lines.append([*([row.case] if cases else []), row.strategy, *cells])
    return markdown_table(lines)


def timing_table(timed: list[BatchTiming]) -> str:
    lines = [["batch", "parts", "time per step, median (s)"]]
    for row in timed:
        lines.append([str(row.batch), str(row.parts), f"{sorted(row.seconds)[len(row.seconds) // 2]:.4g}"])
    return markdown_table(lines)


def read_records(name: str, draw: bool) -> tuple[Study, list[StudyRun], list[BatchTiming]]:
    """The study of this name and its records, none if it was not run; with `draw`, draws its figures."""
    path = RECORDS / f"{name}.zip"
    if not path.is_file():
        return load_study(name), [], []
    with open_results(path) as directory:
        study, runs = read_study(directory)
        timed = read_timings(directory)
        if draw:
            draw_all(study, runs, timed, IMAGES / name, ("svg",))
    return study, runs, timed


def page(draw: bool) -> str:
    """The whole page; with `draw`, its figures as well."""
    studies, sections = [], []
    for name in names():
        study, runs, timed = read_records(name, draw)
        findings = compute_findings(study, runs)
        studies.append((study, findings))
        sections.append(section(study, findings, runs, timed))
    return "\n\n".join(part.strip() for part in ["# Results", overview(studies), ABOUT, *sections]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(draw=True), encoding="utf-8")
    print(f"written: {PAGE}", file=sys.stderr)
