"""How much is sent and received, by kind of message: the count behind `Traffic` records.

Both engines count every message here, so that counting one is a look-up and a few additions.
"""

from __future__ import annotations

from typing import NamedTuple

from offbeat.core.compression import saved_bytes
from offbeat.core.messages import Message
from offbeat.records.schema import Flow, Traffic


class Weight(NamedTuple):
    """A message as it is counted."""

    kind: str
    nbytes: int
    nbytes_uncompressed: int


def weigh(message: Message, nbytes: int | None = None) -> Weight:
    """What a message weighs; `nbytes` of it on the wire, where there is one."""
    nbytes = message.nbytes if nbytes is None else nbytes
    return Weight(type(message).__name__, nbytes, nbytes + saved_bytes(message))


class TrafficCount:
    """Counts from the beginning of a process's part in a run, for one rank or for all of a simulation."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._since = 0.0
        self._sent: dict[str, list[int]] = {}
        self._received: dict[str, list[int]] = {}
        self._recorded: Traffic | None = None
        self.moved = False
        """Whether anything has been sent or received since the last record."""
        self.bytes_sent = 0
        self.messages_sent = 0

    def sent(self, weight: Weight) -> None:
        self.moved = True
        self.bytes_sent += weight.nbytes
        self.messages_sent += 1
        _add(self._sent, weight)

    def received(self, weight: Weight) -> None:
        self.moved = True
        _add(self._received, weight)

    def begin(self, since: float) -> None:
        """Say when it began, by the clock of the run."""
        self._since = since

    def shift(self, seconds: float) -> None:
        """The clock was set. What a record has said once stays, for counts are told apart by when they began."""
        if self._recorded is None:
            self._since += seconds

    def record(self, at: float) -> Traffic | None:
        """All that was counted up to `at`; None where it has been recorded already."""
        traffic = Traffic(
            at=at, rank=self._rank, since=self._since, sent=_flows(self._sent), received=_flows(self._received)
        )
        if traffic == self._recorded:
            return None
        self._recorded, self.moved = traffic, False
        return traffic


def _add(flows: dict[str, list[int]], weight: Weight) -> None:
    kind, nbytes, uncompressed = weight
    flow = flows.get(kind)
    if flow is None:
        flows[kind] = [1, nbytes, uncompressed]
    else:
        flow[0] += 1
        flow[1] += nbytes
        flow[2] += uncompressed


def _flows(counts: dict[str, list[int]]) -> dict[str, Flow]:
    return {kind: Flow(*counts[kind]) for kind in sorted(counts)}
