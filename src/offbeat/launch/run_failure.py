"""Why a run failed, or why one of its processes did: the cause, which decides what follows, and a sentence."""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass

from offbeat.launch.children import Child
from offbeat.launch.failure_reports import FailureKind, FailureReport

COMMAND_WAS_WRONG = 2
"""Exit code of a configuration error: a restart would not help."""


@dataclass(frozen=True)
class Exited:
    """The process ended with an exit code other than 0, and without a report."""

    code: int


@dataclass(frozen=True)
class Killed:
    """The process was killed by a signal."""

    signal: int


@dataclass(frozen=True)
class Reported:
    """The process reported why it failed."""

    report: FailureReport


Cause = Exited | Killed | Reported


@dataclass(frozen=True)
class RunFailure:
    """The failure of the process of one rank, and of the run if this rank decides it."""

    rank: int
    cause: Cause
    sentence: str

    @property
    def is_configuration(self) -> bool:
        """Whether the user has to correct a value or a name, so that a restart would fail again."""
        match self.cause:
            case Reported(report):
                return report.kind is FailureKind.CONFIGURATION
            case Exited(code):
                return code == COMMAND_WAS_WRONG
            case Killed():
                return False

    @property
    def lost_peer(self) -> int | None:
        """The rank to which its link was gone, if the process reported that it failed for that."""
        return self.cause.report.lost_peer if isinstance(self.cause, Reported) else None

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the process, so that it may succeed if it is started again."""
        return isinstance(self.cause, Killed)

    def preceded_by(self, text: str) -> RunFailure:
        """The same with `text` and a colon before its sentence."""
        return dataclasses.replace(self, sentence=f"{text}: {self.sentence}")


def failure_of(ended: Child, code: int, name: str, *, is_required: bool) -> RunFailure:
    """The failure of a process that has ended.

    Args:
        ended: the process.
        code: its exit code, or minus the signal that ended it.
        name: what its rank is called in the sentence.
        is_required: whether the run ends with this rank, so that an error sentence of offbeat speaks for the run.
    """
    if code < 0:
        return killed(ended.rank, name, signal_name(-code), -code)
    cause = Exited(code) if ended.report is None else Reported(ended.report)
    reason = ended.failure_reason()
    if reason is None:
        sentence = f"{with_article(name)} ended with exit code {code} and without a message"
    elif is_required and ended.report is not None and ended.report.kind is not FailureKind.OTHER:
        sentence = reason
    else:
        sentence = f"{name}: {reason}"
    return RunFailure(ended.rank, cause, sentence)


def killed(rank: int, name: str, by: str, number: int = signal.SIGKILL) -> RunFailure:
    """The failure of a process that was killed; `by` says by what."""
    return RunFailure(rank, Killed(number), f"{with_article(name)} was killed by {by}")


def with_article(name: str) -> str:
    """The name of a rank as the subject of a sentence."""
    return name if any(sign.isdigit() for sign in name) else f"the {name}"


def signal_name(number: int) -> str:
    """SIGKILL for 9, for example."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
