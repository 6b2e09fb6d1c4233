"""The time to target, for any curve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.records.metrics import seconds_to_target
from offbeat.records.schema import Evaluation

heights = st.floats(0.0, 1.0).map(lambda value: round(value, 6))
goals = st.floats(1e-6, 1.0).map(lambda value: round(value, 6))


def curve(accuracies: list[float]) -> list[Evaluation]:
    return [
        Evaluation(at=float(index), rank=0, version=index, samples_total=index, loss=-accuracy, accuracy=accuracy)
        for index, accuracy in enumerate(accuracies)
    ]


@given(st.lists(heights, min_size=4, max_size=30, unique=True).map(sorted), st.floats(0.01, 0.99))
def test_a_rising_curve_is_not_shifted_by_smoothing(values: list[float], share: float) -> None:
    """The oracle is the inverse of the curve itself; its last step is left to the rule for ends."""
    goal = values[0] + share * (values[-2] - values[0])
    index = next(index for index, value in enumerate(values) if value >= goal)
    below = values[index - 1]
    expected = index - 1 + (goal - below) / (values[index] - below)
    assert seconds_to_target(curve(values), "accuracy", goal) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.integers(3, 20), st.data(), st.floats(0.0, 0.89))
def test_one_lucky_evaluation_never_counts(length: int, data: st.DataObject, plateau: float) -> None:
    values = [plateau] * length
    values[data.draw(st.integers(0, length - 1))] = 1.0
    assert seconds_to_target(curve(values), "accuracy", 0.9) is None


@given(st.lists(heights, max_size=30), goals)
def test_falling_to_a_loss_is_rising_to_an_accuracy(values: list[float], goal: float) -> None:
    assert seconds_to_target(curve(values), "loss", -goal) == seconds_to_target(curve(values), "accuracy", goal)


@given(st.lists(heights, min_size=1, max_size=30), goals)
def test_a_target_that_was_reached_lies_within_the_run_and_was_measured(values: list[float], goal: float) -> None:
    seconds = seconds_to_target(curve(values), "accuracy", goal)
    if seconds is None:
        return
    assert 0 <= seconds <= len(values) - 1
    assert max(values) >= goal


@given(st.lists(heights, max_size=30), goals, goals)
def test_a_higher_target_is_never_reached_sooner(values: list[float], one: float, other: float) -> None:
    low, high = (seconds_to_target(curve(values), "accuracy", goal) for goal in sorted((one, other)))
    if high is not None:
        assert low is not None
        assert low <= high
