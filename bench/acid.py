"""Consensus distance on a cycle: momentum of averaging (A²CiD²) against twice the communication.

    python bench/acid.py [--json] [--seeds N] [--peers 16 32 64] [--processes N]

Compared are gossip at rate 1, gossip at rate 2, and gossip with acid at rate 1: same seeds, same data, no latency, in
virtual time. The *consensus distance* is the mean over peers of the squared distance to their mean. It is sampled
several times per gradient, and averaged over time, after a burn-in, and over seeds. Printed is the ratio of acid to
each of the others: below 1, the peers of acid are closer together.

*heterogeneous*: the losses of the peers differ: quadratics with one optimum per peer, and logistic regression where
each peer sees about two of the ten digits. The ratio of a number of peers is the worse of the two; `rows` has each.
*identical*: the same quadratics with one common optimum, so that only gradient noise separates peers. Their curvature
keeps distant peers together, which is what acid is good at, so the ratio to the same rate is above 1. For noise without
curvature it is below 1: bench/second_moments.py computes both exactly.

The quadratics have curvature 1, so that the influence of their start decays within 1/RATE = 10 gradient times on any
graph, and they are stationary when sampling begins. Logistic regression is not: its gradients shrink during training,
and the slowest mode of a plain cycle takes 2·χ1 = 415 gradient times at 64 peers. All peers start with equal
parameters, so the distance of plain gossip is still growing there at the end of the window; a longer one would favour
acid more.

*loss* is that of a CNN on all training data at the end, with 95% intervals over seeds: of the average of all peers,
which is the result of a run, and the mean of the losses of the peers before that average. Heterogeneous is two digits
per peer, identical is all digits on all peers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import offbeat as ob
from offbeat.core.actions import Action, Record
from offbeat.core.events import Event
from offbeat.core.examples import Indices
from offbeat.core.randomness import stream
from offbeat.core.splits import Split
from offbeat.records.comparison import interval
from offbeat.simulation.simulator import Simulation

PEERS = (16, 32, 64)
SEEDS = 10
RATE = 0.1
"""The learning rate of SGD, the same everywhere."""
BATCH = 16
"""Samples per gradient."""
BURN_IN = 40
"""Gradient times before sampling begins: four times the decay time of the quadratics."""
WINDOW = 40
"""Gradient times that are sampled after that."""
SAMPLINGS = 4
"""Samplings per gradient time, at equal intervals that avoid the times at which gradients are ready."""
DIMENSION = 20
"""Parameters of the quadratics."""
SPREAD = 1.0
"""Standard deviation of each coordinate of the peers' optima."""
NOISE = 1.0
"""Standard deviation of each coordinate of a sample's gradient: as large as the spread, but averaged over a batch."""
SAMPLES_EACH = 2048
"""Training examples of each peer of the quadratics: more than a run draws, so that no noise is repeated."""
LOSS_PEERS = 16
"""Peers that train the CNN."""

VARIANTS: dict[str, ob.Gossip] = {
    "same rate": ob.Gossip(graph=ob.graphs.Cycle(), rate=1.0),
    "double rate": ob.Gossip(graph=ob.graphs.Cycle(), rate=2.0),
    "acid": ob.GossipAcid(graph=ob.graphs.Cycle(), rate=1.0),
}
SAME, DOUBLE, ACID = VARIANTS


# Workloads


