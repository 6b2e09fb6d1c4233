"""Failures by chance."""

from __future__ import annotations

import itertools

import pytest

import offbeat as ob


def test_the_mean_time_between_failures_is_the_given_one() -> None:
    found = ob.faults.failures(200, mtbf_seconds=100.0, recovery_seconds=10.0, until_seconds=10_000.0)
    assert len(found) == pytest.approx(200 * 10_000 / 110, rel=0.03)  # four standard deviations
    assert [crash.at_seconds for crash in found] == sorted(crash.at_seconds for crash in found)
    assert {crash.rank for crash in found} == set(range(1, 201))


def test_times_to_failure_are_exponential_and_a_machine_that_is_down_does_not_fail() -> None:
    found = ob.faults.failures(50, mtbf_seconds=100.0, recovery_seconds=30.0, until_seconds=20_000.0, seed=3)
    up = []
    for rank in range(1, 51):
        times = [crash.at_seconds for crash in found if crash.rank == rank]
        up += [later - sooner - 30.0 for sooner, later in itertools.pairwise(times)]
    assert min(up) >= 0
    for quantile in (0.5, 1.0, 2.0):
        share = sum(seconds > 100.0 * quantile for seconds in up) / len(up)
        assert share == pytest.approx(2.718281828**-quantile, abs=0.03)


def test_the_failures_of_a_rank_do_not_depend_on_the_number_of_ranks() -> None:
    few, many = (ob.faults.failures(workers, 100.0, 10.0, 1000.0, seed=1) for workers in (2, 9))
    assert few == tuple(crash for crash in many if crash.rank <= 2)
    assert few != ob.faults.failures(2, 100.0, 10.0, 1000.0, seed=2)


def test_ranks_start_at_the_first_rank() -> None:
    assert {crash.rank for crash in ob.faults.failures(3, 10.0, 1.0, 1000.0, first_rank=0)} == {0, 1, 2}


@pytest.mark.parametrize(("mtbf", "recovery"), [(0.0, 1.0), (-1.0, 1.0), (10.0, -1.0)])
def test_invalid_times_are_refused(mtbf: float, recovery: float) -> None:
    with pytest.raises(ob.ConfigurationError, match="mtbf_seconds greater than 0"):
        ob.faults.failures(3, mtbf, recovery, 100.0)
