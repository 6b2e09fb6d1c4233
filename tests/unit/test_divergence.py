"""The watch that says once that training diverges, and what to type."""

from __future__ import annotations

import math
import re

import pytest

import offbeat as ob
from offbeat.records.schema import Notice, of_kind
from offbeat.strategies.divergence import DivergenceWatch


def spoken_at(losses: list[float]) -> list[int]:
    watch = DivergenceWatch()
    return [number for number, loss in enumerate(losses) if watch.observe(loss, 2.0)]


FALLING = [2.3 * math.exp(-number / 10) for number in range(100)]


@pytest.mark.parametrize(
    "losses",
    [
        FALLING,
        [loss * (1.5 if number % 2 else 0.5) for number, loss in enumerate(FALLING)],
        [2.3] * 100,
        [*FALLING, *[3 * FALLING[-1]] * 100],  # tiny: far below the first values
        [*FALLING[:30], 9.0, 9.0, *FALLING[30:]],
    ],
    ids=["falling", "noisy", "flat", "small", "spike"],
)
def test_training_that_goes_on_well_is_not_reported(losses: list[float]) -> None:
    assert spoken_at(losses) == []


@pytest.mark.parametrize("losses", [[2.3] * 10 + [4.0] * 90, [*FALLING[:50], *[2.0] * 100]], ids=["above", "again"])
def test_a_loss_that_rises_and_stays_high_is_reported_once(losses: list[float]) -> None:
    (number,) = spoken_at(losses)
    assert number > 15


def notices(
    strategy: ob.Strategy, lr: float, about: str = "diverges", until: ob.Samples | ob.Seconds | None = None
) -> list[str]:
    """What a run with rounds of 64 ms and links of 500 ms says about something."""
    cluster = ob.Cluster(seconds_per_sample=0.001, link=ob.Link(latency_seconds=0.5))
    run = ob.simulate(
        ob.workloads.Quadratic(dimension=10, examples=256),
        strategy.with_default_optimizer(ob.SGD(lr=lr)),
        cluster=cluster,
        workers=2,
        until=until or ob.Samples(20_000),
    )
    return [notice.text for notice in of_kind(run.records, Notice) if about in notice.text]


def test_a_run_that_diverges_says_so_with_the_flag_to_try() -> None:
    (sentence,) = notices(ob.AsyncFixed(damping=0.0), lr=0.5)
    assert "damp stale gradients (--damping 1)" in sentence
    (sentence,) = notices(ob.FixedMinibatch(batch=16), lr=2.5)
    assert sentence.endswith("lower the learning rate (--lr)")
    assert notices(ob.AsyncFixed(damping=1.0), lr=0.5) == []


def test_a_run_whose_rate_staleness_has_reduced_to_a_fraction_says_so_once() -> None:
    (sentence,) = notices(ob.AsyncFixed(), lr=0.1, about="of its value")
    assert "try the whole rate (--damping 0)" in sentence
    assert notices(ob.AsyncFixed(damping=0.0), lr=0.01, about="of its value") == []


def test_it_says_too_if_the_whole_run_has_few_round_trips() -> None:
    (sentence,) = notices(ob.AsyncFixed(), lr=0.1, about="of its value")
    (round_trips,) = re.findall(r"only about (\S+) times in the whole run", sentence)
    seconds = 20_000 / 2 * 0.001
    assert float(round_trips) == pytest.approx(seconds / (2 * 0.5 + 0.064), rel=0.3)
    assert "fmb or amb" in sentence
    (sentence,) = notices(ob.AsyncFixed(), lr=0.1, about="of its value", until=ob.Seconds(10.0))
    assert "round trips" not in sentence
