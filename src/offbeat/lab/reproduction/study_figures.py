"""The figures of a study, from its records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from offbeat.core.strategy import Strategy
from offbeat.lab.experiment import Plan
from offbeat.lab.plots.figures import panel
from offbeat.lab.plots.style import FORMATS, save_as
from offbeat.lab.plots.sweeps import Point, sweep
from offbeat.lab.reproduction.findings import quantity, values_of
from offbeat.lab.reproduction.runs import BatchTiming
from offbeat.lab.reproduction.study import Study, StudyFigure, StudyRun, Timing
from offbeat.records.comparison import interval
from offbeat.records.schema import RunRecords


def draw_all(
    study: Study, runs: Sequence[StudyRun], timed: Sequence[BatchTiming], place: Path, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Every figure of the study, as files in a directory."""
    written = []
    for drawing in study.description.figures:
        draw = _draw_sweep if drawing.y else _draw_panel
        written += draw(study, drawing, runs, place / drawing.file, formats)
    if study.description.timing is not None:
        written += _draw_timing(study.description.timing, timed, place / TIMING_FILE, formats)
    return written


TIMING_FILE = "time-per-step"
TIMING_CAPTION = "Time of one gradient of a whole batch against the number of parts that it is cut into."


def _chosen(drawing: StudyFigure, runs: Sequence[StudyRun]) -> list[StudyRun]:
    return [
        run
        for run in runs
        if (not drawing.cases or run.case in drawing.cases)
        and (not drawing.strategies or run.strategy in drawing.strategies)
    ]


def _draw_panel(
    study: Study, drawing: StudyFigure, runs: Sequence[StudyRun], path: Path, formats: Sequence[str]
) -> list[Path]:
    figure = panel([_labelled(run, drawing) for run in _chosen(drawing, runs)], drawing.cells)
    return save_as(figure, path, formats)


def _labelled(run: StudyRun, drawing: StudyFigure) -> RunRecords:
    names = {"strategy": run.strategy, "case": run.case, "both": f"{run.strategy}, {run.case}"}
    header = msgspec.structs.replace(run.records.header, label=names[drawing.by])
    if drawing.by == "case":  # of one strategy, whose colour would not tell them apart
        header = msgspec.structs.replace(header, experiment=None)
    return dataclasses.replace(run.records, header=header)


def _draw_sweep(
    study: Study, drawing: StudyFigure, runs: Sequence[StudyRun], path: Path, formats: Sequence[str]
) -> list[Path]:
    chosen = _chosen(drawing, runs)
    values = values_of(study, drawing.y, chosen)
    series: dict[str, list[Point]] = {}
    for case in sorted(study.cases, key=lambda case: case.x or 0.0):
        for strategy in dict.fromkeys(run.strategy for run in chosen if run.case == case.label):
            mean = interval(value for (c, s, _), value in values.items() if (c, s) == (case.label, strategy))
            if mean is not None and case.x is not None:
                series.setdefault(strategy, []).append(Point(case.x, mean.mean, mean.low, mean.high))
    head = quantity(drawing.y).head
    named = {label: strategy.name for case in study.cases for label, strategy in _named(case.plan)}
    figure = sweep(drawing.x, head, series, drawing.log_x, drawing.log_y, drawing.published, named)
    return save_as(figure, path, formats)


def _named(plan: Plan) -> Iterator[tuple[str, Strategy]]:
    return zip(plan.labels, plan.strategies, strict=True)


def _draw_timing(timing: Timing, timed: Sequence[BatchTiming], path: Path, formats: Sequence[str]) -> list[Path]:
    series: dict[str, list[Point]] = {}
    for row in timed:
        mean = interval(row.seconds)
        assert mean is not None
        series.setdefault(f"batch of {row.batch}", []).append(Point(row.parts, mean.mean, mean.low, mean.high))
    labels = "parts of a batch (number)", "time per step (s)"
    return save_as(sweep(*labels, series, log_x=True, log_y=True, reference=timing.published), path, formats)
