"""How much a simulated run costs beyond the gradients in it, and how many events it handles a second.

    python bench/simulator.py [--json]

`overhead_digits`: wall time of a simulated run over the bare gradient computations that it contained (16 workers,
digits CNN, batch 64, evaluation off, one thread). Both are measured in turn, several times; the ratio is the median
of the pairs. `events_per_second`: events that nodes handle per second in a run of 1,000 workers on the quadratic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

import offbeat as ob
from offbeat.core.examples import Order
from offbeat.records.files import MemoryWriter
from offbeat.records.schema import Round
from offbeat.simulation.simulator import Simulation

WORKERS = 16
BATCH = 64
ROUNDS = 200
REPEATS = 31


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [one_pair() for _ in range(REPEATS)]
    overhead = statistics.median(simulated / bare for simulated, bare in rows)
    events = statistics.median(events_per_second() for _ in range(5))
    if arguments.json:
        print(json.dumps({"events_per_second": round(events), "overhead_digits": round(overhead, 4)}))
        return
    print(f"digits CNN, {WORKERS} workers, batch {BATCH}, {ROUNDS} gradients, median of {REPEATS} pairs")
    for simulated, bare in rows:
        print(f"  simulated {simulated:.3f} s, bare gradients {bare:.3f} s, ratio {simulated / bare:.3f}")
    print(f"overhead {overhead:.3f}")
    print(f"quadratic, 1,000 workers: {events:,.0f} events a second")


def one_pair() -> tuple[float, float]:
    """Seconds of a simulated run, and of the gradients in it computed by a plain loop."""
    workload = ob.workloads.DigitsCNN().build()
    strategy = ob.AsyncFixed(batch=BATCH, microbatch=BATCH).with_default_optimizer(workload.optimizer)
    experiment = ob.Experiment(workload, strategy, workers=WORKERS, until=ob.Samples(ROUNDS * BATCH), evaluate=None)
    writer = MemoryWriter()
    simulation = Simulation(experiment, writer)
    simulated = seconds_of(simulation.run)
    rounds = [record for record in writer.records if isinstance(record, Round)]

    model = workload.initial_model(0)
    indices = workload.split.indices(workload.train.targets, 0, WORKERS, 0)
    orders = {rank: Order(indices, 0, rank) for rank in range(1, WORKERS + 1)}

    def plain_loop() -> None:
        for record in rounds:
            if record.samples:
                model.zero_grad()
                inputs, targets = workload.train.take(orders[record.rank].take(*record.draws))
                workload.loss(model(inputs), targets).sum().backward()

    return simulated, seconds_of(plain_loop)


def events_per_second() -> float:
    workload = ob.workloads.Quadratic(dimension=10).build()
    strategy = ob.AsyncTimed(worker_seconds=1.0, hub_seconds=1.0, samples_max=32, microbatch=32)
    experiment = ob.Experiment(
        workload,
        strategy.with_default_optimizer(workload.optimizer),
        workers=1000,
        until=ob.Samples(150_000),
        evaluate=None,
    )
    simulation = Simulation(experiment, MemoryWriter())
    elapsed = seconds_of(simulation.run)
    return simulation.events / elapsed


def seconds_of(work: Callable[[], object]) -> float:
    """Processor time: one thread computes, and on a shared machine the wall clock also measures the neighbours."""
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
