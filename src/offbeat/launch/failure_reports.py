"""How a child process tells its launcher why it failed: one report, through a pipe that carries nothing else.

The launcher passes the pipe with an environment variable, which `rank_info` reads. Forked children, the programs of the
command line and scripts that use `offbeat.join` write a report. A script that fails before it calls offbeat, or is
killed, leaves none: then its exit code decides what follows, and its last lines are only shown.
"""

from __future__ import annotations

import contextlib
import enum
import os
import stat
import sys
import traceback
from types import TracebackType

import msgspec

from offbeat.errors import ConfigurationError, ContractViolation, LinkLost, OffbeatError

SENTENCE_CHARACTERS_MAX = 10_000
"""Longer sentences are cut, so that a report fits into an empty pipe and no child blocks on writing it."""
REPORT_BYTES_MAX = 1 << 16

OUT_OF_MEMORY = "it ran out of memory; use a smaller model or micro-batch, or fewer processes on this machine"


class FailureKind(enum.Enum):
    """What kind of exception ended a process."""

    CONFIGURATION = "configuration"
    RUN_FAILED = "run failed"
    CONTRACT = "contract"
    INTERRUPTED = "interrupted"
    OTHER = "other"
    """An exception that is not one of offbeat's."""


class FailureReport(msgspec.Struct, frozen=True):
    """Why a process failed, as it says itself."""

    kind: FailureKind
    sentence: str
    """The error sentence; for OTHER the line of a traceback that names the exception."""
    lost_peer: int | None = None
    """The rank to which its link is gone, if that is why; the cause may be known there."""


def report_of(error: BaseException) -> FailureReport:
    """The report of an exception that ends this process."""
    if isinstance(error, OffbeatError):
        lost_peer = error.peer if isinstance(error, LinkLost) else None
        return FailureReport(_kind_of(error), one_line(error), lost_peer)
    if is_out_of_memory(error):
        return FailureReport(FailureKind.RUN_FAILED, OUT_OF_MEMORY)
    if isinstance(error, KeyboardInterrupt):
        return FailureReport(FailureKind.INTERRUPTED, "interrupted")
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return FailureReport(FailureKind.OTHER, first_unindented(lines) or type(error).__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or torch could not allocate memory; torch says so by a RuntimeError, or a subclass of its own."""
    is_torchs = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return isinstance(error, MemoryError) or is_torchs or type(error).__name__ == "OutOfMemoryError"


def _kind_of(error: OffbeatError) -> FailureKind:
    if isinstance(error, ConfigurationError):
        return FailureKind.CONFIGURATION
    return FailureKind.CONTRACT if isinstance(error, ContractViolation) else FailureKind.RUN_FAILED


def one_line(text: object) -> str:
    """A text without line breaks."""
    return " ".join(str(text).split())


def first_unindented(lines: list[str]) -> str | None:
    """The first line that is neither empty nor indented; below a traceback it names the exception."""
    return next((line for line in lines if line and not line[0].isspace()), None)


# The child's end of the pipe


def send_report(descriptor: int | None, report: FailureReport) -> bool:
    """Write a report to the pipe; False where there is none, or where its reader is gone."""
    if descriptor is None:
        return False
    report = msgspec.structs.replace(report, sentence=report.sentence[:SENTENCE_CHARACTERS_MAX])
    try:
        os.set_blocking(descriptor, False)
        os.write(descriptor, msgspec.json.encode(report) + b"\n")
    except OSError:
        return False
    return True


class _ReportingHook:
    """A `sys.excepthook` that reports the exception, and then calls the previous hook."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._pid, self._previous = descriptor, os.getpid(), sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if os.getpid() == self._pid:  # not in a process that was forked from this one
            send_report(self._descriptor, report_of(error))
        self._previous(kind, error, at)


def report_uncaught(descriptor: int | None) -> None:
    """Report exceptions that nothing catches in the main thread of this process; None does nothing."""
    if descriptor is not None and not isinstance(sys.excepthook, _ReportingHook):
        sys.excepthook = _ReportingHook(descriptor)


# The launcher's end


def pipe_address(descriptor: int) -> str:
    """The value of the environment variable that passes a pipe to a child."""
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def find_pipe(address: str) -> int | None:
    """The descriptor of a pipe in the child; None if this process has inherited the variable without the pipe."""
    with contextlib.suppress(OSError, ValueError):
        descriptor, inode = map(int, address.split(":"))
        status = os.fstat(descriptor)
        if stat.S_ISFIFO(status.st_mode) and status.st_ino == inode:
            return descriptor
    return None


def read_report(descriptor: int) -> FailureReport | None:
    """The report of a child that has ended, or None; closes the pipe."""
    with open(descriptor, "rb", buffering=0) as pipe:
        os.set_blocking(descriptor, False)  # processes that the child has started may hold the other end
        return decode_report(pipe.read(REPORT_BYTES_MAX) or b"")


def decode_report(lines: bytes) -> FailureReport | None:
    """The last of some reports; None if there is none, or if it is incomplete."""
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(lines.rstrip(b"\n").rpartition(b"\n")[2], type=FailureReport)
    return None
