"""Runs a command and measures memory and processor time of all its processes, those that it starts included.

Linux alone: reads /proc. Processes whose parent has ended become children of this one, so none is overlooked, and those
that outlive the command are ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SAMPLE_SECONDS = 0.2
OUTPUT_LINES = 15
"""Lines of a failed command's output that are shown."""

_PR_SET_CHILD_SUBREAPER = 36
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measured:
    """What the processes of a command took.

    bytes_max: the largest sum of proportional set sizes: a page of several processes counts once
    processor_seconds: user and system time, start and imports included
    """

    bytes_max: int
    processor_seconds: float


def run_measured(command: Sequence[str], environment: Mapping[str, str], seconds_max: float) -> Measured:
    """Run a command until it ends; raises `RuntimeError` where it fails or takes longer than `seconds_max`."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    deadline = time.monotonic() + seconds_max
    bytes_max = 0
    seconds: dict[int, float] = {}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=dict(environment), stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                running = descendants()
                bytes_max = max(bytes_max, sum(map(proportional_bytes, running)))
                for pid in running:
                    seconds[pid] = max(processor_seconds(pid), seconds.get(pid, 0.0))
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{' '.join(command)} took longer than {seconds_max:.0f} s")
                time.sleep(SAMPLE_SECONDS)
        finally:
            end_descendants()
        if process.returncode:
            output.seek(0)
            shown = "\n".join(output.read().splitlines()[-OUTPUT_LINES:])
            raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode}:\n{shown}")
    return Measured(bytes_max, sum(seconds.values()))


def descendants() -> list[int]:
    """The processes that this one has started, directly or not."""
    children = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            children[int(stat[1])].append(int(name))
    reached, todo = [], [os.getpid()]
    while todo:
        below = children[todo.pop()]
        reached += below
        todo += below
    return reached


def end_descendants() -> None:
    """End all processes that this one has started, and wait for them."""
    while running := descendants():
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                pass


def proportional_bytes(pid: int) -> int:
    """The proportional set size of a process; 0 if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as lines:
        for line in lines:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def processor_seconds(pid: int) -> float:
    """User and system time of a process until now; 0 if it has ended."""
    stat = _stat(pid)
    return 0.0 if stat is None else (int(stat[11]) + int(stat[12])) / _TICKS


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: state, parent, …; None if the process has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return None
