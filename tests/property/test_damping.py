"""Properties of the weights of stale gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.core.flat import FlatModule
from offbeat.strategies.hub.damping import free_staleness, gradient_weight
from offbeat.strategies.hub.hub_parts import AllWorkers, Messages

STALENESS = st.integers(0, 10_000)


@given(
    damping=st.floats(0, 3),
    free=st.integers(0, 10),
    staleness=STALENESS,
    expected=st.floats(0, 100),
    is_initial=st.booleans(),
)
def test_a_weight_is_positive_at_most_one_and_falls_with_staleness(
    damping: float, free: int, staleness: int, expected: float, is_initial: bool
) -> None:
    fresher = gradient_weight(damping, free, staleness, expected, is_initial)
    staler = gradient_weight(damping, free, staleness + 1, expected, is_initial)
    assert 0 < staler <= fresher <= 1


@given(staleness=STALENESS, expected=st.floats(0, 100), is_initial=st.booleans())
def test_damping_0_is_the_published_behaviour(staleness: int, expected: float, is_initial: bool) -> None:
    assert gradient_weight(0.0, 1, staleness, expected, is_initial) == 1.0


@given(free=st.integers(0, 3), staleness=STALENESS)
def test_rates_fall_as_one_over_the_staleness(free: int, staleness: int) -> None:
    weight = gradient_weight(1.0, free, staleness, 0.0, is_initial=False)
    assert weight == min(1.0, (1 + free) / (1 + staleness))


@given(arrivals=st.integers(1, 500), free=st.integers(0, 1))
def test_gradients_at_the_initial_parameters_make_few_whole_steps_however_many_arrive(arrivals: int, free: int) -> None:
    total = sum(gradient_weight(1.0, free, staleness, 0.0, is_initial=True) for staleness in range(arrivals))
    assert total < 4


def test_what_is_known_before_a_delay_was_measured() -> None:
    assert Messages(1).expected_staleness(64) == 63
    assert Messages(None).expected_staleness(64) < 1
    assert AllWorkers().expected_staleness(64) == 0
    assert gradient_weight(1.0, 1, 0, 63, is_initial=False) == 2 / 64


@pytest.mark.parametrize(
    ("optimizer", "free"),
    [
        (ob.SGD(), 0),
        (ob.SGD(momentum=0.9), 0),
        (ob.Adam(), 1),
        (ob.AMSGrad(), 1),
        (ob.RMSprop(), 1),
        (ob.RMSprop(momentum=0.9), 0),
        (ob.TorchOptimizer(lambda groups: torch.optim.NAdam(groups)), 1),
        (ob.TorchOptimizer(lambda groups: torch.optim.SGD(groups, lr=0.1)), 0),
    ],
)
def test_staleness_that_is_free_by_default(optimizer: ob.nodes.Optimizer, free: int) -> None:
    flat = FlatModule(torch.nn.Linear(2, 1))
    assert free_staleness(optimizer.build(flat.parameters, flat.layout)) == free


@given(staleness=st.integers(0, 200), share=st.floats(0.01, 0.75))
def test_a_rate_that_is_stable_without_delay_is_stable_with_one(staleness: int, share: float) -> None:
    """A quadratic in one dimension, at a share of the largest stable rate, which is 2."""
    rate = 2 * share * gradient_weight(1.0, 0, staleness, 0.0, is_initial=False)
    assert rate < 2 * math.sin(math.pi / (4 * staleness + 2))
    values = [1.0] * (staleness + 1)
    for _ in range(60 * (staleness + 1)):
        values.append(values[-1] - rate * values[-1 - staleness])
    assert max(map(abs, values[-staleness - 1 :])) < 1.0


def largest_value_at_the_end(staleness: int, momentum: float, length: float, damping: float) -> float:
    """Delayed descent on the quadratic x²/2 with heavy-ball momentum, started at 1.

    length: the length of a step for a constant gradient of 1, after damping
    """
    flat = FlatModule(torch.nn.Linear(1, 1, bias=False).double())
    parameters = torch.ones(1, dtype=torch.float64)
    optimizer = ob.SGD(lr=length * (1 - momentum) / damping, momentum=momentum)
    stepper = optimizer.build(parameters, flat.layout)
    values = [1.0] * (staleness + 1)
    for _ in range(150 * (staleness + 1)):
        stepper.step(torch.tensor([values[-1 - staleness]], dtype=torch.float64), 0, damping)
        values.append(parameters.item())
    return max(map(abs, values[-10 * (staleness + 1) :]))


@pytest.mark.parametrize("staleness", [2, 7])
def test_momentum_adds_to_the_delay_unless_it_is_damped_with_the_rate(staleness: int) -> None:
    """Steps of a length that plain descent bears with this delay: with 0.9 of momentum it diverges."""
    length = 0.9 * 2 * math.sin(math.pi / (4 * staleness + 2))
    assert largest_value_at_the_end(staleness, 0.9, length, damping=1 / (1 + staleness)) < 0.1
    assert largest_value_at_the_end(staleness, 0.9, length, damping=1.0) > 2.0


def test_momentum_bears_long_steps_without_delay_and_with_one_update_of_it_no_longer_than_plain_descent() -> None:
    """The largest stable length is 2·(1 + μ)/(1 − μ), which is 38 at 0.9, and with a delay of one update it is 1."""
    assert largest_value_at_the_end(0, 0.9, 37.0, damping=1.0) < 0.1
    assert largest_value_at_the_end(1, 0.9, 0.9, damping=1.0) < 1.0
    assert largest_value_at_the_end(1, 0.9, 1.1, damping=1.0) > 1.0
