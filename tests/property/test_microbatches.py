"""The division of a round into micro-batches: it covers the round, within bounds, and virtual time counts the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.cluster.stragglers import RoundDelay, Speed
from offbeat.engine.microbatches import divide, next_microbatch, samples_after
from offbeat.simulation.round_timing import RoundTiming

SAMPLES = st.integers(1, 300)
MICROBATCH = st.integers(1, 40)


def sizes(samples: int, microbatch: int) -> list[int]:
    """The micro-batches of a round, one after the other."""
    taken: list[int] = []
    while size := next_microbatch(sum(taken), microbatch, samples):
        taken.append(size)
    return taken


@given(SAMPLES, MICROBATCH)
def test_micro_batches_cover_a_round_exactly_and_none_but_the_only_one_is_a_single_sample(
    samples: int, microbatch: int
) -> None:
    cut = sizes(samples, microbatch)
    assert sum(cut) == samples
    assert all(size == microbatch for size in cut[:-1])
    assert 1 <= cut[-1] <= microbatch + (microbatch > 1)
    assert cut[-1] > 1 or samples == 1 or microbatch == 1


@given(SAMPLES, MICROBATCH)
def test_the_division_in_one_step_is_that_of_all_steps(samples: int, microbatch: int) -> None:
    cut = sizes(samples, microbatch)
    whole, last = divide(samples, microbatch)
    assert cut == [microbatch] * whole + ([last] if last else [])
    for calls in range(len(cut) + 3):
        assert samples_after(calls, microbatch, samples) == sum(cut[:calls])


@given(MICROBATCH, st.integers(0, 9))
def test_without_a_limit_all_micro_batches_have_the_same_size(microbatch: int, calls: int) -> None:
    assert next_microbatch(calls * microbatch, microbatch, None) == microbatch
    assert samples_after(calls, microbatch, None) == calls * microbatch


@given(st.integers(1, 200), st.none() | SAMPLES, MICROBATCH, st.integers(0, 20), st.integers(0, 3))
def test_a_time_limit_in_virtual_time_allows_what_a_loop_computes_that_checks_the_clock_before_each_micro_batch(
    limit: int, samples_max: int | None, microbatch: int, delay: int, call: int
) -> None:
    seconds, done = float(delay), 0
    while (size := next_microbatch(done, microbatch, samples_max)) and (done == 0 or seconds < limit):
        seconds, done = seconds + call + size, done + size
    timing = RoundTiming(
        Speed(seconds_per_sample=1.0, seconds_per_call=float(call)), RoundDelay(delay, 1.0), microbatch
    )
    assert timing.samples(ob.Seconds(float(limit), samples_max=samples_max)) == done
    assert timing.seconds(done) == seconds
    assert timing.samples_when_cancelled(seconds + 1e-6, done) == done
