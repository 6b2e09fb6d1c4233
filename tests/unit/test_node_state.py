"""The state of a node follows from its annotated attributes, and restores them with their types."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

import offbeat as ob
from offbeat.core.actions import Budget
from offbeat.core.messages import Buffers, Stop
from offbeat.core.randomness import stream
from offbeat.core.sample_ledger import SampleLedger
from offbeat.records.schema import Contribution
from offbeat.strategies.node_state import Stateful
from offbeat.testing.strategy_conformance import is_equal, plain_copy


@dataclass
class Entry:
    values: Tensor
    by_rank: dict[int, float] = field(default_factory=dict)


class Part(Stateful):
    count: int = 0


class Stage(Enum):
    FIRST = "first"
    SECOND = "second"


class Whole(Stateful):
    limit: ClassVar[int] = 3

    _number: int = 0
    _nothing: str | None = None
    _vector: Tensor
    _sum: Tensor | None = None
    _buffers: Buffers = ()
    _ranks: set[int]
    _fixed: frozenset[int] = frozenset()
    _pairs: list[tuple[int, float]]
    _by_pair: dict[tuple[int, int], Entry]
    _ledgers: dict[int, SampleLedger]
    _stop: Stop | None = None
    _budget: Budget | None = None
    _parts: list[Contribution]
    _part: Part
    _several: list[Part]
    _stage: Stage = Stage.FIRST
    _newest: deque[Tensor]
    _random: np.random.Generator

    def __init__(self) -> None:
        self.configuration = object()
        self._vector = torch.zeros(2)
        self._ranks, self._pairs, self._by_pair, self._ledgers, self._parts = set(), [], {}, {}, []
        self._part, self._several = Part(), [Part(), Part()]
        self._newest, self._random = deque([torch.zeros(1)], maxlen=2), stream(0, "test")


def filled() -> Whole:
    whole = Whole()
    whole._number = 7
    whole._vector.fill_(3.0)
    whole._sum = torch.ones(2)
    whole._buffers = (torch.tensor([1]), torch.tensor([2.0]))
    whole._ranks, whole._fixed = {3, 1}, frozenset({2})
    whole._pairs = [(1, 0.5)]
    whole._by_pair = {(1, -1): Entry(torch.ones(1), {2: 0.25})}
    whole._ledgers = {1: SampleLedger([(0, 4), (8, 9)])}
    whole._stop = Stop(torch.ones(2), (torch.zeros(1),), 5)
    whole._budget = ob.Seconds(2.0, samples_max=9)
    whole._parts = [Contribution(1, 0, 4, 2)]
    whole._part.count, whole._several[1].count = 4, 5
    whole._stage = Stage.SECOND
    whole._newest.extend([torch.ones(1), torch.full((1,), 2.0)])
    whole._random.random()
    return whole


def test_every_annotated_attribute_is_restored_with_its_type() -> None:
    original, again = filled(), Whole()
    again.restore(plain_copy(original.state(), "state"))
    assert is_equal(plain_copy(original.state(), ""), plain_copy(again.state(), ""))
    assert (again._ranks, again._fixed, again._pairs) == ({1, 3}, frozenset({2}), [(1, 0.5)])
    assert again._by_pair[1, -1].by_rank == {2: 0.25}
    assert again._ledgers[1].ranges == [(0, 4), (8, 9)]
    assert again._stop is not None
    assert isinstance(again._stop.buffers, tuple)
    assert (again._budget, again._parts) == (ob.Seconds(2.0, samples_max=9), [Contribution(1, 0, 4, 2)])
    assert (again._part.count, [part.count for part in again._several]) == (4, [0, 5])
    assert (again._stage, [float(value) for value in again._newest]) == (Stage.SECOND, [1.0, 2.0])
    assert again._newest.maxlen == 2
    assert again._random.random() == original._random.random()


def test_a_node_without_changes_is_restored_too() -> None:
    again = filled()
    again.restore(plain_copy(Whole().state(), "state"))
    assert (again._number, again._ranks, again._by_pair, again._stop) == (0, set(), {}, None)


def test_the_configuration_and_class_variables_are_not_part_of_the_state() -> None:
    assert not {"configuration", "limit"} & filled().state().keys()


def test_a_state_does_not_change_with_its_node_and_tensors_are_restored_in_place() -> None:
    whole = filled()
    state, vector = whole.state(), whole._vector
    vector.zero_()
    assert state["vector"].tolist() == [3.0, 3.0]
    whole.restore(state)
    assert whole._vector is vector
    assert vector.tolist() == [3.0, 3.0]
