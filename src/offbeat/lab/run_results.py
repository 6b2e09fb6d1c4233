"""The final parameters and buffers of a run, in a file of its directory."""

from __future__ import annotations

from pathlib import Path

from offbeat.core.actions import Finish
from offbeat.live.state_file import load, save
from offbeat.records.files import RESULT


def save_result(directory: Path, finish: Finish) -> None:
    """Write the final parameters and buffers of a run to its directory."""
    save(
        directory / RESULT,
        {"parameters": finish.parameters, "buffers": list(finish.buffers), "version": finish.version},
    )


def read_result(directory: Path) -> Finish | None:
    """The final parameters and buffers of a run; None if it has not ended well."""
    path = directory / RESULT
    if not path.exists():
        return None
    saved = load(path)
    return Finish(saved["parameters"], tuple(saved["buffers"]), saved["version"])
