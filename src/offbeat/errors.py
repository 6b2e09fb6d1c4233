"""The exceptions of this library, by who can correct the cause.

    OffbeatError
    ├── ConfigurationError       the user: a value, a name or a file; exit code 2
    │   ├── FieldError           the user: the value of a field of a configuration
    │   └── MissingDependency    the user: an optional package; the message has the command that installs it
    ├── RunFailed                the environment: the run started and could not continue; exit code 1
    │   └── LinkLost             the environment: the link to another rank is gone
    └── ContractViolation        the author of a strategy: a node broke the contract of `core/strategy.py`
        └── InvalidMessage       the sender of a message: it contradicts what the sender was given
            └── UnexpectedMessage    or is of a kind that its receiver has no use for

Every message says what happened, what was expected and what to type.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

QUOTED_MAX = 200
"""Characters of a value that an error sentence shows."""


class OffbeatError(Exception):
    """The base class of all exceptions of this library."""


class ConfigurationError(OffbeatError):
    """A value, name or file of the user cannot be used."""


class FieldError(ConfigurationError):
    """A field of a configuration has a value that it cannot have.

    owner: the name of the class
    field: the name of the field
    problem: the rest of the sentence, such as "must be greater than 0, but is -1"
    """

    def __init__(self, owner: str, field: str, problem: str) -> None:
        super().__init__(f"{owner}.{field} {problem}")
        self.owner, self.field, self.problem = owner, field, problem


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


class LinkLost(RunFailed):
    """The link to a peer is gone, without which this process cannot continue.

    peer: the rank of the peer
    why: the reason that the transport gives
    sentence: the message; None: that the peer was lost
    """

    def __init__(self, peer: int, why: str, sentence: str | None = None) -> None:
        super().__init__(sentence or f"rank {peer} was lost ({why})")
        self.peer, self.why = peer, why


class ContractViolation(OffbeatError):
    """A node broke the contract between strategies and engines (`core/strategy.py`)."""


class InvalidMessage(ContractViolation):
    """A message contradicts what its sender was given. It is raised before the node has changed.

    source: the rank that sent it
    kind: the name of its class
    receiver: the rank that received it
    what: what is wrong with it, as the end of the sentence
    """

    def __init__(self, source: int, kind: str, receiver: int, what: str) -> None:
        super().__init__(f"rank {source} sent {kind} to rank {receiver}{what}")
        self.source = source
        self.kind = kind
        self.receiver = receiver


class UnexpectedMessage(InvalidMessage):
    """A node has received a kind of message that it does not handle. It is raised before the node has changed."""

    def __init__(self, source: int, kind: str, receiver: int) -> None:
        super().__init__(source, kind, receiver, ", which does not expect it; give every rank the same strategy")


def quoted(value: object) -> str:
    """A value from outside as an error sentence shows it: on one line, and cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists nested as deeply
        return f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= QUOTED_MAX else f"{text[:QUOTED_MAX]}…"


def shortened(value: object) -> str:
    """The text of an error, or of a name that was read: on one line, and without its middle where it is long."""
    text = " ".join(str(value).split())
    return text if len(text) <= 2 * QUOTED_MAX else f"{text[:QUOTED_MAX]}…{text[-QUOTED_MAX:]}"


def closest(given: str, known: Iterable[str]) -> str | None:
    """The known name that is most like the given one; None if none is."""
    return next(iter(difflib.get_close_matches(given, sorted(known), n=1, cutoff=0.55)), None)


def unknown(what: str, given: str, known: Iterable[str], hint: str = "") -> ConfigurationError:
    """The error for a name that does not exist, with the closest known name, or all of them.

    what: what the name stands for, such as "graph"
    given: the name
    known: the names that exist
    hint: appended to the sentence
    """
    names = sorted(known)
    close = closest(given, names)
    if close is not None:
        advice = f"did you mean {close!r}?"
    elif names:
        advice = f"known: {', '.join(names)}"
    else:
        advice = "there is none to choose from"
    return ConfigurationError(f"unknown {what} {quoted(given)}; {advice}{'; ' + hint if hint else ''}")
