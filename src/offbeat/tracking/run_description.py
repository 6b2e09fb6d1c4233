"""What trackers are told of a run: its names, and its settings as a flat table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offbeat.core.configuration import options, to_plain
from offbeat.engine.experiment import Experiment
from offbeat.errors import ConfigurationError
from offbeat.records.schema import RunHeader
from offbeat.tracking.tracker import TrackedRun, Value

TEXT_MAX = 250
"""Characters of a setting; trackers refuse longer ones."""


def tracked_run(
    header: RunHeader, experiment: Experiment, directory: Path | None, is_resumed: bool = False
) -> TrackedRun:
    """The description of a run for its trackers.

    header: the header of its records.
    experiment: its settings.
    directory: its directory; None if it has none, or one that is removed at its end.
    is_resumed: whether an earlier process has run its first part.
    """
    return TrackedRun(
        label=header.label,
        workload=header.workload,
        seed=header.seed,
        config=configuration(header, experiment),
        directory=directory,
        is_resumed=is_resumed,
    )


def configuration(header: RunHeader, experiment: Experiment) -> dict[str, Value]:
    """The settings of a run: `strategy.batch`, `workload.name`, `cluster.straggle.name`, `seed` and the like."""
    table: dict[str, Any] = {
        "label": header.label,
        "engine": header.engine,
        "parameters": header.parameters,
        "offbeat": header.offbeat,
        "torch": header.torch,
        "optimizers": header.optimizers,
    }
    settings = {item.path: _plain(getattr(experiment, item.path)) for item in options(type(experiment))}
    settings.update(label=header.label, workers=header.workers)
    if experiment.workload is None:
        settings["workload"] = {"name": header.workload}
    return dict(_flat("", {**table, **settings}))


def _plain(value: Any) -> Any:
    """A setting as plain data; of one that is no plain data, all that is."""
    try:
        return to_plain(value)
    except ConfigurationError:
        if not dataclasses.is_dataclass(value):
            return type(value).__name__
        name = getattr(value, "name", "") or type(value).__name__
        fields = {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value) if item.init}
        return {"name": name, **fields}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Value]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner)
    elif isinstance(value, list):
        if value:
            yield prefix, ", ".join(map(str, value))[:TEXT_MAX]
    elif value is not None:
        yield prefix, value[:TEXT_MAX] if isinstance(value, str) else value
