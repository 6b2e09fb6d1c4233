"""Compositions check the types of their parts when they are constructed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import offbeat as ob
from offbeat import parts

WRONG_PARTS: dict[str, tuple[Callable[[], Any], str]] = {
    "members of a population for Hub.collect": (
        lambda: ob.Hub(compute=ob.Samples(4), collect=parts.AllMembers(), waits=True),  # type: ignore[arg-type]
        r"Hub\.collect must be a Collect, but is AllMembers\(\); choose AllWorkers, Messages, Distinct(,| or) Every",
    ),
    "a collect for Hub.compute": (
        lambda: ob.Hub(compute=parts.AllWorkers()),  # type: ignore[arg-type]
        r"Hub\.compute must be .*, but is AllWorkers\(\); choose Samples, Seconds, Share or TargetBatch",
    ),
    "a class for Hub.collect": (
        lambda: ob.Hub(collect=parts.AllWorkers),  # type: ignore[arg-type]
        r"Hub\.collect must be a Collect, but is the class AllWorkers; type AllWorkers\(\)",
    ),
    "a number for Hub.optimizer": (
        lambda: ob.Hub(optimizer=0.1),  # type: ignore[arg-type]
        r"Hub\.optimizer must be an Optimizer or None, but is 0\.1; choose SGD, ",
    ),
    "a list for Population.sources": (
        lambda: ob.Population(sources=[1, 2]),  # type: ignore[arg-type]
        r"Population\.sources must be a Sources, but is \[1, 2\]; choose AllMembers, Best or Better",
    ),
    "a collect for LocalSteps.merge": (
        lambda: ob.LocalSteps(merge=parts.AllWorkers()),  # type: ignore[arg-type]
        r"LocalSteps\.merge must be a Merge, but is AllWorkers\(\); choose Everyone or Quorum",
    ),
    "a merge for LocalSteps.content": (
        lambda: ob.LocalSteps(content=parts.Everyone()),  # type: ignore[arg-type]
        r"LocalSteps\.content must be a Content, but is Everyone\(\); choose ",
    ),
    "a collect for Population.sources": (
        lambda: ob.Population(sources=parts.AllWorkers()),  # type: ignore[arg-type]
        r"Population\.sources must be a Sources, but is AllWorkers\(\); choose AllMembers, Best or Better",
    ),
    "sources for Population.initial": (
        lambda: ob.Population(initial=parts.Best()),  # type: ignore[arg-type]
        r"Population\.initial must be an Initial, but is Best\(\); choose Shuffled or Same",
    ),
    "a clock for Gossip.partner": (
        lambda: ob.Gossip(partner=parts.Poisson()),  # type: ignore[arg-type]
        r"Gossip\.partner must be a Partner, but is Poisson\(\); choose Random, FirstAvailable or Matchings",
    ),
    "the name of a partner for Gossip.partner": (
        lambda: ob.Gossip(partner="random"),  # type: ignore[arg-type]
        r"Gossip\.partner must be a Partner, but is 'random'; type Random\(\)",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_PARTS)
def test_a_part_of_a_wrong_type_is_refused_in_one_sentence(mistake: str) -> None:
    compose, sentence = WRONG_PARTS[mistake]
    with pytest.raises(ob.ConfigurationError, match=sentence) as refused:
        compose()
    assert "\n" not in str(refused.value)
