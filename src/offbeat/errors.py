"""The exceptions of this library, by who can correct the cause.

    OffbeatError
    ├── ConfigurationError       the user: a value, a name or a file; exit code 2
    │   └── MissingDependency    the user: an optional package; the message has the command that installs it
    ├── RunFailed                the environment: the run started and could not continue; exit code 1
    └── ContractViolation        the author of a strategy: a node broke the contract of `core/strategy.py`
        └── UnexpectedMessage    the sender of a message: its receiver has no use for that kind

Every message says what happened, what was expected and what to type.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OffbeatError(Exception):
    """The base class of all exceptions of this library."""


class ConfigurationError(OffbeatError):
    """A value, name or file of the user cannot be used."""


class MissingDependency(ConfigurationError):
    """An optional package is not installed; the message has the command that installs it.

    what: the feature that needs it
    package: the name of the package
    extra: the extra of offbeat that contains it
    """

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed; type: pip install 'offbeat[{extra}]'")


class RunFailed(OffbeatError):
    """A run started and could not continue."""


class ContractViolation(OffbeatError):
    """A node broke the contract between strategies and engines (`core/strategy.py`)."""


class UnexpectedMessage(ContractViolation):
    """A node has received a kind of message that it does not handle. It is raised before the node has changed.

    source: the rank that sent it
    kind: the name of its class
    receiver: the rank that received it
    """

    def __init__(self, source: int, kind: str, receiver: int) -> None:
        super().__init__(
            f"rank {source} sent {kind} to rank {receiver}, which does not expect it; give every rank the same strategy"
        )
        self.source = source
        self.kind = kind
        self.receiver = receiver


def unknown(what: str, given: str, known: Iterable[str], hint: str = "") -> ConfigurationError:
    """The error for a name that does not exist, with the closest known name, or all of them.

    what: what the name stands for, such as "graph"
    given: the name
    known: the names that exist
    hint: appended to the sentence
    """
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.55)
    if close:
        advice = f"did you mean {close[0]!r}?"
    elif names:
        advice = f"known: {', '.join(names)}"
    else:
        advice = "there is none to choose from"
    return ConfigurationError(f"unknown {what} {given!r}; {advice}{'; ' + hint if hint else ''}")
