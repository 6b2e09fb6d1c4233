"""The program of one rank of a live run that `offbeat train` starts: python -m offbeat.cli.worker_process DIRECTORY.

Imports happen in functions, so that an error in them is reported as one sentence.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from offbeat.cli import exit_code_of


def run_worker(directory: Path) -> int:
    """Run the rank that the environment sets, in the run that the directory describes."""
    from offbeat.cli.class_lookup import load_files
    from offbeat.lab.worker_main import worker_main
    from offbeat.launch.rank_info import read_rank_info
    from offbeat.records.files import read_header

    load_files(read_header(directory).experiment or {}, str(directory))
    return worker_main(directory, read_rank_info())


def run_reported(call: Callable[[], int], file: Path | None = None) -> int:
    """The exit code of the program of a rank, whose failure is reported to its launcher instead of printed.

    `file` is where the report goes if the launcher has passed no pipe.
    """
    from offbeat.launch.failure_reports import report_of, report_uncaught, send_report
    from offbeat.launch.rank_info import read_report_pipe

    descriptor = read_report_pipe()
    if descriptor is None and file is not None:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    report_uncaught(descriptor)
    return exit_code_of(call, lambda error: send_report(descriptor, report_of(error)))


if __name__ == "__main__":
    sys.exit(run_reported(lambda: run_worker(Path(sys.argv[1]))))
