"""Run a command of offbeat to its end: in a copy of a process that has imported everything, or in a new one.

A command takes four seconds of the processor to import torch; a forked copy takes none.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from offbeat import failpoints

LIMIT_SECONDS = 120.0
"""For hangs alone: the machine may be shared with anything."""

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["torch._dynamo", "offbeat.cli.train_command", "offbeat.lab.live_runs", "commands"])


class Hung(Exception):
    """A command did not end in time; what it had written."""


def run_forked(words: Sequence[str], directory: Path, variables: Mapping[str, str]) -> tuple[int, str]:
    """Run `offbeat WORDS`; its exit code, or minus the signal that ended it, and what it wrote to stderr."""
    errors = directory / "stderr"
    process = FORKED.Process(target=_main, args=(list(words), directory, dict(variables), errors))
    process.start()
    process.join(LIMIT_SECONDS)
    if process.exitcode is None:
        kill_all(directory)
        raise Hung(errors.read_text())
    return process.exitcode, errors.read_text()


def _main(words: list[str], directory: Path, variables: dict[str, str], errors: Path) -> None:
    from offbeat.cli import main

    os.setsid()
    os.chdir(directory)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.environ.clear()
    os.environ.update(variables)
    failpoints._text = variables.get(failpoints.VARIABLE, "")
    sys.argv = ["offbeat", *words]
    sys.exit(main(words))


def run_new(
    words: Sequence[str], directory: Path, variables: Mapping[str, str], limits: Sequence[tuple[str, int]]
) -> tuple[int, str]:
    """Run a program, with resource limits such as NOFILE; as `run_forked`."""

    def limit() -> None:
        for name, value in limits:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))

    with subprocess.Popen(
        words,
        cwd=directory,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            kill_all(directory)
            _, errors = process.communicate()
            raise Hung(errors) from None
    return process.returncode, errors


def processes_in(directory: Path) -> Iterator[int]:
    """The processes that were started in a directory, and that exist."""
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if path.readlink() == directory:
                yield int(path.parent.name)


def kill_all(directory: Path) -> None:
    for number in processes_in(directory):
        os.kill(number, signal.SIGKILL)
