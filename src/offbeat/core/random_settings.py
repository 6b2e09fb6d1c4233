"""Random settings of strategies, for the random cases of `offbeat.testing`.

`shared_settings` draws the fields that many strategies have under the same name. `Strategy.random_settings` draws the
others, by default from their types.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

from numpy.random import Generator

from offbeat.core.configuration import Family, options
from offbeat.core.optimizers import SGD, Adam, Optimizer
from offbeat.core.schedules import Linear

PARAMETERS_MIN = 4
"""Number of parameters of the smallest model that random cases train."""

PATIENCE_SECONDS = 60.0
"""Longer than any outage in a random case, so that no node times out during one."""


def maybe(random: Generator, value: Any) -> Any:
    """The value or None, with equal probability."""
    return value if random.random() < 0.5 else None


def random_optimizer(random: Generator) -> Optimizer | None:
    """One of three optimizers, or None for that of the workload."""
    decaying = SGD(lr=Linear(start=0.05, end=0.0, samples=500), weight_decay=0.01, clip_norm=10.0)
    return [None, SGD(lr=0.02, momentum=0.9), Adam(lr=0.01), decaying][int(random.integers(4))]


SHARED: dict[str, Callable[[Generator, int], Any]] = {
    "batch": lambda random, workers: int(random.integers(8, 49)),
    "microbatch": lambda random, workers: int(random.integers(1, 17)),
    "seconds": lambda random, workers: maybe(random, float(random.uniform(0.05, 0.6))),
    "samples_max": lambda random, workers: maybe(random, int(random.integers(16, 65))),
    "worker_seconds": lambda random, workers: float(random.uniform(0.05, 0.6)),
    "hub_seconds": lambda random, workers: float(random.uniform(0.05, 0.6)),
    "messages": lambda random, workers: maybe(random, int(random.integers(1, 6))),
    "k": lambda random, workers: maybe(random, int(random.integers(1, workers + 1))),
    "staleness_max": lambda random, workers: maybe(random, int(random.integers(1, 6))),
    "damping": lambda random, workers: float(random.choice([0.0, 0.5, 1.0])),
    "in_flight_max": lambda random, workers: int(random.integers(1, 4)),
    "optimizer": lambda random, workers: random_optimizer(random),
    "patience_seconds": lambda random, workers: PATIENCE_SECONDS,
}
"""Field name → its random value, given the number of workers. The order of this table determines the cases."""


def shared_settings(random: Generator, workers: int) -> dict[str, Any]:
    """A value for every name in `SHARED`; all are drawn, so that every strategy consumes the same random numbers."""
    return {name: draw(random, workers) for name, draw in SHARED.items()}


def settings_by_type(cls: type[Any], random: Generator) -> dict[str, Any]:
    """Values for the fields of `cls` whose choices follow from their types.

    These are booleans and members of families without required arguments. Fields in `SHARED`, `compression` (which has
    its own tests) and a strategy that `cls` wraps are omitted.
    """
    settings = {}
    for item in options(cls):
        if item.path in SHARED or item.path == "compression" or item.kind in cls.__mro__:
            continue
        if choices := _choices(item.kind):
            settings[item.path] = choices[int(random.integers(len(choices)))]
    return settings


def _choices(kind: Any) -> list[Any]:
    if kind is bool:
        return [False, True]
    if kind is type(None):
        return [None]
    if isinstance(kind, type) and issubclass(kind, Family):
        return [member() for member in kind.members.values() if _has_only_defaults(member)]
    inner = [_choices(choice) for choice in typing.get_args(kind)]
    return [choice for choices in inner for choice in choices] if all(inner) else []


def _has_only_defaults(cls: type[Any]) -> bool:
    return all(item.default is not dataclasses.MISSING for item in options(cls))
