"""What the peers of a run did with each other, from its records: who averaged with whom, and how far apart they were.

The consensus distance is the mean over peers of ‖x_i − mean of x‖². The simulator writes it down. Elsewhere nobody
sees all peers at once, and it is estimated from exchanges: two peers drawn at random are 2n/(n−1) times as far apart,
squared, so it is (n−1)/(2n) of the mean ‖x_i − x_j‖². Neighbours that average often are nearer to each other than
two peers drawn at random, so on a sparse graph the estimate is low.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.records.schema import Consensus, Exchange, RunRecords

BINS_MAX = 100
PER_BIN = 10
"""How many exchanges a point of an estimated curve stands for, on average and at the least."""


@dataclass(frozen=True)
class ConsensusSeries:
    """Consensus distances as (seconds, distance), in order of time."""

    points: tuple[tuple[float, float], ...]
    estimated: bool


@dataclass(frozen=True)
class ExchangeSummary:
    """The exchanges of a run in numbers. `lost` ones had no answer; the others count those that were averaged."""

    averaged: int
    lost: int
    round_trip_seconds: float | None
    consensus_distance: float | None
    """A mean over the second half of the run's time."""
    estimated: bool | None


def exchanges(run: RunRecords) -> list[Exchange]:
    """The exchanges that were averaged, in the order in which they were written."""
    return [record for record in run.records if isinstance(record, Exchange) and record.outcome == "averaged"]


def exchange_counts(run: RunRecords) -> list[list[int]]:
    """How often each pair averaged: a symmetric matrix of peers × peers, empty where no two did."""
    averaged = exchanges(run)
    peers = _peers(run, averaged) if averaged else 0
    counts = [[0] * peers for _ in range(peers)]
    for exchange in averaged:
        counts[exchange.rank][exchange.peer] += 1
        counts[exchange.peer][exchange.rank] += 1
    return counts


def summarize_exchanges(run: RunRecords, seconds: float) -> ExchangeSummary:
    """The exchanges of a run that took so many seconds."""
    averaged = exchanges(run)
    lost = sum(isinstance(record, Exchange) and record.outcome == "lost" for record in run.records)
    round_trips = math.fsum(exchange.seconds for exchange in averaged)
    exact, half = _exact(run), seconds / 2
    late = [exchange for exchange in averaged if exchange.at >= half]
    distance = _time_average(exact, half, seconds) if exact else _estimate(late, _peers(run, averaged))
    return ExchangeSummary(
        averaged=len(averaged),
        lost=lost,
        round_trip_seconds=round_trips / len(averaged) if averaged else None,
        consensus_distance=distance,
        estimated=None if distance is None else not exact,
    )


def consensus_series(run: RunRecords) -> ConsensusSeries:
    """The consensus distance over time: exact where the records have it, else the means of equal stretches of time."""
    exact = _exact(run)
    if exact:
        return ConsensusSeries(tuple(exact), estimated=False)
    averaged = [exchange for exchange in exchanges(run) if exchange.distance is not None]
    if not averaged:
        return ConsensusSeries((), estimated=True)
    bins = max(1, min(BINS_MAX, len(averaged) // PER_BIN))
    start, stop = min(exchange.at for exchange in averaged), max(exchange.at for exchange in averaged)
    members: dict[int, list[Exchange]] = {}
    for exchange in averaged:
        share = (exchange.at - start) / (stop - start) if stop > start else 0.0
        members.setdefault(min(int(bins * share), bins - 1), []).append(exchange)
    peers = _peers(run, averaged)
    points = []
    for _, group in sorted(members.items()):
        distance = _estimate(group, peers)
        if distance is not None:
            points.append((math.fsum(exchange.at for exchange in group) / len(group), distance))
    return ConsensusSeries(tuple(points), estimated=True)


def _exact(run: RunRecords) -> list[tuple[float, float]]:
    return [(record.at, record.distance) for record in run.records if isinstance(record, Consensus)]


def _time_average(points: Sequence[tuple[float, float]], start: float, stop: float) -> float:
    """Each distance holds until the next is measured, so that after the last one, when all is averaged, none counts."""
    ends = [at for at, _ in points[1:]] + [stop]
    weights = [max(0.0, min(end, stop) - max(at, start)) for (at, _), end in zip(points, ends, strict=True)]
    whole = math.fsum(weights)
    if whole <= 0:
        return points[-1][1]
    return math.fsum(weight * distance for weight, (_, distance) in zip(weights, points, strict=True)) / whole


def _estimate(averaged: Sequence[Exchange], peers: int) -> float | None:
    distances = [exchange.distance for exchange in averaged if exchange.distance is not None]
    return (peers - 1) / (2 * peers) * math.fsum(distances) / len(distances) if distances else None


def _peers(run: RunRecords, averaged: Sequence[Exchange]) -> int:
    return max([run.header.workers, *(1 + max(exchange.rank, exchange.peer) for exchange in averaged)])
