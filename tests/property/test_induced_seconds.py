"""Injected slow-down: virtual time reports what a live round would sleep for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.cluster.cluster import Cluster, WorkerOverride
from offbeat.cluster.stragglers import RoundDelay, Slowdown, Speed, Trace
from offbeat.engine.microbatches import next_microbatch
from offbeat.live.injected_delay import InjectedDelay
from offbeat.simulation.round_timing import RoundTiming

SECONDS = st.floats(0.001, 1.0)
FACTOR = st.floats(1.0, 5.0)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Clusters whose worker 0 is as fast as the others or slower."""
    sample, call = draw(SECONDS), draw(SECONDS)
    override = WorkerOverride(
        (0,), seconds_per_sample=sample * draw(FACTOR), seconds_per_call=call * draw(st.floats(5.0, 9.0))
    )
    return Cluster(
        sample,
        call,
        straggle=Slowdown(draw(FACTOR)),
        factors=(draw(FACTOR),),
        workers=draw(st.sampled_from([(), (override,)])),
        measured=draw(st.booleans()),
    )


@given(clusters(), st.integers(1, 100), st.integers(1, 16))
def test_virtual_time_induces_what_a_live_round_of_the_same_cluster_sleeps(
    cluster: Cluster, samples: int, microbatch: int
) -> None:
    live = InjectedDelay.of(cluster, {1: 0}, 1, [0], seed=0).next_round_delay()
    natural, slept, done = cluster.natural_speed(0), 0.0, 0
    while size := next_microbatch(done, microbatch, samples):
        slept, done = slept + live.slowdown_seconds(natural.microbatch_seconds(size)), done + size
    assert isinstance(cluster.straggle, Slowdown)
    delay = RoundDelay(0.0, cluster.straggle.factor)
    timing = RoundTiming(cluster.speed(0), delay, microbatch, natural_speed=natural)
    seconds = timing.seconds(samples)
    assert timing.induced_seconds(samples, seconds) == pytest.approx(slept, rel=1e-6, abs=1e-9)
    assert seconds - slept == pytest.approx(RoundTiming(natural, RoundDelay(0.0, 1.0), microbatch).seconds(samples))


def test_a_sleep_is_induced_as_far_as_it_was_slept_and_a_recorded_trace_is_natural() -> None:
    speed = Speed(seconds_per_sample=0.01, speed_trace=Trace((2.0,)), seconds_per_round=0.1)
    assert RoundTiming(speed, RoundDelay(0.5, 1.0), 10).induced_seconds(20, elapsed=1.0) == 0.5
    assert RoundTiming(speed, RoundDelay(0.5, 1.0), 10).induced_seconds(0, elapsed=0.2) == 0.2
    slow = RoundTiming(speed, RoundDelay(0.5, 3.0), 10)
    assert slow.induced_seconds(20, slow.seconds(20)) == pytest.approx(0.5 + 2 * (0.4 + 0.1))


def test_a_factor_below_one_induces_nothing() -> None:
    assert RoundTiming(Speed(), RoundDelay(0.0, 0.5), 10).induced_seconds(20, elapsed=1.0) == 0.0
