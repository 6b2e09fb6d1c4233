"""Runs made by hand: a few records with known numbers, and a toy that looks like a comparison."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from offbeat.records.schema import (
    AnyRecord,
    Consensus,
    Contribution,
    Dropped,
    Ended,
    Evaluation,
    Exchange,
    Flow,
    Membership,
    Notice,
    Outcome,
    Round,
    RunHeader,
    RunRecords,
    Traffic,
    Update,
)

ACCURACY_90 = {"metric": "accuracy", "value": 0.9}


def header(label: str = "fmb", seed: int = 1, **changed: Any) -> RunHeader:
    known: dict[str, Any] = {
        "engine": "simulated",
        "label": label,
        "workload": "digits",
        "workers": 2,
        "seed": seed,
        "parameters": 4810,
        "target": ACCURACY_90,
        "experiment": {"strategy": {"name": label}, "seed": seed},
        "offbeat": "0.1.0",
        "torch": "2.6.0",
    }
    return RunHeader(**{**known, **changed})


def run(records: Iterable[AnyRecord], directory: Path | None = None, **changed: Any) -> RunRecords:
    return RunRecords(directory, header(**changed), tuple(records))


def accuracies(values: Sequence[float | None], every: float = 1.0) -> list[Evaluation]:
    """One evaluation each `every` seconds from 0 on, 100 samples apart; the loss is one minus the accuracy."""
    return [
        Evaluation(
            at=index * every,
            rank=0,
            version=index,
            samples_total=100 * index,
            loss=1.0 - (value or 0.0),
            accuracy=value,
        )
        for index, value in enumerate(values)
    ]


def losses(values: Sequence[float]) -> list[Evaluation]:
    return [
        Evaluation(at=float(index), rank=0, version=index, samples_total=100 * index, loss=value, accuracy=None)
        for index, value in enumerate(values)
    ]


def a_round(rank: int, start: float, seconds: float, *, idle: float = 0.0, induced: float = 0.0) -> Round:
    return Round(
        at=start + seconds,
        rank=rank,
        start=start,
        seconds=seconds,
        induced_seconds=induced,
        samples=10,
        loss=1.0,
        version=0,
        draws=(0, 10),
        idle_seconds=idle,
        send_seconds=0.0,
        finite=True,
    )


def an_update(at: float, total: int, *contributions: tuple[int, int, int, int], rank: int = 0) -> Update:
    made = tuple(Contribution(*contribution) for contribution in contributions)
    return Update(
        at=at,
        rank=rank,
        version=1,
        messages=len(made),
        samples=sum(one.stop - one.first for one in made),
        samples_total=total,
        learning_rate=0.1,
        contributions=made,
    )


def a_traffic(at: float, rank: int = 0, since: float = 0.0, **sent: int) -> Traffic:
    """So many bytes of each kind, in messages of a hundred; nine of ten have arrived, and half was saved on the way."""
    flows = {kind: Flow(nbytes // 100, nbytes, 2 * nbytes) for kind, nbytes in sent.items()}
    received = {kind: Flow(nbytes // 100, nbytes * 9 // 10, 2 * nbytes) for kind, nbytes in sent.items()}
    return Traffic(at=at, rank=rank, since=since, sent=flows, received=received)


def a_small_run(**changed: Any) -> RunRecords:
    """Two workers, two updates, one drop, one crash and return: every number can be worked out in the head."""
    return run(
        [
            Membership(at=0.0, rank=0, peer=1, incarnation=0, joined=True),
            Membership(at=0.0, rank=0, peer=2, incarnation=0, joined=True),
            *accuracies([0.1, 0.5, 0.8, 1.0], every=2.0),
            a_round(1, 0.0, 2.0),
            a_round(2, 0.0, 1.0, induced=0.5),
            an_update(2.0, 20, (1, 0, 10, 0), (2, 0, 10, 1)),
            Membership(at=2.5, rank=0, peer=2, incarnation=0, joined=False),
            Membership(at=2.5, rank=1, peer=2, incarnation=0, joined=False),
            Membership(at=3.0, rank=0, peer=2, incarnation=1, joined=True),
            a_round(1, 2.0, 2.0),
            a_round(2, 4.0, 1.0, idle=2.0),
            an_update(5.0, 40, (1, 10, 20, 0), (2, 10, 20, 5)),
            Dropped(at=5.0, rank=1, first=20, stop=27, staleness=4, reason="stale"),
            Dropped(at=6.0, rank=2, first=20, stop=23, staleness=0, reason="stopped"),
            Ended(at=8.0, bytes_sent=1234, messages_sent=9, failure=None),
        ],
        **changed,
    )


def timed(label: str, seed: int, seconds: float | None, **changed: Any) -> RunRecords:
    """A run that crosses 0.9 accuracy after exactly so many seconds, or never."""
    values = [0.0, 0.9, 1.0] if seconds is not None else [0.0, 0.5, 0.5]
    curve = accuracies(values, every=seconds or 1.0)
    end = Ended(at=curve[-1].at, bytes_sent=0, messages_sent=0, failure=None)
    return run([*curve, end], label=label, seed=seed, **changed)


def a_toy(label: str, seed: int, workers: int = 10, seconds: float = 60.0) -> RunRecords:
    """Something that looks like a run: `fmb` waits for all, the others wait less and are staler."""
    dice = random.Random(f"{label} {seed}")
    waits, pace = {"fmb": (True, 1.0), "amb": (True, 1.35)}.get(label, (False, 1.3 + 0.15 * len(label) % 0.7))
    records: list[AnyRecord] = []
    free, draws, total, version, clock = dict.fromkeys(range(1, workers + 1), 0.0), [0] * (workers + 1), 0, 0, 0.0
    ready: dict[int, float] = dict.fromkeys(free, 0.0)
    while clock < seconds:
        ranks = list(free) if waits else [min(ready, key=lambda rank: ready[rank])]
        ends, made = [], []
        for rank in ranks:
            start = max(clock, free[rank]) if waits else free[rank]
            slow = 1.5 * dice.random() if rank % 4 == 1 or dice.random() < 0.1 else 0.0
            length = 2.0 if label == "amb" else 0.9 + 0.3 * dice.random() + slow
            count = round(64 / (1 + slow)) if label == "amb" else 32
            idle = start - free[rank] if draws[rank] else 0.0
            pause = 0.0 if waits else 0.05
            records.append(a_round(rank, start + pause, length, idle=idle + pause, induced=slow / 2))
            made.append(Contribution(rank, draws[rank], draws[rank] + count, 0 if waits else dice.randrange(workers)))
            draws[rank] += count
            free[rank] = ready[rank] = start + pause + length
            ends.append(free[rank])
        before, clock = clock, max(max(ends), clock) + (0.1 if waits else 0.0)
        total, version = total + sum(one.stop - one.first for one in made), version + 1
        records.append(an_update(clock, total, *((one.rank, one.first, one.stop, one.staleness) for one in made)))
        if int(clock / 2) > int(before / 2):
            progress = 1 - 0.9 * 2.7 ** (-clock * pace / 14) + 0.01 * dice.gauss(0, 1) - 0.03
            accuracy = min(max(progress, 0.05), 0.995)
            records.append(a_traffic(clock, Gradient=version * 9620, Parameters=version * 9620))
            records.append(
                Evaluation(
                    at=clock,
                    rank=0,
                    version=version,
                    samples_total=total,
                    loss=2.3 * (1.02 - accuracy),
                    accuracy=accuracy,
                )
            )
    if not waits:
        records.append(Dropped(at=clock, rank=1, first=0, stop=320, staleness=9, reason="stale"))
        records.append(Notice(at=3.0, rank=0, text="3 gradients were older than staleness_max and were dropped"))
    records.append(a_traffic(clock, Gradient=version * 9620, Parameters=version * 9620))
    records.append(Ended(at=clock, bytes_sent=version * 19240, messages_sent=version, failure=None))
    return run(records, label=label, seed=seed, workers=workers)


def an_exchange(
    at: float,
    rank: int,
    peer: int,
    distance: float | None = 1.0,
    *,
    seconds: float = 0.1,
    outcome: Outcome = "averaged",
) -> Exchange:
    return Exchange(at=at, rank=rank, peer=peer, seconds=seconds, distance=distance, outcome=outcome)


def a_gossip(
    label: str = "gossip", seed: int = 1, peers: int = 8, seconds: float = 60.0, *, live: bool = False
) -> RunRecords:
    """Something that looks like peers on a cycle: each computes at its own pace, and averages with a neighbour.

    Simulated, it has consensus distances; live it has none, and they must be read off its exchanges.
    """
    dice = random.Random(f"{label} {seed} {live}")
    near = 0.25 if label.endswith("acid") else 1.0
    records: list[AnyRecord] = []
    free, draws, total = [0.0] * peers, [0] * peers, 0
    while (clock := min(free)) < seconds:
        rank = free.index(clock)
        length = 0.8 + 0.4 * dice.random()
        free[rank], total = clock + length, total + 64
        distance = near * (0.1 + 2.7 ** (-clock / 8)) * dice.uniform(0.7, 1.3)
        records.append(a_round(rank, clock, length))
        records.append(an_update(clock + length, total, (rank, draws[rank], draws[rank] + 64, 0), rank=rank))
        draws[rank] += 64
        if dice.random() < 0.5:
            peer = (rank + dice.choice((1, -1))) % peers
            outcome: Outcome = "averaged" if dice.random() < 0.98 else "lost"
            apart = 2 * peers / (peers - 1) * distance if outcome == "averaged" else None
            records.append(
                an_exchange(clock + length, rank, peer, apart, seconds=dice.expovariate(20), outcome=outcome)
            )
        if rank == 0:
            accuracy = 1 - 0.9 * 2.7 ** (-clock / 12)
            records.append(
                Evaluation(
                    at=clock + length,
                    rank=0,
                    version=draws[0],
                    samples_total=total,
                    loss=2.3 * (1.02 - accuracy),
                    accuracy=accuracy,
                )
            )
            if not live:
                records.append(Consensus(at=clock + length, peers=peers, distance=distance))
            records.append(a_traffic(clock + length, Mix=total * 100))
    if not live:
        records.append(Consensus(at=max(free), peers=peers, distance=0.0))
    records.append(Ended(at=max(free), bytes_sent=total, messages_sent=total // 64, failure=None))
    records.sort(key=lambda record: record.at)
    return run(records, label=label, seed=seed, workers=peers, engine="live" if live else "simulated")
