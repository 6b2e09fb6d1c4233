"""Time per step against the number of parts of a batch, measured on this machine and stored beside the records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from offbeat.errors import ConfigurationError, shortened
from offbeat.lab.microbatching import time_per_step
from offbeat.lab.reproduction.study import Study

TIMINGS = "timings.json"


class BatchTiming(msgspec.Struct, frozen=True):
    """How long the gradient of a batch takes."""

    batch: int
    """Samples of the batch."""
    parts: int
    """Micro-batches that it is cut into."""
    seconds: tuple[float, ...]
    """The time of each repeat."""


def measure(study: Study, on_batch: Callable[[str], None]) -> list[BatchTiming]:
    """Measure what the study describes; `on_batch` is called with a text before each batch size."""
    timing = study.description.timing
    if timing is None:
        return []
    workload = study.cases[0].plan.workload
    rows = []
    for batch in timing.batches:
        on_batch(f"timing batches of {batch}")
        parts = [count for count in timing.splits if count <= batch // 2]
        steps = time_per_step(workload, batch, parts, timing.repeats)
        rows += [BatchTiming(batch, step.splits, step.repeats) for step in steps]
    return rows


def write_timings(directory: Path, rows: list[BatchTiming]) -> None:
    """Write timings to the directory of a study."""
    (directory / TIMINGS).write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


def read_timings(directory: Path) -> list[BatchTiming]:
    """The timings in the directory of a study; empty if there are none."""
    path = directory / TIMINGS
    if not path.is_file():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[BatchTiming])
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{path} cannot be read ({shortened(error)}); delete it, and time again") from None
