"""What holds for every schedule, whatever its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.configuration import from_plain, to_plain
from offbeat.core.schedules import Constant, Cosine, Exponential, Linear, Milestones, Schedule, WarmUp, rate_at
from offbeat.errors import ConfigurationError

rates = st.floats(0.0, 10.0)
counts = st.integers(1, 10**9)
samples_so_far = st.integers(0, 10**12)
factors = st.floats(1e-3, 1.0)
rising = st.lists(st.integers(1, 10**9), unique=True, max_size=6).map(lambda numbers: tuple(sorted(numbers)))

simple = st.one_of(
    st.builds(Constant, rates),
    st.builds(Linear, rates, rates, counts),
    st.builds(Cosine, rates, counts, rates),
    st.builds(Exponential, rates, factors, counts, st.booleans()),
    st.builds(Milestones, rates, rising, factors),
)
schedules = st.one_of(
    simple, st.builds(WarmUp, simple | rates, counts, st.floats(0.01, 100.0), st.sampled_from([0.0, 1.0]))
)


@given(schedules, samples_so_far)
def test_a_rate_is_a_finite_number_and_never_negative(schedule: Schedule, samples: int) -> None:
    rate = schedule(samples)
    assert isinstance(rate, float)
    assert math.isfinite(rate)
    assert rate >= 0


@given(schedules)
def test_a_schedule_survives_plain_data(schedule: Schedule) -> None:
    assert from_plain(Schedule, to_plain(schedule), "lr") == schedule


@given(rates, samples_so_far)
def test_a_number_means_a_constant(rate: float, samples: int) -> None:
    assert rate_at(rate, samples) == Constant(rate)(samples) == rate


@given(rates, rates, counts, samples_so_far)
def test_a_line_stays_between_its_ends_and_reaches_them(start: float, end: float, length: int, samples: int) -> None:
    line = Linear(start, end, length)
    low, high = min(start, end), max(start, end)
    assert low * (1 - 1e-12) <= line(samples) <= high * (1 + 1e-12)
    assert line(0) == start
    assert line(length + samples) == end


@given(rates, rates, counts, samples_so_far)
def test_a_cosine_stays_between_its_ends_and_reaches_them(start: float, end: float, length: int, samples: int) -> None:
    cosine = Cosine(start, length, end)
    low, high = min(start, end), max(start, end)
    assert low * (1 - 1e-12) <= cosine(samples) <= high * (1 + 1e-12)
    assert cosine(0) == start
    assert cosine(length + samples) == end


@pytest.mark.parametrize("end", [0.0, 0.02])
def test_a_cosine_is_that_of_torch_with_samples_for_steps(end: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=end)
    expected = []
    for _ in range(51):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    cosine = Cosine(0.1, samples=50 * 64, end=end)
    assert [cosine(64 * step) for step in range(51)] == pytest.approx(expected, abs=1e-12)


def test_a_cosine_continues_under_a_warm_up_where_the_samples_are() -> None:
    warm = WarmUp(Cosine(0.1, samples=1000), samples=100, start_scale=0.0)
    assert [warm(n) for n in (0, 100, 500, 1000)] == pytest.approx([0.0, Cosine(0.1, 1000)(100), 0.05, 0.0])


def test_a_cosine_is_written_as_one_word() -> None:
    assert from_plain(Schedule, "cosine:0.1:60000", "lr") == Cosine(0.1, 60_000)


@given(rates, factors, counts, st.integers(0, 20))
def test_a_staircase_meets_the_smooth_decay_at_every_step(start: float, factor: float, length: int, steps: int) -> None:
    smooth, stairs = Exponential(start, factor, length), Exponential(start, factor, length, staircase=True)
    assert smooth(steps * length) == stairs(steps * length)
    assert stairs(steps * length + length - 1) == stairs(steps * length)


@given(rates, factors, counts, samples_so_far, samples_so_far, st.booleans())
def test_exponential_decay_never_rises(
    start: float, factor: float, length: int, one: int, other: int, staircase: bool
) -> None:
    decay = Exponential(start, factor, length, staircase)
    assert decay(max(one, other)) <= decay(min(one, other))


@given(rates, rising, samples_so_far)
def test_milestones_count_how_many_were_passed(start: float, at: tuple[int, ...], samples: int) -> None:
    passed = sum(milestone <= samples for milestone in at)
    assert Milestones(start, at, factor=0.5)(samples) == start * 0.5**passed


@given(simple, counts, st.floats(0.01, 100.0), samples_so_far)
def test_after_the_warm_up_the_rate_is_the_scaled_base_rate(
    base: Schedule, length: int, scale: float, samples: int
) -> None:
    warm = WarmUp(base, length, scale)
    assert warm(0) == base(0)
    assert warm(length + samples) == base(length + samples) * scale


@given(rates, counts, st.floats(1.0, 100.0), st.floats(0.0, 1.0))
def test_a_warm_up_rises_on_a_straight_line(base: float, length: int, scale: float, part: float) -> None:
    samples = int(part * length)
    expected = base * (1 + (scale - 1) * samples / length)
    assert WarmUp(base, length, scale)(samples) == pytest.approx(expected)


def test_a_large_batch_scales_the_rate_by_its_share_of_256() -> None:
    warm = WarmUp.for_batch(Milestones(0.1, at=(1000,)), samples=100, batch=128, workers=16)
    assert [warm(n) for n in (0, 100, 1000)] == pytest.approx([0.1, 0.8, 0.08])


def test_a_warm_up_may_start_at_zero() -> None:
    warm = WarmUp(0.1, samples=100, start_scale=0.0)
    assert [warm(n) for n in (0, 50, 100, 10**6)] == pytest.approx([0.0, 0.05, 0.1, 0.1])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Constant(-1.0), "Constant.value must be 0 or more"),
        (lambda: Constant(math.nan), "Constant.value must be 0 or more"),
        (lambda: Linear(0.1, -0.1, 10), "Linear.end must be 0 or more"),
        (lambda: Linear(0.1, 0.0, 0), "Linear.samples must be greater than 0"),
        (lambda: Cosine(0.1, 0), "Cosine.samples must be greater than 0"),
        (lambda: Cosine(0.1, 10, -0.1), "Cosine.end must be 0 or more"),
        (lambda: Exponential(0.1, 1.5, 10), "Exponential.factor must be at most 1"),
        (lambda: Milestones(0.1, (20, 10)), "Milestones.at must be numbers of samples in rising order"),
        (lambda: WarmUp(-0.1, 10), "WarmUp.after must be 0 or more"),
        (lambda: WarmUp(0.1, 10, scale=0.0), "WarmUp.scale must be greater than 0"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused(make: Callable[[], Schedule], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        make()
