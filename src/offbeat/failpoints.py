"""Faults at exact places of live code, for tests of what a run survives. Without the variable nothing happens here.

    OFFBEAT_FAILPOINTS="round:1:20=kill; checkpoint.replace:0:2=error ENOSPC"

Each entry is a place, the rank (or `supervisor`), at which time that this rank is there, and what happens:

    kill            the process is killed
    stop SECONDS    it is stopped, and goes on after that time
    hang SECONDS    the thread sleeps
    error NAME      OSError, as if the system had answered so
    memory          MemoryError
    remove          the directory of the run is removed
    cut, drop       at `link.send`: the connection is closed; what is written on it from now on is thrown away

An entry applies to the first process of its rank alone, so that a restarted one goes on. What has happened is appended
to the file that OFFBEAT_FAILPOINTS_REACHED names, so that a test can tell a fault that was survived from one that never
came.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import threading
import time
from typing import Literal

VARIABLE, REACHED_VARIABLE = "OFFBEAT_FAILPOINTS", "OFFBEAT_FAILPOINTS_REACHED"

LinkFault = Literal["cut", "drop"]

_text = os.environ.get(VARIABLE, "")
_lock = threading.Lock()
_counts: dict[tuple[int, str], int] = {}
"""(process, place) → how often the process has been there; a forked one begins anew"""


def failpoint(place: str) -> LinkFault | None:
    """Let happen what is planned for this place, this process and this time; returns what its caller has to do."""
    return _act(place) if _text else None


def _act(place: str) -> LinkFault | None:
    if os.environ.get("OFFBEAT_INCARNATION", "0") != "0":
        return None
    rank = os.environ.get("OFFBEAT_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "supervisor"
    with _lock:
        count = _counts[os.getpid(), place] = _counts.get((os.getpid(), place), 0) + 1
    for entry in filter(str.strip, _text.split(";")):
        where, _, action = entry.strip().partition("=")
        if where == f"{place}:{rank}:{count}":
            _note(entry.strip())
            return _carry_out(action)
    return None


def _note(entry: str) -> None:
    if path := os.environ.get(REACHED_VARIABLE):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{entry}\n")


def _carry_out(action: str) -> LinkFault | None:
    name, _, argument = action.partition(" ")
    match name:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            command = f"sleep {float(argument)}; kill -CONT {os.getpid()}"
            null = subprocess.DEVNULL
            subprocess.Popen(["sh", "-c", command], start_new_session=True, stdin=null, stdout=null, stderr=null)
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(float(argument))
        case "error":
            number = getattr(errno, argument)
            raise OSError(number, os.strerror(number))
        case "memory":
            raise MemoryError
        case "remove":
            shutil.rmtree(os.environ["OFFBEAT_DIRECTORY"])
        case "cut":
            return "cut"
        case "drop":
            return "drop"
        case _:
            raise ValueError(f"{VARIABLE} has the action {action!r}, which is not one of offbeat.failpoints")
    return None
