"""Data positions against a plain set of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.sample_ledger import SampleLedger
from offbeat.errors import ContractViolation

ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)).map(lambda pair: (pair[0], sum(pair))), max_size=20)


@given(ranges, st.integers(0, 80))
def test_draws_behave_like_a_set_that_refuses_duplicates(pairs: list[tuple[int, int]], position: int) -> None:
    draws, model = SampleLedger(), set()
    for first, stop in pairs:
        wanted = set(range(first, stop))
        if wanted & model:
            with pytest.raises(ContractViolation):
                draws.add(first, stop)
        else:
            draws.add(first, stop)
            model |= wanted
    assert {draw for first, stop in draws.ranges for draw in range(first, stop)} == model
    assert len(draws) == len(model)
    assert draws.stop == max(model, default=-1) + 1
    assert draws.first_missing == next(draw for draw in range(200) if draw not in model)
    missing = {draw for first, stop in draws.missing_below(position) for draw in range(first, stop)}
    assert missing == set(range(position)) - model
    assert (position in draws) == (position in model)

    start, room = draws.room_from(position)
    assert start == next(draw for draw in range(position, 300) if draw not in model)
    if room is None:
        assert not any(draw > start for draw in model)
    else:
        assert start + room in model
        assert not any(draw in model for draw in range(start, start + room))


@given(ranges, ranges)
def test_removed_draws_are_missing_again(pairs: list[tuple[int, int]], removed: list[tuple[int, int]]) -> None:
    draws, model = SampleLedger(), set()
    for first, stop in pairs:
        if not model & set(range(first, stop)):
            draws.add(first, stop)
            model |= set(range(first, stop))
    for first, stop in removed:
        wanted = set(range(first, stop))
        if wanted <= model:
            draws.remove(first, stop)
            model -= wanted
        else:
            with pytest.raises(ContractViolation):
                draws.remove(first, stop)
    assert {draw for first, stop in draws.ranges for draw in range(first, stop)} == model


@given(ranges)
def test_ranges_are_disjoint_sorted_and_joined(pairs: list[tuple[int, int]]) -> None:
    draws = SampleLedger()
    for first, stop in pairs:
        if not any(draw in draws for draw in range(first, stop)):
            draws.add(first, stop)
    for (_, stop), (first, _) in zip(draws.ranges, draws.ranges[1:], strict=False):
        assert stop < first


def test_an_empty_range_has_no_effect() -> None:
    draws = SampleLedger()
    draws.add(5, 5)
    assert draws.ranges == []
