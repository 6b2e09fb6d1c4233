"""Exchanges between gossip peers, from records: which pairs averaged, and the consensus distance.

The consensus distance is the mean over peers of ‖x_i − mean of x‖². The simulator records it. A live run has no global
view, so it is estimated from exchanges: for two random peers, the expectation of ‖x_i − x_j‖² is 2n/(n−1) times as
large, so the estimate is (n−1)/(2n) of its mean. Neighbours that average often are closer to each other than two random
peers, so on a sparse graph the estimate is too low.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.records.schema import Consensus, Exchange, RunRecords, of_kind

BINS_MAX = 100
PER_BIN = 10
"""Average number of exchanges per point of an estimated curve, at least."""


@dataclass(frozen=True)
class ConsensusSeries:
    """Consensus distances as (seconds, distance), in order of time."""

    points: tuple[tuple[float, float], ...]
    estimated: bool


@dataclass(frozen=True)
class ExchangeSummary:
    """Numbers about the exchanges of a run. `lost` exchanges had no answer; all others refer to averaged ones."""

    averaged: int
    lost: int
    round_trip_seconds: float | None
    consensus_distance: float | None
    """The mean over the second half of the run."""
    estimated: bool | None


def exchanges(run: RunRecords) -> list[Exchange]:
    """The averaged exchanges, in the order of the records."""
    return [record for record in of_kind(run, Exchange) if record.outcome == "averaged"]


def exchange_counts(run: RunRecords) -> list[list[int]]:
    """The number of exchanges of each pair: a symmetric matrix, empty without exchanges."""
    averaged = exchanges(run)
    peers = _peers(run, averaged) if averaged else 0
    counts = [[0] * peers for _ in range(peers)]
    for exchange in averaged:
        counts[exchange.rank][exchange.peer] += exchange.exchanges
        counts[exchange.peer][exchange.rank] += exchange.exchanges
    return counts


def summarize_exchanges(run: RunRecords, seconds: float) -> ExchangeSummary:
    """Summarize the exchanges of a run of this duration."""
    averaged = exchanges(run)
    lost = _number([record for record in of_kind(run, Exchange) if record.outcome == "lost"])
    round_trips = math.fsum(exchange.seconds for exchange in averaged)
    exact, half = _exact(run), seconds / 2
    late = [exchange for exchange in averaged if exchange.at >= half]
    distance = _time_average(exact, half, seconds) if exact else _estimate(late, _peers(run, averaged))
    return ExchangeSummary(
        averaged=_number(averaged),
        lost=lost,
        round_trip_seconds=round_trips / _number(averaged) if averaged else None,
        consensus_distance=distance,
        estimated=None if distance is None else not exact,
    )


def consensus_series(run: RunRecords) -> ConsensusSeries:
    """The consensus distance over time: exact if recorded, otherwise estimated in equal intervals of time."""
    exact = _exact(run)
    if exact:
        return ConsensusSeries(tuple(exact), estimated=False)
    averaged = [exchange for exchange in exchanges(run) if exchange.distance is not None]
    if not averaged:
        return ConsensusSeries((), estimated=True)
    bins = max(1, min(BINS_MAX, _number(averaged) // PER_BIN))
    start, stop = min(exchange.at for exchange in averaged), max(exchange.at for exchange in averaged)
    members: dict[int, list[Exchange]] = {}
    for exchange in averaged:
        share = (exchange.at - start) / (stop - start) if stop > start else 0.0
        members.setdefault(min(int(bins * share), bins - 1), []).append(exchange)
    peers = _peers(run, averaged)
    points = (
        (
            math.fsum(exchange.exchanges * exchange.at for exchange in group) / _number(group),
            _estimate(group, peers) or 0.0,
        )
        for _, group in sorted(members.items())
    )
    return ConsensusSeries(tuple(points), estimated=True)


def _exact(run: RunRecords) -> list[tuple[float, float]]:
    return [(record.at, record.distance) for record in of_kind(run, Consensus)]


def _time_average(points: Sequence[tuple[float, float]], start: float, stop: float) -> float:
    """The mean of a step function over [start, stop]: each distance holds until the next point."""
    ends = [at for at, _ in points[1:]] + [stop]
    weights = [max(0.0, min(end, stop) - max(at, start)) for (at, _), end in zip(points, ends, strict=True)]
    whole = math.fsum(weights)
    if whole <= 0:
        return points[-1][1]
    return math.fsum(weight * distance for weight, (_, distance) in zip(weights, points, strict=True)) / whole


def _estimate(averaged: Sequence[Exchange], peers: int) -> float | None:
    known = [exchange for exchange in averaged if exchange.distance is not None]
    distances = math.fsum(exchange.exchanges * (exchange.distance or 0.0) for exchange in known)
    return (peers - 1) / (2 * peers) * distances / _number(known) if known else None


def _number(exchanges: Sequence[Exchange]) -> int:
    return sum(exchange.exchanges for exchange in exchanges)


def _peers(run: RunRecords, averaged: Sequence[Exchange]) -> int:
    return max([run.header.workers, *(1 + max(exchange.rank, exchange.peer) for exchange in averaged)])
