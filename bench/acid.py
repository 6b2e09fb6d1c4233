"""Where the momentum of averaging (A²CiD²) equals twice the communication: how far apart the peers of a cycle are.

    python bench/acid.py [--json] [--seeds N] [--peers 16 32 64] [--processes N]

Contestants are gossip at rate 1, gossip at rate 2, and gossip with acid at rate 1: same seeds, same data, no latency,
in virtual time. The *consensus distance* is the mean over peers of the squared distance to their mean. It is looked at
several times per gradient, and averaged over time, after a burn-in, and over seeds. What is printed is acid's over that
of the others: below 1, its peers are closer together.

*heterogeneous*: peers disagree, on quadratics with an optimum each, and on logistic regression where each sees about
two of the ten digits. The figure for a number of peers is the worse of the two, ratio by ratio; `rows` has each.
*identical*: the same quadratics with one optimum for all, so that only noise drives peers apart. Acid does not help.

The quadratics have curvature 1, so that they forget their start within 1/RATE = 10 gradient times, whatever the graph,
and are stationary when measuring begins. Logistic regression is not: its gradients shrink as it learns, and the slowest
mode of a plain cycle takes 2·χ1 = 415 gradient times at 64 peers. All peers begin alike, so that plain gossip is still
drifting apart there when the window ends; a longer one would be more in favour of acid.

*loss* is that of a CNN on all training data at the end, with 95% intervals over seeds: of the average of all peers,
which is what a run hands out, and of the peers themselves before that, the mean over them. Heterogeneous is two digits
each again, identical is all digits for everybody.
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
from offbeat.simulation.state import Scenario

PEERS = (16, 32, 64)
SEEDS = 10
RATE = 0.1
"""The learning rate of SGD, the same everywhere."""
BATCH = 16
"""Samples per gradient."""
BURN_IN = 40
"""Gradient times that are not looked at: four times what the quadratics need to forget their start."""
WINDOW = 40
"""Gradient times that are, after that."""
LOOKS = 4
"""Looks per gradient time, at equal distances from the moments at which gradients are ready."""
DIMENSION = 20
"""Parameters of the quadratics."""
SPREAD = 1.0
"""Standard deviation of each coordinate of the peers' optima."""
NOISE = 1.0
"""Standard deviation of each coordinate of a sample's gradient: as large as the spread, but averaged over a batch."""
SAMPLES_EACH = 2048
"""Training examples of each peer of the quadratics: more than a run draws, so that no noise comes twice."""
LOSS_PEERS = 16
"""Peers that train the CNN."""

CONTESTANTS: dict[str, ob.Gossip] = {
    "same rate": ob.Gossip(graph=ob.graphs.Cycle(), rate=1.0),
    "double rate": ob.Gossip(graph=ob.graphs.Cycle(), rate=2.0),
    "acid": ob.GossipAcid(graph=ob.graphs.Cycle(), rate=1.0),
}
SAME, DOUBLE, ACID = CONTESTANTS


# What is trained


