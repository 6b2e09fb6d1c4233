"""Local processes: started so that they cannot outlive us, and heard line by line.

Each has a session of its own. So Ctrl-C in a terminal reaches us alone, who pass it on in an order of our own, and
whatever a child has started (the workers of a DataLoader) can be ended with it. If we die ourselves, even by SIGKILL,
the kernel ends the child, on Linux. It does so when the *thread* that started the child is gone: start children in
one that stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from offbeat.errors import ConfigurationError, OffbeatError, RunFailed
from offbeat.launch import process_settings as memory

OnLine = Callable[[int, str], None]
"""Takes the rank of a child and a line that it wrote."""

LINES_KEPT = 200
LINE_BYTES_MAX = 1 << 16
DRAIN_SECONDS = 1.0
"""How long to wait for the last words of a child that has ended."""

_TO_THE_PROCESS = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask: the child alone is asked, and settles matters with its own children. The others go to all."""

_PR_SET_PDEATHSIG = 1
_TRACEBACK = "Traceback (most recent call last)"
_LINUX = sys.platform == "linux"
_BOUND_TO_PARENT = (
    "import ctypes, os, signal, sys\n"
    f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})\n"
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)
"""Run by a bare interpreter, which then becomes the child; what the kernel was told survives that."""


class Child:
    """One process of a run: one life of one rank."""

    def __init__(
        self,
        rank: int,
        incarnation: int,
        pid: int,
        errors: int,
        on_line: OnLine,
        popen: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.rank, self.incarnation, self.pid = rank, incarnation, pid
        self._popen = popen
        self._code: int | None = None
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._on_line = on_line
        self._reader = threading.Thread(target=self._read, args=(errors,), name=f"offbeat lines of {pid}", daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs.

        What it started and left behind is ended before its number may be given to somebody else.
        """
        if self._code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self._signal_group(signal.SIGKILL)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            if self._popen is not None:
                self._popen.returncode = self._code
            self._reader.join(DRAIN_SECONDS)
        return self._code

    def wait(self) -> int:
        """The exit code, once there is one."""
        while self.poll() is None:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert self._code is not None
        return self._code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; nothing happens where the child has ended already."""
        if self.poll() is not None:
            return
        if number in _TO_THE_PROCESS:
            os.kill(self.pid, number)
        else:
            self._signal_group(number)

    def _signal_group(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # just forked, with no session of its own yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def sentence(self) -> str | None:
        """The sentence of ours that it ended with; None where it said none, or something went wrong after it."""
        lines = list(self._lines)
        for line in reversed(lines):
            if line.startswith("offbeat: "):
                return line.removeprefix("offbeat: ")
            if line.startswith(_TRACEBACK):
                return None
        return None

    def last_words(self) -> str | None:
        """Why it ended, in its own words: its sentence, or else the line that names the exception."""
        if self.sentence is not None:
            return self.sentence
        lines = [line for line in self._lines if line.strip()]
        starts = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
        named = [line for line in lines[starts[-1] + 1 :] if not line[0].isspace()] if starts else []
        return named[0] if named else lines[-1].strip() if lines else None

    def _read(self, errors: int) -> None:
        with open(errors, "rb", closefd=True) as stream:
            while line := stream.readline(LINE_BYTES_MAX):
                text = line.decode("utf-8", errors="replace").rstrip("\r\n")
                self._lines.append(text)
                self._on_line(self.rank, text)


def start_command(
    argv: Sequence[str],
    *,
    rank: int,
    incarnation: int,
    environment: Mapping[str, str],
    on_line: OnLine,
    listener: socket.socket | None = None,
    own_stdout: bool = False,
) -> Child:
    """Start a program; `environment` is added to ours.

    stdout joins stderr and comes through `on_line`, unless the child keeps its `own_stdout`. A `listener`,
    a socket that listens, is handed over: the child finds its number in OFFBEAT_LISTENER, and here it is closed.
    """
    mine, theirs = os.pipe()
    handed = {} if listener is None else {"OFFBEAT_LISTENER": str(listener.fileno())}
    bound = [sys.executable, "-I", "-S", "-c", _BOUND_TO_PARENT, str(os.getpid())] if _LINUX else []
    try:
        popen = subprocess.Popen(
            [*bound, *argv],
            env={"OMP_NUM_THREADS": "1", **memory.environment(), **os.environ, **environment, **handed},
            stdin=subprocess.DEVNULL,
            stdout=None if own_stdout else theirs,
            stderr=theirs,
            pass_fds=() if listener is None else (listener.fileno(),),
            start_new_session=True,
        )
    except OSError as error:
        os.close(mine)
        raise RunFailed(f"{argv[0]} cannot be started ({error.strerror})") from None
    finally:
        os.close(theirs)
        if listener is not None:
            listener.close()
    return Child(rank, incarnation, popen.pid, mine, on_line, popen)


def start_forked(
    function: Callable[[], int],
    *,
    rank: int,
    incarnation: int,
    environment: Mapping[str, str],
    on_line: OnLine,
    listener: socket.socket | None = None,
) -> Child:
    """Run a function in a copy of this process, for what cannot be written down for another program to read."""
    parent = os.getpid()
    mine, theirs = os.pipe()
    handed = {} if listener is None else {"OFFBEAT_LISTENER": str(listener.fileno())}
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # That other threads may hold locks: the copy touches none of theirs, and ends without running their course.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(mine)
            code = _forked(function, parent, theirs, {**environment, **handed})
        finally:
            os._exit(code)  # nothing of the process that was copied may run its course twice
    os.close(theirs)
    if listener is not None:
        listener.close()
    return Child(rank, incarnation, pid, mine, on_line)


def _forked(function: Callable[[], int], parent: int, errors: int, environment: Mapping[str, str]) -> int:
    os.setsid()
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        return 1
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    os.close(errors)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  (as long as the process)
    os.environ.update(environment)
    memory.keep_freed_memory()
    return _outcome(function)


def _outcome(function: Callable[[], int]) -> int:
    """The exit code of a function, and on stderr the reason, as the command line has them."""
    try:
        return function()
    except OffbeatError as error:
        print(f"offbeat: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()
