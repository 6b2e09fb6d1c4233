"""One process of a live run, as `offbeat train` starts it: python -m offbeat.cli.worker_process DIRECTORY."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from offbeat.cli import exit_code_of


def run_worker(directory: Path) -> int:
    """Be the rank that the environment says, in the run that the directory describes."""
    from offbeat.lab.worker_main import worker_main
    from offbeat.launch import read_rank_info
    from offbeat.records.files import read_header

    load_experiment_classes(read_header(directory).experiment or {}, str(directory))
    return worker_main(directory, read_rank_info())


def load_experiment_classes(experiment: dict[str, Any], where: str) -> None:
    """Load what an experiment names: strategies of ours, and classes from files of the user's own."""
    from offbeat.cli.class_lookup import load_files
    from offbeat.cli.flags import strategies

    strategies()
    load_files(experiment, where)


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: run_worker(Path(sys.argv[1]))))
