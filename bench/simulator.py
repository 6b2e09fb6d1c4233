"""How much a simulated run costs beyond the gradients in it, and how many events it handles a second.

    python bench/simulator.py [--json] [--repeats N] [--scaling]

`overhead_digits`: a simulated run over the bare gradient computations that it contained, each by itself (`batched` off;
16 workers, digits CNN, batch 64, evaluation off, one thread). `batched_over_bare`: the same for the digits MLP, whose
gradients are computed in one call for several workers, by number of workers. Both are measured in turn; the ratios are
medians of the pairs, by processor time.

`events_per_second`: events that nodes handle per second in a run of async-fmb with 1,000 workers on the quadratic,
whose gradients are replaced by a constant; the time of the optimizer's steps is taken off. With `--scaling` the same
for 10 to 10,000 workers, each in a process of its own, with the memory of that process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import offbeat as ob
from offbeat.core.examples import Order
from offbeat.engine.gradient_accumulator import GradientResult
from offbeat.launch.process_settings import keep_freed_memory
from offbeat.records.files import MemoryWriter
from offbeat.records.schema import Round
from offbeat.simulation.simulator import Simulation
from offbeat.strategies.hub.hub_server import HubServer

BATCH = 64
ROUNDS = 200
REPEATS = 31
ROUNDS_PER_WORKER = 40
"""Where gradients are computed together: those of the rounds that the end of a run cuts off are computed in vain."""
EVENT_WORKERS, EVENT_REPEATS = 1000, 5
SCALING = (10, 100, 1000, 10_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="pairs of each ratio")
    parser.add_argument("--scaling", action="store_true", help="events per second by number of workers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as simulations and live runs do
    repeats = arguments.repeats
    overhead = ratio_of([one_pair(ob.workloads.DigitsCNN(), 16, "off") for _ in range(repeats)])
    batched = {
        workers: ratio_of([one_pair(ob.workloads.Digits(), workers, "auto") for _ in range(repeats)])
        for workers in (16, 64)
    }
    events = statistics.median(event_rate(EVENT_WORKERS) for _ in range(EVENT_REPEATS))
    scaling = {workers: in_process(workers) for workers in SCALING} if arguments.scaling else {}
    if arguments.json:
        result = {"overhead_digits": overhead, "batched_over_bare": batched, "events_per_second": round(events)}
        print(json.dumps({**result, "scaling": scaling}))
        return
    print(f"batch {BATCH}, {ROUNDS} gradients, or {ROUNDS_PER_WORKER} a worker where they are batched")
    print(f"median of {repeats} pairs, and quartiles")
    print(f"overhead_digits {_shown(overhead)}")
    for workers, ratio in batched.items():
        print(f"batched_over_bare, {workers} workers {_shown(ratio)}")
    print(f"events_per_second {events:,.0f}")
    for workers, (rate, megabytes) in scaling.items():
        print(f"  {workers:>6,} workers: {rate:>7,.0f} a second, {1e6 / rate:.1f} µs each, {megabytes:,.0f} MB")


def ratio_of(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """The quartiles of the ratios."""
    ratios = [simulated / bare for simulated, bare in pairs]
    return [round(value, 4) for value in statistics.quantiles(ratios, n=4)] if len(ratios) > 1 else ratios * 3


def _shown(quartiles: list[float]) -> str:
    low, middle, high = quartiles
    return f"{middle:.3f} ({low:.3f}–{high:.3f})"


def one_pair(named: Any, workers: int, batched: Any) -> tuple[float, float]:
    """Seconds of a simulated run, and of the gradients in it computed by a plain loop."""
    workload = named.build()
    strategy = ob.AsyncFixed(batch=BATCH, microbatch=BATCH).with_default_optimizer(workload.optimizer)
    rounds = ROUNDS if batched == "off" else ROUNDS_PER_WORKER * workers
    until = ob.Samples(rounds * BATCH)
    experiment = ob.Experiment(workload, strategy, workers=workers, until=until, evaluate=None, batched=batched)
    writer = MemoryWriter()
    simulation = Simulation(experiment, writer)
    simulated = seconds_of(simulation.run)
    records = [record for record in writer.records if isinstance(record, Round)]

    model = workload.initial_model(0)
    indices = workload.split.indices(workload.train.targets, 0, workers, 0)
    orders = {rank: Order(indices, 0, rank) for rank in range(1, workers + 1)}

    def plain_loop() -> None:
        for record in records:
            if record.samples:
                model.zero_grad()
                inputs, targets = workload.train.take(orders[record.rank].take(*record.draws))
                workload.loss(model(inputs), targets).sum().backward()

    return simulated, seconds_of(plain_loop)


def event_rate(workers: int) -> float:
    """Events per second, without gradients and optimizer."""
    workload = ob.workloads.Quadratic(dimension=10).build()
    strategy = ob.AsyncFixed(batch=16, microbatch=16).with_default_optimizer(workload.optimizer)
    until = ob.Samples(16 * max(10 * workers, 20_000))
    experiment = ob.Experiment(workload, strategy, workers=workers, until=until, evaluate=None, batched="off")
    simulation = Simulation(experiment, MemoryWriter())
    gradient = torch.full((10,), 1e-6)

    def constant(*_: Any) -> GradientResult:
        return GradientResult(gradient, 1.0, (), True)

    simulation.gradient_computer.gradient = constant  # type: ignore[method-assign]
    hub = simulation.processes[0].node
    assert isinstance(hub, HubServer)
    stepping = Timed(hub._optimizer.step)
    hub._optimizer.step = stepping  # type: ignore[method-assign]
    elapsed = seconds_of(simulation.run)
    return simulation.events / (elapsed - stepping.seconds)


class Timed:
    """A function, and the processor time of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        start = time.process_time()
        result = self._function(*arguments)
        self.seconds += time.process_time() - start
        return result


def in_process(workers: int) -> tuple[float, float]:
    """Events per second and the largest memory, in megabytes, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_rate_and_memory, (workers,))


def _rate_and_memory(workers: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    rate = event_rate(workers)
    return rate, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def seconds_of(work: Callable[[], object]) -> float:
    """Processor time: one thread computes, and on a shared machine the wall clock also measures the neighbours."""
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
