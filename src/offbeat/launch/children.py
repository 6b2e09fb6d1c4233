"""Child processes that cannot outlive this one, and whose output is read line by line.

Each has a session of its own. So Ctrl-C in a terminal reaches this process alone, which forwards it in an order of its
own, and the processes that a child has started (the workers of a DataLoader) can be ended with it. If this process
dies, even by SIGKILL, the kernel kills the child, on Linux, and `orphan_guard` what the child has started. The kernel
does so when the *thread* that started the child ends: start children in one that stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from offbeat.errors import ConfigurationError, OffbeatError, RunFailed
from offbeat.launch.failure_reports import (
    FailureReport,
    first_unindented,
    is_out_of_memory,
    one_line,
    pipe_address,
    read_report,
    report_of,
    send_report,
)
from offbeat.launch.orphan_guard import guard
from offbeat.launch.process_settings import keep_freed_memory, memory_environment
from offbeat.launch.rank_info import LISTENER_VARIABLE, REPORT_VARIABLE

OnLine = Callable[[int, str], None]
"""Called with the rank of a child and a line that it wrote."""

LINES_KEPT = 200
LINE_BYTES_MAX = 1 << 16
DRAIN_SECONDS = 1.0
"""How long to wait for the last lines of a child that has ended."""

_TO_CHILD_ALONE = (signal.SIGINT, signal.SIGTERM)
"""Signals to which the child reacts, ending its own children. All others go to the whole process group."""

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
"""Program of a bare interpreter, which then becomes the child by `exec`; the setting of `prctl` survives that."""


class Child:
    """A process of a run: one incarnation of one rank. Its methods are for one thread."""

    def __init__(
        self,
        rank: int,
        incarnation: int,
        pid: int,
        pipes: _Pipes,
        on_line: OnLine,
        popen: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.rank, self.incarnation, self.pid = rank, incarnation, pid
        self.report: FailureReport | None = None
        """Why it failed, as it reported itself before it ended."""
        self._popen, self._pipes = popen, pipes
        self._code: int | None = None
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._on_line = on_line
        self._reader = threading.Thread(
            target=self._read, args=(pipes.output[0],), name=f"offbeat output {pid}", daemon=True
        )
        self._reader.start()
        guard.add(pid)

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs.

        Processes that it left behind are killed before its process number can be reused.
        """
        if self._code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self._signal_group(signal.SIGKILL)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            guard.remove(self.pid)
            if self._popen is not None:
                self._popen.returncode = self._code
            self.report = read_report(self._pipes.reports[0])
            self._reader.join(DRAIN_SECONDS)
        return self._code

    def wait(self) -> int:
        """Block until it ends; the exit code."""
        while self.poll() is None:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert self._code is not None
        return self._code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; does nothing if the child has ended already."""
        if self.poll() is not None:
            return
        if number in _TO_CHILD_ALONE:
            os.kill(self.pid, number)
        else:
            self._signal_group(number)

    def _signal_group(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # just forked, without a session of its own yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def failure_reason(self) -> str | None:
        """Why it failed, in one line: as it reported, else as its output describes it; None if there was no output."""
        return describe_output(list(self._lines)) if self.report is None else self.report.sentence

    def _read(self, output: int) -> None:
        with open(output, "rb") as stream:
            while line := stream.readline(LINE_BYTES_MAX):
                text = line.decode("utf-8", errors="replace").rstrip("\r\n")
                self._lines.append(text)
                self._on_line(self.rank, text)


def describe_output(lines: Iterable[str]) -> str | None:
    """The line of the output of a failed process that most likely says why; only to be shown, since it may not.

    After a traceback it is the line that names the exception, otherwise the last one.
    """
    printed = [line for line in lines if line.strip()]
    tracebacks = [index for index, line in enumerate(printed) if line.startswith(_TRACEBACK)]
    exception = first_unindented(printed[tracebacks[-1] + 1 :]) if tracebacks else None
    return exception or (printed[-1].strip() if printed else None)


class _Pipes:
    """From a child to this process: what it prints, and its report of a failure. Pairs of reading and writing end."""

    def __init__(self) -> None:
        self.output = os.pipe()
        try:
            self.reports = os.pipe()
        except OSError:
            os.close(self.output[0])
            os.close(self.output[1])
            raise

    def close(self, end: Literal[0, 1]) -> None:
        """Close the two reading ends, 0, or the two writing ends, 1."""
        os.close(self.output[end])
        os.close(self.reports[end])

    def environment(self, listener: socket.socket | None) -> dict[str, str]:
        """Variables by which a child finds the descriptors that are passed to it."""
        passed = {REPORT_VARIABLE: pipe_address(self.reports[1])}
        return passed if listener is None else {**passed, LISTENER_VARIABLE: str(listener.fileno())}


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
    """Start a program.

    Args:
        argv: the program and its arguments.
        rank: of the child.
        incarnation: how often the rank was started before.
        environment: variables in addition to those of this process.
        on_line: called with each line of stderr and stdout, in a thread of its own.
        listener: a listening socket for the child, which finds its number in OFFBEAT_LISTENER; closed here.
        own_stdout: let the child write to the stdout of this process.

    Raises:
        RunFailed: the program cannot be started.
    """
    try:
        pipes = _Pipes()
    except OSError as error:
        raise _cannot_start(argv[0], error) from None
    bound = [sys.executable, "-I", "-S", "-c", _BOUND_TO_PARENT, str(os.getpid())] if _LINUX else []
    try:
        popen = subprocess.Popen(
            [*bound, *argv],
            env={
                "OMP_NUM_THREADS": "1",
                **memory_environment(),
                **os.environ,
                **environment,
                **pipes.environment(listener),
            },
            stdin=subprocess.DEVNULL,
            stdout=None if own_stdout else pipes.output[1],
            stderr=pipes.output[1],
            pass_fds=[pipes.reports[1]] if listener is None else [pipes.reports[1], listener.fileno()],
            start_new_session=True,
        )
    except OSError as error:
        pipes.close(0)
        raise _cannot_start(argv[0], error) from None
    finally:
        pipes.close(1)
        if listener is not None:
            listener.close()
    return Child(rank, incarnation, popen.pid, pipes, on_line, popen)


def start_forked(
    function: Callable[[], int],
    *,
    rank: int,
    incarnation: int,
    environment: Mapping[str, str],
    on_line: OnLine,
    listener: socket.socket | None = None,
) -> Child:
    """Run a function in a forked copy of this process, for what cannot be serialized; arguments as `start_command`."""
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # It warns that other threads may hold locks: the copy uses none of them, and exits without cleaning up.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pipes = _Pipes()
        except OSError as error:
            raise _cannot_start(f"the process of rank {rank}", error) from None
        try:
            pid = os.fork()
        except OSError as error:
            pipes.close(0)
            pipes.close(1)
            raise _cannot_start(f"the process of rank {rank}", error) from None
    if pid == 0:
        code = 1
        try:
            pipes.close(0)
            code = _forked(function, parent, pipes, {**environment, **pipes.environment(listener)})
        finally:
            os._exit(code)  # no exit handler of the copied process may run twice
    pipes.close(1)
    if listener is not None:
        listener.close()
    return Child(rank, incarnation, pid, pipes, on_line)


def _cannot_start(what: str, error: OSError) -> RunFailed:
    is_limit = error.errno in (errno.EMFILE, errno.ENFILE)
    hint = "; allow more open files, for example by: ulimit -n 4096" if is_limit else ""
    return RunFailed(f"{what} cannot be started ({error.strerror}){hint}")


def _forked(function: Callable[[], int], parent: int, pipes: _Pipes, environment: Mapping[str, str]) -> int:
    os.setsid()
    guard.forget()
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        return 1
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(pipes.output[1], 1)
    os.dup2(pipes.output[1], 2)
    os.close(pipes.output[1])
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  (open until the process ends)
    os.environ.update(environment)
    keep_freed_memory()
    return _exit_code(function, pipes.reports[1])


def _exit_code(function: Callable[[], int], reports: int) -> int:
    """Exit code of a function, as the command line has it; a failure is reported."""
    try:
        return function()
    except OffbeatError as error:
        if not send_report(reports, report_of(error)):
            print(f"offbeat: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        is_reported = send_report(reports, report_of(error))
        if not (is_reported and is_out_of_memory(error)):  # where it ran out says nothing
            traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()
