"""Strategy and workload classes by name, or from a user's file as path/to/file.py:ClassName."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import offbeat.lab.workloads
import offbeat.strategies  # noqa: F401  (both register their classes)
from offbeat.core.configuration import is_file
from offbeat.core.strategy import Strategy
from offbeat.core.workload import NamedWorkload
from offbeat.errors import ConfigurationError, quoted, unknown
from offbeat.lab.experiment_plan import strategy_entries

EXAMPLE = "type, for example: offbeat simulate digits fmb amb"

_LABELS: dict[type[Any], str] = {}
"""Labels of classes from files: their attribute `name`, or else the class name."""


@functools.cache
def strategies() -> dict[str, type[Any]]:
    """The strategies of offbeat by name, without classes from files that are registered later."""
    return dict(Strategy.members)


@functools.cache
def workloads() -> dict[str, type[Any]]:
    """The workloads of offbeat by name, without classes from files that are registered later."""
    return dict(NamedWorkload.members)


def find_strategy(word: str) -> tuple[type[Any], str]:
    """The class and the label of a strategy by its name or file."""
    if word not in strategies() and word in workloads():
        raise ConfigurationError(f"{word!r} is a workload; a command names one, first, and then strategies")
    return _find(word, Strategy, strategies(), "strategy")


def find_workload(word: str) -> tuple[type[Any], str]:
    """The class and the label of a workload by its name or file."""
    if word not in workloads() and word in strategies():
        raise ConfigurationError(f"{word!r} is a strategy, and the workload comes first; {EXAMPLE}")
    return _find(word, NamedWorkload, workloads(), "workload")


def _find(word: str, family: type[Any], known: Mapping[str, type[Any]], what: str) -> tuple[type[Any], str]:
    if ".py:" in word:
        return from_source(word, family, what)
    if word not in known:
        raise unknown(what, word, known)
    return known[word], word


def from_source(word: str, family: type[Any], what: str) -> tuple[type[Any], str]:
    """Load a class from a file, and return it with its label.

    It is registered under `word`, so that records and experiment files can name it.

    Args:
        word: the class, as path/to/file.py:ClassName.
        family: the base class that it must have.
        what: the noun for the family in errors.
    """
    path, _, name = word.rpartition(":")
    if not is_file(Path(path)):
        raise ConfigurationError(
            f"there is no Python file {quoted(path)}; a class of your own is path/to/file.py:ClassName"
        )
    module = _load(str(Path(path).resolve()), path)
    cls: Any = getattr(module, name, None)
    if not _fits(cls, family):
        names = [key for key, value in vars(module).items() if _fits(value, family)]
        raise unknown(
            f"{what} in {path}", name, [key for key in names if vars(module)[key].__module__ == module.__name__]
        )
    label = _LABELS.setdefault(cls, vars(cls).get("name") or cls.__name__)
    family.members[word] = cls
    cls.name = word
    return cls, label


def _fits(value: Any, family: type[Any]) -> bool:
    return isinstance(value, type) and issubclass(value, family) and dataclasses.is_dataclass(value)


@functools.cache
def _load(resolved: str, shown: str) -> ModuleType:
    name = f"offbeat_user_{Path(resolved).stem}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{shown} is no Python file; a class of your own is path/to/file.py:ClassName")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses resolve the types of their fields there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigurationError(f"{shown} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def load_files(table: Mapping[str, Any], where: str, allowed: Iterable[str] | None = None) -> None:
    """Load the classes from files that an experiment names.

    Args:
        table: the experiment as plain data.
        where: the source of the experiment, for errors.
        allowed: the files that the user has allowed to be run; None: all, since the user has named the experiment.

    Raises:
        ConfigurationError: a strategy or label has a wrong type, or a class cannot be loaded, or must not be.
    """
    strategies(), workloads()  # cache them before classes from files are registered
    for entry in strategy_entries(table.get("strategy", []), where):
        _check_allowed(entry, where, allowed)
        _load_named(entry, Strategy, "strategy")
    _check_allowed(table.get("workload"), where, allowed)
    _load_named(table.get("workload"), NamedWorkload, "workload")


def _load_named(entry: Any, family: type[Any], what: str) -> None:
    if (name := _file_class(entry)) is not None:
        from_source(name, family, what)


def _check_allowed(entry: Any, where: str, allowed: Iterable[str] | None) -> None:
    """Raise ConfigurationError if an entry names a file that is not allowed to be run."""
    name = _file_class(entry)
    if name is None or allowed is None:
        return
    path = name.rpartition(":")[0]
    if Path(path).resolve() not in {Path(file).resolve() for file in allowed}:
        raise ConfigurationError(
            f"{where} names {name}, which would run that file as Python; if you trust it, add: --allow {path}"
        )


def _file_class(entry: Any) -> str | None:
    """The class in a file that an entry names; None if it names none."""
    name = entry.get("name") if isinstance(entry, dict) else entry
    return name if isinstance(name, str) and ".py:" in name else None
