"""The figures of a study, drawn from its records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from offbeat.lab.plots.figures import panel
from offbeat.lab.plots.style import FORMATS, save_as
from offbeat.lab.plots.sweeps import Point, sweep
from offbeat.lab.reproduction.quantities import quantity, values_of
from offbeat.lab.reproduction.study import Study, StudyFigure, StudyRun, Timing
from offbeat.lab.reproduction.timings import BatchTiming
from offbeat.records.comparison import interval
from offbeat.records.schema import RunRecords

if TYPE_CHECKING:
    from offbeat.lab.plots.style import Figure


TIMING_FILE = "time-per-step"
TIMING_CAPTION = "Time of one gradient of a whole batch against the number of parts that it is cut into."


def draw_all(
    study: Study,
    runs: Sequence[StudyRun],
    timings: Sequence[BatchTiming],
    directory: Path,
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """Draw every figure of the study to files in a directory, and return their paths."""
    figures = {
        spec.file: _draw_sweep(study, spec, runs) if spec.y else _draw_panel(spec, runs)
        for spec in study.description.figures
    }
    if study.description.timing is not None:
        figures[TIMING_FILE] = _draw_timing(study.description.timing, timings)
    return [path for file, figure in figures.items() for path in save_as(figure, directory / file, formats)]


def _select(spec: StudyFigure, runs: Sequence[StudyRun]) -> list[StudyRun]:
    return [run for run in runs if spec.has(run.case, run.strategy)]


def _draw_panel(spec: StudyFigure, runs: Sequence[StudyRun]) -> Figure:
    return panel([_labelled(run, spec) for run in _select(spec, runs)], spec.cells)


def _labelled(run: StudyRun, spec: StudyFigure) -> RunRecords:
    header = msgspec.structs.replace(run.records.header, label=spec.label(run.case, run.strategy))
    if spec.by == "case":  # without the strategy, so that the cases get different colours
        header = msgspec.structs.replace(header, experiment=None)
    return dataclasses.replace(run.records, header=header)


def _draw_sweep(study: Study, spec: StudyFigure, runs: Sequence[StudyRun]) -> Figure:
    chosen = _select(spec, runs)
    values = values_of(study, spec.y, runs, {run.case for run in chosen})
    series: dict[str, list[Point]] = {}
    for case in sorted(study.cases, key=lambda case: case.x or 0.0):
        for strategy in dict.fromkeys(run.strategy for run in chosen if run.case == case.label):
            mean = interval(value for (c, s, _), value in values.items() if (c, s) == (case.label, strategy))
            if mean is not None and case.x is not None:
                series.setdefault(strategy, []).append(Point(case.x, mean.mean, mean.low, mean.high))
    plans = [case.plan for case in study.cases]
    names = {
        label: strategy.name for plan in plans for label, strategy in zip(plan.labels, plan.strategies, strict=True)
    }
    return sweep(spec.x, quantity(spec.y).head, series, spec.log_x, spec.log_y, spec.published, names)


def _draw_timing(timing: Timing, timings: Sequence[BatchTiming]) -> Figure:
    series: dict[str, list[Point]] = {}
    for row in timings:
        mean = interval(row.seconds)
        assert mean is not None
        series.setdefault(f"batch of {row.batch}", []).append(Point(row.parts, mean.mean, mean.low, mean.high))
    labels = "parts of a batch (number)", "time per step (s)"
    return sweep(*labels, series, log_x=True, log_y=True, reference=timing.published)