class Point(nn.Module):
    """The parameters themselves, once per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(DIMENSION))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.place.expand(len(inputs), -1)


@dataclass(frozen=True)
class InTurn(Split):
    """The first part of the examples for the first worker, the next for the next."""

    def indices(self, targets: Tensor, worker: int, workers: int, seed: int) -> Indices:
        each = len(targets) // workers
        return np.arange(worker * each, (worker + 1) * each)


def quadratics(peers: int, seed: int, spread: float) -> ob.Workload:
    """½‖x − target‖², the targets of each peer being its optimum under noise that sums to zero."""
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
    """Evaluated on what it is trained with."""
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
    contestant: str
    seed: int


@dataclass(frozen=True)
class Found:
    """What one run has shown; losses of the CNN alone."""

    task: Task
    distance: float
    average_loss: float | None = None
    peer_loss: float | None = None


class Watch:
    """Looks at all replicas from time to time, and writes nothing down."""

    def __init__(self) -> None:
        self.distances: list[float] = []
        self.replicas = torch.empty(0)
        """As they were when it looked last."""

    def before(self, simulation: Simulation, rank: int, event: Event) -> None:
        while simulation.now >= (len(self.distances) + 0.5) / LOOKS:
            found = (process.node.replica() for process in simulation.processes)
            self.replicas = torch.stack([replica for replica in found if replica is not None])
            exact = self.replicas.double()
            self.distances.append(float((exact - exact.mean(0)).square().sum(1).mean()))

    def after(self, simulation: Simulation, rank: int, event: Event, actions: list[Action]) -> None: ...

    def write(self, record: Record) -> None: ...


def one_run(task: Task) -> Found:
    """In virtual time, where a gradient takes one second."""
    torch.set_num_threads(1)
    workload = WORKLOADS[task.case, task.workload](task.peers, task.seed)
    strategy = dataclasses.replace(
        CONTESTANTS[task.contestant], optimizer=ob.SGD(lr=RATE), batch=BATCH, microbatch=BATCH
    )
    cluster, until = ob.Cluster(seconds_per_sample=1.0 / BATCH), ob.Seconds(float(BURN_IN + WINDOW))
    watch = Watch()
    simulation = Simulation(Scenario(strategy, workload, cluster, task.peers, until, task.seed), watch, observer=watch)
    outcome = simulation.run()
    assert outcome.failure is None, outcome.failure
    distance = statistics.fmean(watch.distances[BURN_IN * LOOKS :])
    if task.workload != CNN:
        return Found(task, distance)
    average_loss = simulation.gradient_computer.evaluate(outcome.finishes[0].parameters, ()).loss
    peer_losses = [simulation.gradient_computer.evaluate(replica, ())[0] for replica in watch.replicas]
    return Found(task, distance, average_loss, statistics.fmean(peer_losses))


# All runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds")
    parser.add_argument("--peers", type=int, nargs="+", default=PEERS, help="sizes of the cycle")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many runs are made at a time")
    arguments = parser.parse_args()
    rows = [row_of(found) for found in measured(arguments.peers, arguments.seeds, arguments.processes)]
    figures = {case: ratios(rows, case) for case in (HETEROGENEOUS, IDENTICAL)}
    losses = {row["case"]: row["loss"] for row in rows if row["loss"] is not None}
    if arguments.json:
        print(json.dumps({**figures, "loss": losses, "rows": rows}))
    else:
        show(figures, rows)


def measured(peers: Sequence[int], seeds: int, processes: int) -> Iterable[list[Found]]:
    """The runs of each workload and size, all contestants and seeds."""
    settings = [
        (case, workload, size) for case, workload in WORKLOADS for size in ((LOSS_PEERS,) if workload == CNN else peers)
    ]
    tasks = [Task(*key, contestant, seed) for key in settings for contestant in CONTESTANTS for seed in range(seeds)]
    # The largest first, so that no process is left alone with one of them at the end.
    order = sorted(tasks, key=lambda task: task.peers, reverse=True)
    console = Console(stderr=True)
    with (
        ProcessPoolExecutor(processes) as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        made = list(progress.track(pool.map(one_run, order), total=len(order), description="simulating"))
    return [
        [found for found in made if (found.task.case, found.task.workload, found.task.peers) == key] for key in settings
    ]


def row_of(found: Sequence[Found]) -> dict[str, Any]:
    """One workload at one size."""
    task = found[0].task
    distances = {name: over_seeds(run.distance for run in of(found, name)) for name in CONTESTANTS}
    losses = None
    if task.workload == CNN:
        losses = {
            name: {
                "average": over_seeds(run.average_loss for run in of(found, name)),
                "peers": over_seeds(run.peer_loss for run in of(found, name)),
            }
            for name in CONTESTANTS
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


def of(found: Iterable[Found], contestant: str) -> list[Found]:
    return [run for run in found if run.task.contestant == contestant]


def over_seeds(values: Iterable[float | None]) -> dict[str, Any]:
    """The mean and its 95% interval."""
    over = interval(values)
    assert over is not None
    return {
        name: None if value is None else float(f"{value:.5g}")
        for name, value in (("mean", over.mean), ("low", over.low), ("high", over.high))
    }


def ratios(rows: Iterable[dict[str, Any]], case: str) -> dict[int, dict[str, float]]:
    """For each size the worse of the workloads, ratio by ratio."""
    mine = [row for row in rows if row["case"] == case and row["workload"] != CNN]
    return {
        peers: {
            name: max(row[name] for row in mine if row["peers"] == peers)
            for name in ("acid_over_double_rate", "acid_over_same_rate")
        }
        for peers in dict.fromkeys(row["peers"] for row in mine)
    }


# The tables


def show(figures: dict[str, dict[int, dict[str, float]]], rows: Sequence[dict[str, Any]]) -> None:
    console = Console()
    contestants = (name.replace(" ", "\n") for name in CONTESTANTS)
    heads = ["", "", "peers", *contestants, "acid/\ndouble", "acid/\nsame"]
    table = _table("Consensus distance", heads)
    for row in rows:
        table.add_row(
            row["case"],
            row["workload"],
            str(row["peers"]),
            *(f"{row['distance'][name]['mean']:.3g}" for name in CONTESTANTS),
            f"{row['acid_over_double_rate']:.2f}",
            f"{row['acid_over_same_rate']:.2f}",
        )
    console.print(table)
    worse = ", ".join(f"{value['acid_over_double_rate']:.2f} at {n}" for n, value in figures[HETEROGENEOUS].items())
    console.print(f"Acid over twice the rate where peers disagree, the worse of both workloads: {worse} peers.\n")
    table = _table(f"Loss of the CNN on all training data, {LOSS_PEERS} peers", ["", "", *CONTESTANTS])
    for row in rows:
        if row["loss"] is not None:
            for what in ("average", "peers"):
                cells = (shown(row["loss"][name][what]) for name in CONTESTANTS)
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
