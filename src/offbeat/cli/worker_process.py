"""The program of one rank of a live run that `offbeat train` starts: python -m offbeat.cli.worker_process DIRECTORY.

Imports happen in functions, so that an error in them is reported as one sentence.
"""

from __future__ import annotations

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


def run_reported(call: Callable[[], int]) -> int:
    """The exit code of the program of a rank, whose failure is reported to its launcher instead of printed."""
    from offbeat.launch.failure_reports import report_of, report_uncaught, send_report
    from offbeat.launch.rank_info import read_report_pipe

    pipe = read_report_pipe()
    report_uncaught(pipe)
    return exit_code_of(call, lambda error: send_report(pipe, report_of(error)))


if __name__ == "__main__":
    sys.exit(run_reported(lambda: run_worker(Path(sys.argv[1]))))
