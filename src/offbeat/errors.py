"""What can go wrong, split by who can mend it.

    OffbeatError
    ├── ConfigurationError   you: a value, a name, a file; exit code 2
    │   └── MissingDependency    you: names the extra and the line that installs it
    ├── RunFailed            the run: it started and could not go on; exit code 1
    └── ContractViolation    the author of a strategy: a node broke the contract of `strategies/strategy.py`

Every message says what happened, what was expected and what to type.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OffbeatError(Exception):
    """The root of everything this library raises on purpose."""


class ConfigurationError(OffbeatError):
    """A value, name or file that you gave cannot be used."""


class MissingDependency(ConfigurationError):
    """An optional package is needed; the message holds the line that installs it."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed; type: pip install 'offbeat[{extra}]'")


class RunFailed(OffbeatError):
    """A run started and could not go on."""


class ContractViolation(OffbeatError):
    """A node did what the contract between strategies and engines forbids."""


def unknown(what: str, given: str, known: Iterable[str], hint: str = "") -> ConfigurationError:
    """The answer to a name that does not exist: the nearest one that does, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.55)
    if close:
        advice = f"did you mean {close[0]!r}?"
    elif names:
        advice = f"known: {', '.join(names)}"
    else:
        advice = "there is none to choose from"
    return ConfigurationError(f"unknown {what} {given!r}; {advice}{'; ' + hint if hint else ''}")
