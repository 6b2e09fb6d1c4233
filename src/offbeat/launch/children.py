"""Child processes that cannot outlive this one, and whose output is read line by line.

Each has a session of its own. So Ctrl-C in a terminal reaches this process alone, which forwards it in an order of its
own, and the processes that a child has started (the workers of a DataLoader) can be ended with it. If this process
dies, even by SIGKILL, the kernel kills the child, on Linux. It does so when the *thread* that started the child ends:
start children in one that stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from offbeat.errors import ConfigurationError, OffbeatError, RunFailed
from offbeat.launch.process_settings import keep_freed_memory, memory_environment

OnLine = Callable[[int, str], None]
"""Called with the rank of a child and a line that it wrote."""

ULFM_SINCE = 5
"""The first version of Open MPI whose mpirun lets the other processes go on when one is lost."""

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

        Processes that it left behind are killed before its process number can be reused.
        """
        if self._code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self._signal_group(signal.SIGKILL)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            if self._popen is not None:
                self._popen.returncode = self._code
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

    @property
    def sentence(self) -> str | None:
        """The error sentence of offbeat that it ended with; None if there is none, or a traceback followed."""
        lines = list(self._lines)
        for line in reversed(lines):
            if line.startswith("offbeat: "):
                return line.removeprefix("offbeat: ")
            if line.startswith(_TRACEBACK):
                return None
        return None

    def failure_reason(self) -> str | None:
        """Why it failed: its error sentence, else the line that names the exception, else its last line."""
        if self.sentence is not None:
            return self.sentence
        lines = [line for line in self._lines if line.strip()]
        tracebacks = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
        exceptions = [line for line in lines[tracebacks[-1] + 1 :] if not line[0].isspace()] if tracebacks else []
        return exceptions[0] if exceptions else lines[-1].strip() if lines else None

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
    reading_end, writing_end = os.pipe()
    passed = {} if listener is None else {"OFFBEAT_LISTENER": str(listener.fileno())}
    bound = [sys.executable, "-I", "-S", "-c", _BOUND_TO_PARENT, str(os.getpid())] if _LINUX else []
    try:
        popen = subprocess.Popen(
            [*bound, *argv],
            env={"OMP_NUM_THREADS": "1", **memory_environment(), **os.environ, **environment, **passed},
            stdin=subprocess.DEVNULL,
            stdout=None if own_stdout else writing_end,
            stderr=writing_end,
            pass_fds=() if listener is None else (listener.fileno(),),
            start_new_session=True,
        )
    except OSError as error:
        os.close(reading_end)
        raise RunFailed(f"{argv[0]} cannot be started ({error.strerror})") from None
    finally:
        os.close(writing_end)
        if listener is not None:
            listener.close()
    return Child(rank, incarnation, popen.pid, reading_end, on_line, popen)


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
    reading_end, writing_end = os.pipe()
    passed = {} if listener is None else {"OFFBEAT_LISTENER": str(listener.fileno())}
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # It warns that other threads may hold locks: the copy uses none of them, and exits without cleaning up.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading_end)
            code = _forked(function, parent, writing_end, {**environment, **passed})
        finally:
            os._exit(code)  # no exit handler of the copied process may run twice
    os.close(writing_end)
    if listener is not None:
        listener.close()
    return Child(rank, incarnation, pid, reading_end, on_line)


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
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  (open until the process ends)
    os.environ.update(environment)
    keep_freed_memory()
    return _exit_code(function)


def _exit_code(function: Callable[[], int]) -> int:
    """Exit code of a function, and on stderr the reason of a failure, as the command line has them."""
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


# mpirun: the one beside this Python comes first, since `pip install 'offbeat[mpi]'` puts it there with its library.


def mpirun_command(processes: int) -> list[str]:
    """The start of a command line that runs a program in `processes` processes on this machine."""
    program = _find_mpirun()
    flags = ["-n", str(processes)]
    if match := re.search(r"\(Open MPI\) (\d+)", _version(program)):
        # Ranks have several threads and there may be more ranks than cores, so none is bound to a core.
        flags += ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            flags.append("--allow-run-as-root")
        if int(match[1]) >= ULFM_SINCE:
            flags += ["--with-ft", "ulfm"]
    return [program, *flags]


def _find_mpirun() -> str:
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.is_file() else shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None:
        raise ConfigurationError(
            "mpirun was not found; type: pip install 'offbeat[mpi]', or put the one of this machine on the PATH"
        )
    return program


def _version(program: str) -> str:
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"{program} does not work ({error}); type: pip install 'offbeat[mpi]'") from None