class Point(nn.Module):
    """The parameters themselves, once per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(DIMENSION))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.values.expand(len(inputs), -1)


@dataclass(frozen=True)
class InTurn(Split):
    """Contiguous parts of equal size, in the order of the workers."""

    def indices(self, targets: Tensor, worker: int, workers: int, seed: int) -> Indices:
        each = len(targets) // workers
        return np.arange(worker * each, (worker + 1) * each)


def quadratics(peers: int, seed: int, spread: float) -> ob.Workload:
    """½‖x − target‖²; the targets of a peer are its optimum plus noise that sums to zero."""
    random = stream(seed, "acid benchmark")
    optima = random.normal(0.0, 1.0, (peers, 1, DIMENSION)) * spread
    noise = random.normal(0.0, NOISE, (peers, SAMPLES_EACH, DIMENSION))
    targets = torch.from_numpy(optima + noise - noise.mean(axis=1, keepdims=True)).float().flatten(0, 1)
    return ob.Workload(
        model=Point,
        loss=lambda outputs, targets: 0.5 * (outputs - targets).square().sum(1),
        train=(torch.empty(len(targets), 0), targets),
        split=InTurn(),
        label="quadratics",
    )


def cnn(split: Split) -> ob.Workload:
    """Digits, evaluated on the training data."""
    built = ob.workloads.DigitsCNN(split=split).build()
    return dataclasses.replace(built, test=built.train)


HETEROGENEOUS, IDENTICAL = "heterogeneous", "identical"
QUADRATICS, LOGISTIC, CNN = "quadratics", "logistic", "CNN"
TWO_DIGITS = ob.workloads.ByLabel(labels=2)
WORKLOADS: dict[tuple[str, str], Callable[[int, int], ob.Workload]] = {
    (HETEROGENEOUS, QUADRATICS): lambda peers, seed: quadratics(peers, seed, SPREAD),
    (HETEROGENEOUS, LOGISTIC): lambda peers, seed: ob.workloads.DigitsLogistic(split=TWO_DIGITS).build(),
    (IDENTICAL, QUADRATICS): lambda peers, seed: quadratics(peers, seed, 0.0),
    (HETEROGENEOUS, CNN): lambda peers, seed: cnn(TWO_DIGITS),
    (IDENTICAL, CNN): lambda peers, seed: cnn(ob.workloads.Shared()),
}


# One run


@dataclass(frozen=True)
class Task:
    case: str
    workload: str
    peers: int
    variant: str
    seed: int


@dataclass(frozen=True)
class Result:
    """Measurements of one run; losses are those of the CNN and None otherwise."""

    task: Task
    distance: float
    average_loss: float | None = None
    peer_loss: float | None = None


class DistanceSampler:
    """Observer that samples the consensus distance, and record writer that discards all records."""

    def __init__(self) -> None:
        self.distances: list[float] = []
        self.replicas = torch.empty(0)
        """Parameters of all peers at the last sampling."""

    def before(self, simulation: Simulation, rank: int, event: Event) -> None:
        while simulation.now >= (len(self.distances) + 0.5) / SAMPLINGS:
            replicas = (process.node.replica() for process in simulation.processes)
            self.replicas = torch.stack([replica for replica in replicas if replica is not None])
            exact = self.replicas.double()
            self.distances.append(float((exact - exact.mean(0)).square().sum(1).mean()))

    def after(self, simulation: Simulation, rank: int, event: Event, actions: list[Action]) -> None: ...

    def write(self, record: Record) -> None: ...


def one_run(task: Task) -> Result:
    """Simulate one run, in which a gradient takes one second of virtual time."""
    torch.set_num_threads(1)
    workload = WORKLOADS[task.case, task.workload](task.peers, task.seed)
    strategy = dataclasses.replace(VARIANTS[task.variant], optimizer=ob.SGD(lr=RATE), batch=BATCH, microbatch=BATCH)
    cluster, until = ob.Cluster(seconds_per_sample=1.0 / BATCH), ob.Seconds(float(BURN_IN + WINDOW))
    sampler = DistanceSampler()
    simulation = Simulation(
        ob.Experiment(
            workload, strategy, cluster=cluster, workers=task.peers, until=until, seed=task.seed, evaluate=None
        ),
        sampler,
        observer=sampler,
    )
    outcome = simulation.run()
    assert outcome.failure is None, outcome.failure
    distance = statistics.fmean(sampler.distances[BURN_IN * SAMPLINGS :])
    if task.workload != CNN:
        return Result(task, distance)
    average_loss = simulation.gradient_computer.evaluate(outcome.finishes[0].parameters, ()).loss
    peer_losses = [simulation.gradient_computer.evaluate(replica, ())[0] for replica in sampler.replicas]
    return Result(task, distance, average_loss, statistics.fmean(peer_losses))


# All runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds")
    parser.add_argument("--peers", type=int, nargs="+", default=PEERS, help="sizes of the cycle")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many runs at a time")
    arguments = parser.parse_args()
    rows = [row_of(results) for results in measured(arguments.peers, arguments.seeds, arguments.processes)]
    figures = {case: ratios(rows, case) for case in (HETEROGENEOUS, IDENTICAL)}
    losses = {row["case"]: row["loss"] for row in rows if row["loss"] is not None}
    if arguments.json:
        print(json.dumps({**figures, "loss": losses, "rows": rows}))
    else:
        show(figures, rows)


def measured(peers: Sequence[int], seeds: int, processes: int) -> Iterable[list[Result]]:
    """Results of all variants and seeds, one list per workload and size."""
    settings = [
        (case, workload, size) for case, workload in WORKLOADS for size in ((LOSS_PEERS,) if workload == CNN else peers)
    ]
    tasks = [Task(*key, variant, seed) for key in settings for variant in VARIANTS for seed in range(seeds)]
    # The largest first, so that no process still has a long run when the others are done.
    order = sorted(tasks, key=lambda task: task.peers, reverse=True)
    console = Console(stderr=True)
    with (
        ProcessPoolExecutor(processes) as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        results = list(progress.track(pool.map(one_run, order), total=len(order), description="simulating"))
    return [
        [result for result in results if (result.task.case, result.task.workload, result.task.peers) == key]
        for key in settings
    ]


def row_of(results: Sequence[Result]) -> dict[str, Any]:
    """Summary of one workload at one size."""
    task = results[0].task
    distances = {name: over_seeds(run.distance for run in of(results, name)) for name in VARIANTS}
    losses = None
    if task.workload == CNN:
        losses = {
            name: {
                "average": over_seeds(run.average_loss for run in of(results, name)),
                "peers": over_seeds(run.peer_loss for run in of(results, name)),
            }
            for name in VARIANTS
        }
    return {
        "case": task.case,
        "workload": task.workload,
        "peers": task.peers,
        "acid_over_double_rate": round(distances[ACID]["mean"] / distances[DOUBLE]["mean"], 4),
        "acid_over_same_rate": round(distances[ACID]["mean"] / distances[SAME]["mean"], 4),
        "distance": distances,
        "loss": losses,
    }


def of(results: Iterable[Result], variant: str) -> list[Result]:
    return [run for run in results if run.task.variant == variant]


def over_seeds(values: Iterable[float | None]) -> dict[str, Any]:
    """The mean and its 95% interval."""
    over = interval(values)
    assert over is not None
    return {
        name: None if value is None else float(f"{value:.5g}")
        for name, value in (("mean", over.mean), ("low", over.low), ("high", over.high))
    }


def ratios(rows: Iterable[dict[str, Any]], case: str) -> dict[int, dict[str, float]]:
    """For each size, the larger ratio of the workloads."""
    selected = [row for row in rows if row["case"] == case and row["workload"] != CNN]
    return {
        peers: {
            name: max(row[name] for row in selected if row["peers"] == peers)
            for name in ("acid_over_double_rate", "acid_over_same_rate")
        }
        for peers in dict.fromkeys(row["peers"] for row in selected)
    }


# Tables


def show(figures: dict[str, dict[int, dict[str, float]]], rows: Sequence[dict[str, Any]]) -> None:
    console = Console()
    variants = (name.replace(" ", "\n") for name in VARIANTS)
    heads = ["", "", "peers", *variants, "acid/\ndouble", "acid/\nsame"]
    table = _table("Consensus distance", heads)
    for row in rows:
        table.add_row(
            row["case"],
            row["workload"],
            str(row["peers"]),
            *(f"{row['distance'][name]['mean']:.3g}" for name in VARIANTS),
            f"{row['acid_over_double_rate']:.2f}",
            f"{row['acid_over_same_rate']:.2f}",
        )
    console.print(table)
    worse = ", ".join(f"{value['acid_over_double_rate']:.2f} at {n}" for n, value in figures[HETEROGENEOUS].items())
    console.print(
        f"Ratio of acid to twice the rate with heterogeneous data, the worse of both workloads: {worse} peers.\n"
    )
    table = _table(f"Loss of the CNN on all training data, {LOSS_PEERS} peers", ["", "", *VARIANTS])
    for row in rows:
        if row["loss"] is not None:
            for what in ("average", "peers"):
                cells = (shown(row["loss"][name][what]) for name in VARIANTS)
                table.add_row(row["case"], f"of the {what}", *cells)
    console.print(table)


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    return table


def shown(over: dict[str, Any]) -> str:
    return f"{over['mean']:.2f}" if over["low"] is None else f"{over['mean']:.2f} ± {over['high'] - over['mean']:.2f}"


if __name__ == "__main__":
    main()
