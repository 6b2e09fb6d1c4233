"""Conformance checks for strategies and transports, ours and your own; this package is `ob.testing`.

    from offbeat.testing import check_strategy

    def test_mine() -> None:
        check_strategy(MyStrategy(), seeds=range(100))

`check_strategy` simulates a strategy on random clusters (speeds, latencies, bandwidths, crashes, restarts, pauses,
partitions, corrupt gradients) and checks the invariants listed in `invariants.py`. Each case is run twice, the second
time with nodes replaced through `state()` and `restore()` at random events and with every lease revoked; both runs must
write the same bytes. A failure names its seed and the `offbeat replay` command that repeats it.

`check_transport` checks a transport against its contract: a `TransportCase` creates ranks with it.

May import everything but the command line and `api`.
"""

from offbeat.testing.engine_comparison import EngineComparison, check_engines_agree
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
    "EngineComparison",
    "Invariants",
    "NumberedMessage",
    "Remote",
    "TransportCase",
    "Violation",
    "check_case",
    "check_engines_agree",
    "check_strategy",
    "check_transport",
    "draw_case",
    "replay",
    "transport_checks",
]


def __dir__() -> list[str]:
    return sorted(__all__)
