"""The settings of a network test, and its steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.core.configuration import Configuration
from offbeat.core.validation import check_types, require
from offbeat.lab.network_test.protocol import ELEMENT_BYTES, ELEMENTS_MAX, ELEMENTS_MIN, Flow

PAIR_ELEMENTS_MAX = 10_000_000
"""Elements of a block that is sent alone: 40 MB show how fast a link is, and the number of pairs grows as ranks²."""

WARM_UP, LATENCY, PAIR = "warm-up", "latency of each pair", "bandwidth of each pair"
RING, ALL_TO_ALL = "ring", "all-to-all"
INTO_HUB, OUT_OF_HUB, BOTH_WAYS = "all into rank 0", "rank 0 to all", "rank 0 both ways"
CONCURRENT = (RING, ALL_TO_ALL, INTO_HUB, OUT_OF_HUB, BOTH_WAYS)


@dataclass(frozen=True, kw_only=True)
class NetworkTest(Configuration):
    """The settings of a network test. Those of rank 0 hold; other ranks use only the last two of theirs."""

    elements: int = 100_000_000
    """32-bit integers in a block"""
    repeats: int | None = None
    """how many times each step is measured; none: 3, and once for concurrent flows of large blocks"""
    message_bytes: int = 44_000_000
    """bytes of a message, for updates per second"""
    corrupt: Flow | None = None
    """the flow of which one block is damaged on purpose"""
    wait_seconds: float = 60.0
    """how long to wait for links to all ranks"""
    shared_memory: bool = True
    """whether ranks of one machine may exchange blocks in shared memory"""

    def __post_init__(self) -> None:
        check_types(self)
        require(
            ELEMENTS_MIN <= self.elements <= ELEMENTS_MAX,
            f"--elements must be from {ELEMENTS_MIN} to {ELEMENTS_MAX}, but is {self.elements}",
        )
        require(self.repeats is None or self.repeats >= 1, f"--repeats must be 1 or more, but is {self.repeats}")
        require(self.message_bytes >= 1, f"--message-bytes must be 1 or more, but is {self.message_bytes}")
        require(self.wait_seconds >= 0, f"--wait must be 0 or more, but is {self.wait_seconds:g}")

    @property
    def pair_elements(self) -> int:
        return min(self.elements, PAIR_ELEMENTS_MAX)

    def repeats_of(self, kind: str) -> int:
        """How many times a step of this kind is measured."""
        if self.repeats is not None:
            return self.repeats
        return 1 if kind in CONCURRENT and self.elements > PAIR_ELEMENTS_MAX else 3


@dataclass(frozen=True)
class Step:
    """Flows that begin at the same time; for LATENCY, round trips of small messages."""

    number: int
    kind: str
    flows: tuple[Flow, ...]
    elements: int = 0

    @property
    def weight(self) -> float:
        """The expected duration in arbitrary units: bytes through the busiest rank, and a constant for the commands."""
        ends = [rank for flow in self.flows for rank in flow]
        return 1e5 + ELEMENT_BYTES * self.elements * max(map(ends.count, set(ends)))


def pairs_of(ranks: int) -> list[Flow]:
    """All ordered pairs of ranks."""
    return list(itertools.permutations(range(ranks), 2))


def steps_of(test: NetworkTest, ranks: int) -> list[Step]:
    """The steps in order. The first is not measured: it allocates memory and opens connections."""
    return [Step(number, *rest) for number, rest in enumerate(_steps(test, ranks))]


def _steps(test: NetworkTest, ranks: int) -> Iterator[tuple[str, tuple[Flow, ...], int]]:
    pairs, others = pairs_of(ranks), range(1, ranks)
    into, out = tuple((rank, 0) for rank in others), tuple((0, rank) for rank in others)
    yield WARM_UP, tuple(pairs), test.elements
    for pair in pairs:
        yield LATENCY, (pair,), 0
    for pair in pairs:
        for _ in range(test.repeats_of(PAIR)):
            yield PAIR, (pair,), test.pair_elements
    flows = {
        RING: tuple((rank, (rank + 1) % ranks) for rank in range(ranks)),
        ALL_TO_ALL: tuple(pairs),
        INTO_HUB: into,
        OUT_OF_HUB: out,
        BOTH_WAYS: into + out,
    }
    for kind in CONCURRENT:
        for _ in range(test.repeats_of(kind)):
            yield kind, flows[kind], test.elements


def elements_that_fit(memory_bytes: int, local_ranks: int, ranks: int) -> int:
    """The largest block for `local_ranks` of the ranks that share a memory: each rank holds two blocks per peer."""
    return int(0.8 * memory_bytes) // (local_ranks * 2 * (ranks - 1) * ELEMENT_BYTES)
