"""From which size on gradients of several workers should be computed each by itself: the constants of the rule.

    python bench/batching.py [--json] [--repeats N] [--workers N ...]

For models of several kinds and sizes, and rounds of several sizes, the gradients of a group of workers are computed in
one call, at parameters of their own (`own`) and at the same ones (`shared`), and one after the other: `ratio` is the
time of the one over that of the other. All variants of a row take turns; each figure is the median of the repeats.
`chosen` says whether the rule of `engine/batching.py` computes such rounds together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

import offbeat as ob
from offbeat.core.examples import Order
from offbeat.core.workload import Workload
from offbeat.engine.batched_gradients import BatchedGradients, RoundInputs
from offbeat.engine.batching import choose_batching, try_batching
from offbeat.engine.gradient_computer import GradientComputer, GradientRequest
from offbeat.launch.process_settings import keep_freed_memory

WORKLOADS = {
    "quadratic": ob.workloads.Quadratic(),
    "digits-logistic": ob.workloads.DigitsLogistic(),
    "digits": ob.workloads.Digits(),
    "digits, hidden 512": ob.workloads.Digits(hidden=512),
    "toy": ob.workloads.TwoGaussians(),
    "digits-cnn, width 4": ob.workloads.DigitsCNN(width=4),
    "digits-cnn": ob.workloads.DigitsCNN(),
    "digits-cnn, width 64": ob.workloads.DigitsCNN(width=64),
}
SAMPLES = (4, 16, 64, 256)
WORKERS = (3, 4, 8, 16, 64)
SECONDS_MIN = 0.02
"""Repetitions of a variant take so long at least."""


@dataclass(frozen=True)
class Row:
    workload: str
    samples: int
    workers: int
    megaflops: float
    """Floating-point operations of the forward pass of a round, in millions."""
    own: float
    shared: float
    chosen: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print all rows as JSON and nothing else")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as `offbeat simulate` does
    rows = [
        row_of(name, workload.build(), samples, workers, arguments.repeats)
        for name, workload in WORKLOADS.items()
        for samples in SAMPLES
        for workers in arguments.workers
    ]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for head in ("workload", "samples", "workers", "Mflop a round", "ratio, own", "ratio, shared", "chosen"):
        table.add_column(head, justify="left" if head == "workload" else "right")
    for row in rows:
        ratios = f"{row.own:.2f}", f"{row.shared:.2f}"
        chosen = "yes" if row.chosen else ""
        table.add_row(row.workload, str(row.samples), str(row.workers), f"{row.megaflops:.3g}", *ratios, chosen)
    Console().print(table)


def row_of(name: str, workload: Workload, samples: int, workers: int, repeats: int) -> Row:
    computer = GradientComputer(workload, 0)
    batched = BatchedGradients(workload, computer.flat)
    start = computer.flat.parameters.detach().clone()
    orders = [Order(np.arange(len(workload.train)), 0, rank) for rank in range(workers)]
    vectors = [start + 1e-3 * rank for rank in range(workers)]
    own = [RoundInputs(vector, order, 0, samples) for vector, order in zip(vectors, orders, strict=True)]
    shared = [RoundInputs(start, order, 0, samples) for order in orders]

    def one_by_one() -> None:
        for one in own:
            computer.gradient(one.parameters, (), GradientRequest(one.order, 0, samples, samples, (0, 0)))

    variants = (one_by_one, lambda: batched.compute(own), lambda: batched.compute(shared))
    turns = [[seconds_of(work) for work in variants] for _ in range(repeats)]
    alone, at_own, at_shared = (statistics.median(column) for column in zip(*turns, strict=True))
    flops = try_batching(workload).flops_per_sample * samples
    choice = choose_batching(workload, "auto", workers)
    return Row(name, samples, workers, flops / 1e6, at_own / alone, at_shared / alone, samples <= choice.samples_max)


def seconds_of(work: Callable[[], object]) -> float:
    """Processor time of one call, over as many as take `SECONDS_MIN`."""
    calls, start = 0, time.process_time()
    while calls == 0 or time.process_time() - start < SECONDS_MIN:
        work()
        calls += 1
    return (time.process_time() - start) / calls


if __name__ == "__main__":
    main()
