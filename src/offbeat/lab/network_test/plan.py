"""What a probe does, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.core.configuration import Configuration
from offbeat.core.validation import check_types, require
from offbeat.errors import ConfigurationError
from offbeat.lab.network_test.blocks import BYTES, ELEMENTS_MAX, ELEMENTS_MIN

Flow = tuple[int, int]
"""Who sends, and to whom."""

PAIR_ELEMENTS_MAX = 10_000_000
"""Of a block that goes alone: 40 MB tell how fast a link is, and with many ranks there are many pairs."""

ECHOES, ECHO_SECONDS = 100, 1.0
"""Round trips of each pair at the most, and for how long; the first ones of them are not counted."""

WARM_UP, LATENCY, PAIR = "warm-up", "latency of each pair", "bandwidth of each pair"
RING, ALL_TO_ALL = "ring", "all-to-all"
INTO_HUB, OUT_OF_HUB, BOTH_WAYS = "all into rank 0", "rank 0 to all", "rank 0 both ways"
AT_ONCE = (RING, ALL_TO_ALL, INTO_HUB, OUT_OF_HUB, BOTH_WAYS)


@dataclass(frozen=True, kw_only=True)
class Probe(Configuration):
    """What to measure with."""

    elements: int = 100_000_000
    """32-bit integers in a block"""
    repeats: int | None = None
    """times that everything is measured; none: 3, and once for large blocks at once"""
    message_bytes: int = 44_000_000
    """bytes of a message, to say how many updates the hub's card allows"""
    corrupt: str | None = None
    """damage one block on its way, from rank A to rank B: A:B"""

    def __post_init__(self) -> None:
        check_types(self)
        require(
            ELEMENTS_MIN <= self.elements <= ELEMENTS_MAX,
            f"--elements must be from {ELEMENTS_MIN} to {ELEMENTS_MAX}, but is {self.elements}",
        )
        require(self.repeats is None or self.repeats >= 1, f"--repeats must be 1 or more, but is {self.repeats}")
        require(self.message_bytes >= 1, f"--message-bytes must be 1 or more, but is {self.message_bytes}")

    @property
    def pair_elements(self) -> int:
        return min(self.elements, PAIR_ELEMENTS_MAX)

    def repeats_of(self, kind: str) -> int:
        if self.repeats is not None:
            return self.repeats
        return 1 if kind in AT_ONCE and self.elements > PAIR_ELEMENTS_MAX else 3

    def corrupt_flow(self, ranks: int) -> Flow | None:
        """Which pair gets a damaged block, if any."""
        if self.corrupt is None:
            return None
        source, _, destination = self.corrupt.partition(":")
        if not (source.isdecimal() and destination.isdecimal()):
            raise ConfigurationError(f"--corrupt names a pair of ranks, such as 1:0, but is {self.corrupt!r}")
        flow = int(source), int(destination)
        require(
            flow[0] != flow[1] and max(flow) < ranks,
            f"--corrupt {self.corrupt} is no pair of these {ranks} ranks; name two different ones from 0 to "
            f"{ranks - 1}, such as {ranks - 1}:0",
        )
        return flow


@dataclass(frozen=True)
class Step:
    """Flows that go on at once; for LATENCY, small messages there and back."""

    number: int
    kind: str
    flows: tuple[Flow, ...]
    elements: int = 0

    @property
    def weight(self) -> float:
        """How long it takes beside others: the bytes through the busiest card, and a little for the talk about it."""
        ends = [rank for flow in self.flows for rank in flow]
        return 1e5 + BYTES * self.elements * max(map(ends.count, set(ends)))


def pairs_of(ranks: int) -> list[Flow]:
    return list(itertools.permutations(range(ranks), 2))


def steps_of(probe: Probe, ranks: int) -> list[Step]:
    """In order. The first is not measured: it makes memory and connections ready."""
    return [Step(number, *rest) for number, rest in enumerate(_steps(probe, ranks))]


def _steps(probe: Probe, ranks: int) -> Iterator[tuple[str, tuple[Flow, ...], int]]:
    pairs, others = pairs_of(ranks), range(1, ranks)
    into, out = tuple((rank, 0) for rank in others), tuple((0, rank) for rank in others)
    yield WARM_UP, tuple(pairs), probe.elements
    for pair in pairs:
        yield LATENCY, (pair,), 0
    for pair in pairs:
        for _ in range(probe.repeats_of(PAIR)):
            yield PAIR, (pair,), probe.pair_elements
    together = {
        RING: tuple((rank, (rank + 1) % ranks) for rank in range(ranks)),
        ALL_TO_ALL: tuple(pairs),
        INTO_HUB: into,
        OUT_OF_HUB: out,
        BOTH_WAYS: into + out,
    }
    for kind in AT_ONCE:
        for _ in range(probe.repeats_of(kind)):
            yield kind, together[kind], probe.elements


def elements_that_fit(memory_bytes: int, here: int, ranks: int) -> int:
    """How large a block may be where so many of the ranks share a memory: each holds two blocks per peer."""
    return int(0.8 * memory_bytes) // (here * 2 * (ranks - 1) * BYTES)
