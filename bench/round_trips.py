"""Processor time of a round trip: from a gradient to the parameters of the next round, all threads of both sides.

    python bench/round_trips.py [--json] [--repeats N] [--seconds S]

A hub and one worker train a model of 0.2 M parameters whose gradient costs next to nothing. In the middle of a run the
processor time of all threads of its processes is read twice from /proc, with how often each of them was woken up, and
divided by the rounds between the two readings. `bare` is what the same rounds take in an ordinary loop, computing the
gradient and the optimizer's step; `cpu_ms` is the rest. Each figure is the median of the repeats, which take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import offbeat as ob
from cheap_gradients import Stack, cheap_workload, difference
from offbeat.records.schema import Round

REPEATS = 5
SECONDS = 4.0
BARE_STEPS = 2000
WIDTH, LAYERS = 316, 2
RATE = 1e-5
START_SECONDS = 2.0
"""Processes have started by then, and memory is touched."""

STRATEGIES: dict[str, ob.Strategy] = {
    "fmb": ob.FixedMinibatch(batch=1, microbatch=1, optimizer=ob.SGD(lr=RATE)),
    "async-fmb": ob.AsyncFixed(batch=1, microbatch=1, messages=1, optimizer=ob.SGD(lr=RATE)),
    "apam": ob.AsyncAdaptive(batch=1, microbatch=1, optimizer=ob.AMSGrad(lr=RATE)),
}


@dataclass(frozen=True)
class Usage:
    """What a thread has used so far."""

    cpu_seconds: float
    switches: int
    """How often it has waited for something, and was woken up."""


@dataclass(frozen=True)
class Row:
    """One strategy in one repeat, per round."""

    strategy: str
    rounds_per_second: float
    cpu_ms: float
    bare_ms: float
    switches: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="how often all of them take turns")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="between the two readings")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    turns = [one_run(name, arguments.seconds) for _ in range(arguments.repeats) for name in STRATEGIES]
    rows = [median_of([row for row in turns if row.strategy == name]) for name in STRATEGIES]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        show(rows)


def median_of(rows: list[Row]) -> Row:
    names = ("rounds_per_second", "cpu_ms", "bare_ms", "switches")
    return replace(rows[0], **{name: statistics.median(getattr(row, name) for row in rows) for name in names})


def one_run(name: str, seconds: float) -> Row:
    readings: list[tuple[float, dict[int, Usage]]] = []

    def read_twice() -> None:
        for pause in (START_SECONDS, seconds):
            time.sleep(pause)
            readings.append((time.monotonic(), usage_of_descendants()))

    reader = threading.Thread(target=read_twice)
    reader.start()
    until = ob.Seconds(START_SECONDS + seconds + 0.5)
    run = ob.train(cheap_workload(LAYERS, WIDTH), STRATEGIES[name], until, workers=1, evaluate=None)
    reader.join()
    (began, before), (ended, after) = readings
    rounds = [record.at for record in run.records.records if isinstance(record, Round)]
    steady = rounds[len(rounds) // 3 :]
    rate = (len(steady) - 1) / (steady[-1] - steady[0])
    count = rate * (ended - began)
    used = [(one, before[thread]) for thread, one in after.items() if thread in before]
    if not used:
        raise SystemExit(f"round_trips: the processes took more than {START_SECONDS:g} seconds to start; try again")
    bare = bare_seconds(STRATEGIES[name])
    return Row(
        name,
        rate,
        1e3 * (sum(late.cpu_seconds - early.cpu_seconds for late, early in used) / count - bare),
        1e3 * bare,
        sum(late.switches - early.switches for late, early in used) / count,
    )


def usage_of_descendants() -> dict[int, Usage]:
    """Thread → what it has used, of all processes that this one and its children have started."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            children[int(stat.read_text().rsplit(")", 1)[1].split()[1])].append(int(stat.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    waiting, usage = list(children[os.getpid()]), {}
    while waiting:
        process = waiting.pop()
        waiting += children[process]
        for task in Path(f"/proc/{process}/task").glob("*"):
            try:
                usage[int(task.name)] = usage_of(task)
            except OSError:
                continue
    return usage


def usage_of(task: Path) -> Usage:
    nanoseconds = int((task / "schedstat").read_text().split()[0])
    status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
    return Usage(nanoseconds * 1e-9, int(status["voluntary_ctxt_switches"]))


def bare_seconds(strategy: ob.Strategy) -> float:
    """Processor time of a gradient and a step in an ordinary loop."""
    model, inputs, targets = Stack(LAYERS, WIDTH), torch.ones(1, 1), torch.zeros(1)
    kind = torch.optim.SGD if strategy is not STRATEGIES["apam"] else torch.optim.Adam
    extra = {} if kind is torch.optim.SGD else {"amsgrad": True}
    optimizer = kind(model.parameters(), lr=RATE, fused=True, **extra)
    for step in range(2 * BARE_STEPS):
        if step == BARE_STEPS:
            began = time.process_time()
        optimizer.zero_grad()
        difference(model(inputs), targets).sum().backward()
        optimizer.step()
    return (time.process_time() - began) / BARE_STEPS


def show(rows: list[Row]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for head in ("strategy", "rounds/s", "CPU ms per round trip", "bare gradient and step", "wake-ups"):
        table.add_column(head, justify="left" if head == "strategy" else "right")
    for row in rows:
        table.add_row(
            row.strategy,
            f"{row.rounds_per_second:,.0f}",
            f"{row.cpu_ms:.2f}",
            f"{row.bare_ms:.2f}",
            f"{row.switches:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
