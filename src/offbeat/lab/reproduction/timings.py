"""Time per step against the number of parts of a batch: measured here and now, and kept beside the records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from offbeat.errors import ConfigurationError
from offbeat.lab.microbatching import time_per_step
from offbeat.lab.reproduction.study import Study

FILE = "timings.json"


class Timed(msgspec.Struct, frozen=True):
    """The gradient of a batch, cut into so many parts: how long it took, once for each repeat."""

    batch: int
    parts: int
    seconds: tuple[float, ...]


def measure(study: Study, on_batch: Callable[[str], None]) -> list[Timed]:
    """What the study wants timed; `on_batch` is told what comes next."""
    timing = study.described.timing
    if timing is None:
        return []
    workload = study.cases[0].plan.workload
    rows = []
    for batch in timing.batches:
        on_batch(f"timing batches of {batch}")
        parts = [count for count in timing.splits if count <= batch // 2]
        for taken in time_per_step(workload, batch, parts, timing.repeats):
            rows.append(Timed(batch, taken.splits, taken.repeats))
    return rows


def write_timings(directory: Path, rows: list[Timed]) -> None:
    (directory / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


def read_timings(directory: Path) -> list[Timed]:
    path = directory / FILE
    if not path.is_file():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Timed])
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{path} cannot be read ({error}); delete it, and time again") from None
