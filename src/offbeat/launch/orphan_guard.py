"""Ends what the children of a launcher have started, if the launcher itself is killed.

The kernel kills the children then, but not the processes that they have started, such as the workers of a DataLoader:
these would be left behind. So a small process of its own, in a session of its own, is told of each process group, and
kills those that are left when the pipe from the launcher closes. It exists as long as there are children.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

_PROGRAM = (
    "import os, signal, sys\n"
    "groups = set()\n"
    "for line in sys.stdin:\n"
    "    groups ^= {int(line)}\n"
    "for group in groups:\n"
    "    try:\n"
    "        os.killpg(group, signal.SIGKILL)\n"
    "    except (ProcessLookupError, PermissionError):\n"
    "        pass\n"
)
"""Reads numbers of process groups; the second time that a number comes, its group has ended."""


class OrphanGuard:
    """The guarding process of this one. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._process: subprocess.Popen[str] | None = None

    def add(self, group: int) -> None:
        """Guard a process group that was started."""
        with self._lock:
            if self._process is None:
                self._process = self._start()
            if self._process is not None:
                self._groups.add(group)
                self._tell(group)

    def remove(self, group: int) -> None:
        """A process group has ended."""
        with self._lock:
            if group not in self._groups:
                return
            self._groups.discard(group)
            self._tell(group)
            if not self._groups and self._process is not None:
                process, self._process = self._process, None
                self._close_pipe(process)
                process.wait()

    def forget(self) -> None:
        """In a forked copy of the launcher: close its end of the pipe, which would hold the guard back."""
        if self._process is not None:
            self._close_pipe(self._process)
        self._process, self._groups, self._lock = None, set(), threading.Lock()

    def _start(self) -> subprocess.Popen[str] | None:
        """Start the guarding process; None where the system has no room for it: then there is none."""
        null = subprocess.DEVNULL
        argv = [sys.executable, "-I", "-S", "-c", _PROGRAM]
        try:
            return subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True, text=True
            )
        except OSError:
            return None

    def _tell(self, group: int) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed: the launcher goes on without it
            self._process.stdin.write(f"{group}\n")
            self._process.stdin.flush()

    @staticmethod
    def _close_pipe(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()


guard = OrphanGuard()
"""The guard of all children of this process."""
