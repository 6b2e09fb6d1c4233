"""Test a strategy of your own as ours are tested. Public; used by the test suite of offbeat itself.

    from offbeat.testing import check_strategy

    def test_mine() -> None:
        check_strategy(MyStrategy(), seeds=range(100))

`check_strategy` runs a strategy in simulation on random clusters (speeds, latencies, bandwidths, crashes, pauses,
partitions, rejoins, broken gradients) and watches the invariants listed in `invariants.py`. Each case is run twice:
once plainly, and once with nodes swapped through `state()` and `restore()` at random events and with every lease
taken back, and both must write the same bytes. A failure names its seed and the `offbeat replay` line.

`check_transport` does the same for a transport: a `TransportCase` says how to set up ranks with it.
"""

from offbeat.testing.fuzz import Case, draw_case
from offbeat.testing.invariants import Invariants, Violation
from offbeat.testing.strategy_conformance import check_case, check_strategy, replay
from offbeat.testing.transport_conformance import (
    NumberedMessage,
    Remote,
    TransportCase,
    check_transport,
    transport_checks,
)

__all__ = [
    "Case",
    "Invariants",
    "NumberedMessage",
    "Remote",
    "TransportCase",
    "Violation",
    "check_case",
    "check_strategy",
    "check_transport",
    "draw_case",
    "replay",
    "transport_checks",
]


def __dir__() -> list[str]:
    return sorted(__all__)
