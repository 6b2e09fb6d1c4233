"""What identifies a run: texts of model and strategy that are the same in every process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import offbeat as ob
from offbeat.core.configuration import from_plain, to_plain
from offbeat.core.flat import FlatModule
from offbeat.core.run_identity import RunIdentity

LAYOUT = FlatModule(torch.nn.Linear(2, 3)).layout


class Threshold:
    """An object without fields that a dataclass would show."""

    def __init__(self, level: float) -> None:
        self.level = level


@dataclass(frozen=True)
class Custom(ob.FixedMinibatch):
    accept: Callable[[float], bool] | None = None
    threshold: object = None


@dataclass(frozen=True)
class OtherCustom(Custom):
    pass


def text(strategy: ob.Strategy) -> str:
    return RunIdentity.of(LAYOUT, strategy).strategy


def is_positive(value: float) -> bool:
    return value > 0


@pytest.mark.parametrize("name", sorted(ob.Strategy.members))
def test_a_strategy_that_was_sent_as_plain_data_has_the_same_identity(name: str) -> None:
    strategy = ob.Strategy.members[name]()
    assert text(from_plain(ob.Strategy, to_plain(strategy), "strategy")) == text(strategy)


def test_the_text_names_the_class_and_its_fields() -> None:
    strategy = ob.FixedMinibatch(batch=32, optimizer=ob.SGD(lr=0.5))
    assert text(strategy).startswith("FixedMinibatch(")
    assert "batch=32" in text(strategy)
    assert "optimizer=SGD(lr=0.5, " in text(strategy)


def test_every_field_counts_and_equal_numbers_are_equal() -> None:
    strategy = ob.FixedMinibatch(batch=32, optimizer=ob.SGD(lr=1))
    assert text(strategy) == text(replace(strategy, optimizer=ob.SGD(lr=1.0)))
    assert text(strategy) == text(replace(strategy, batch=np.int64(32)))  # type: ignore[arg-type]
    others = [
        replace(strategy, batch=33),
        replace(strategy, optimizer=ob.SGD(lr=1, momentum=0.9)),
        replace(strategy, compression=ob.compression.Int8()),
    ]
    assert len({text(each) for each in [strategy, *others]}) == 4


def test_functions_and_objects_are_named_without_addresses() -> None:
    def strategy(**fields: Any) -> Custom:
        return Custom(batch=32, optimizer=ob.SGD(lr=1.0), **fields)

    assert "accept=is_positive" in text(strategy(accept=is_positive))
    assert "threshold=Threshold(level=0.5)" in text(strategy(threshold=Threshold(0.5)))
    different = [strategy(threshold=Threshold(level)) for level in (1.0, 2.0)]
    assert text(different[0]) != text(different[1])
    partial = functools.partial(is_positive, value=2.0)
    assert "accept=partial(func=is_positive, args=[], keywords={'value': 2})" in text(strategy(accept=partial))
    assert "0x" not in text(strategy(threshold=[object(), {"a": Threshold(1)}]))
    assert text(strategy()) != text(OtherCustom(batch=32, optimizer=ob.SGD(lr=1.0)))


def test_the_model_is_identified_by_its_layout() -> None:
    strategy = ob.FixedMinibatch()
    other = FlatModule(torch.nn.Linear(3, 2)).layout
    assert RunIdentity.of(LAYOUT, strategy).model == LAYOUT.fingerprint()
    assert RunIdentity.of(LAYOUT, strategy) != RunIdentity.of(other, strategy)
    assert RunIdentity.of(LAYOUT, strategy) == RunIdentity.of(FlatModule(torch.nn.Linear(2, 3)).layout, strategy)
