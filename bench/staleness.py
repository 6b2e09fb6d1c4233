"""What staleness costs: accuracy against link latency and the number of workers, in virtual time.

    python bench/staleness.py --workload digits --out digits.json
    python bench/staleness.py --draw digits.json mnist.json quadratic.json --figure staleness.svg

Each asynchronous strategy runs with its defaults, and as published (damping 0). Beside them stands what the same number
of samples gives without any staleness at an equally reduced learning rate: serial training in batches of the same size,
whose updates have the rates that the updates of the run with defaults had. A strategy degrades and does not collapse if
it is not far below that anywhere. A run with staleness τ has only 1/(1 + τ) as many round trips as updates, so the last
two columns are one update per round trip, which is serial training at the whole rate in batches that are 1 + τ times as
large, and what fmb learns in the same time, while its workers wait. Rounds take 16 ms without latency: 64 samples per
message at 0.25 ms each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from bisect import bisect_right
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import offbeat as ob
from offbeat.core.schedules import Schedule
from offbeat.records.schema import Notice, Update, of_kind

SECONDS_PER_SAMPLE = 0.00025
LATENCIES = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
WORKERS = (2, 8, 64)
MARGIN = 0.03
"""Accuracy that a strategy may be below training without staleness at the same rate."""

WORKLOADS: dict[str, Any] = {
    "digits": ob.workloads.Digits(),
    "mnist": ob.workloads.Mnist(model=ob.models.LeNet5(), test_examples=2000),
    "quadratic": ob.workloads.Quadratic(),
}

OPTIMIZERS: dict[str, ob.nodes.Optimizer] = {
    "adam": ob.Adam(lr=3e-3),
    "sgd": ob.SGD(lr=0.5),  # in effect the rate of the next one
    "momentum": ob.SGD(lr=0.05, momentum=0.9),
}
RATES: dict[tuple[str, str], float] = {("mnist", "sgd"): 0.1}
"""Rates of workloads that need other ones; at 0.5, LeNet5 does not train without staleness either."""

COLUMNS = {
    "published": "published",
    "default": "default",
    "serial": "no staleness, same rates",
    "round_trips": "one update per round trip",
    "fmb": "fmb, same time",
}
"""The runs of a cell, see `measure`, and their heads in tables."""
KINDS = tuple(COLUMNS)

STRATEGIES: dict[str, ob.Strategy] = {
    "async-fmb": ob.AsyncFixed(),
    "async-timed": ob.AsyncTimed(worker_seconds=64 * SECONDS_PER_SAMPLE, hub_seconds=64 * SECONDS_PER_SAMPLE),
    "apam": ob.AsyncAdaptive(),
}


@dataclass(frozen=True)
class Cell:
    """One place of the sweep."""

    workload: str
    strategy: str
    optimizer: str
    workers: int
    latency: float
    seed: int
    samples: int


@dataclass(frozen=True)
class Outcome:
    """The end of a run."""

    accuracy: float | None
    loss: float
    staleness: float
    rates: tuple[tuple[int, float], ...]
    """Samples before each update, and its learning rate."""
    samples_per_update: float
    seconds: float
    notices: tuple[str, ...]


@dataclass(frozen=True)
class Recorded(Schedule, name="recorded"):
    """The learning rates of another run."""

    rates: tuple[tuple[int, float], ...]
    """samples before each update, and its rate"""

    def __call__(self, samples: int) -> float:
        return self.rates[max(0, bisect_right(self.rates, (samples, float("inf"))) - 1)][1]


def simulated(cell: Cell, strategy: ob.Strategy, until: ob.Samples | ob.Seconds | None = None) -> Outcome:
    cluster = ob.Cluster(seconds_per_sample=SECONDS_PER_SAMPLE, link=ob.Link(latency_seconds=cell.latency))
    run = ob.simulate(
        WORKLOADS[cell.workload],
        strategy,
        cluster=cluster,
        workers=cell.workers,
        until=until or ob.Samples(cell.samples),
        seed=cell.seed,
        evaluate=ob.EveryUpdates(1000),  # and at the end, which alone is used
    )
    updates = list(of_kind(run.records, Update))
    summary = run.summary
    return Outcome(
        accuracy=summary.accuracy,
        loss=float("inf") if summary.loss is None else summary.loss,
        staleness=summary.staleness_mean or 0.0,
        rates=tuple((update.samples_total - update.samples, update.learning_rate) for update in updates),
        samples_per_update=statistics.fmean(update.samples for update in updates),
        seconds=summary.seconds,
        notices=tuple(notice.text for notice in of_kind(run.records, Notice)),
    )


def measure(cell: Cell) -> dict[str, Any]:
    """The strategy with its defaults, as published, and three kinds of training without staleness.

    serial: updates of the same size at the same rates
    round_trips: one update per round trip, at the whole rate
    fmb: synchronous workers, for the same time
    """
    torch.set_num_threads(1)
    optimizer = OPTIMIZERS[cell.optimizer]
    optimizer = dataclasses.replace(optimizer, lr=RATES.get((cell.workload, cell.optimizer), optimizer.lr))
    if cell.strategy == "apam":
        optimizer = ob.AMSGrad.like(optimizer)
    damped = dataclasses.replace(STRATEGIES[cell.strategy], optimizer=optimizer)
    with_defaults = simulated(cell, damped)
    published = simulated(cell, dataclasses.replace(damped, damping=0.0))
    slow = dataclasses.replace(optimizer, lr=Recorded(with_defaults.rates))
    batch = max(1, round(with_defaults.samples_per_update))
    serial = simulated(cell, ob.Serial(batch=batch, optimizer=slow))
    per_round_trip = max(1, round(with_defaults.samples_per_update * (1 + with_defaults.staleness)))
    round_trips = simulated(cell, ob.Serial(batch=per_round_trip, optimizer=optimizer))
    return {
        **dataclasses.asdict(cell),
        "default": plain(with_defaults),
        "published": plain(published),
        "serial": plain(serial),
        "round_trips": plain(round_trips),
        "fmb": plain(
            simulated(cell, ob.FixedMinibatch(batch=64, optimizer=optimizer), ob.Seconds(with_defaults.seconds))
        ),
    }


def plain(outcome: Outcome) -> dict[str, Any]:
    """For JSON, without the rate of every update."""
    fields = dataclasses.asdict(outcome)
    return {**fields, "rates": statistics.fmean(rate for _, rate in outcome.rates)}


def show(rows: list[dict[str, Any]], console: Console) -> int:
    """Print the table; returns in how many rows the defaults are below the margin."""
    table = Table(title="Accuracy (or loss) after the same samples")
    for head in ("workload", "strategy", "optimizer", "workers", "latency (s)", "staleness", *COLUMNS.values()):
        table.add_column(head, justify="left" if head in ("workload", "strategy", "optimizer") else "right")
    below = 0
    for row in rows:
        default = row["default"]
        metric = "loss" if default["accuracy"] is None else "accuracy"
        values = [row[kind][metric] for kind in KINDS]
        is_below = metric == "accuracy" and values[1] < values[2] - MARGIN
        below += is_below
        cells = [f"{value:.3f}" if metric == "accuracy" else f"{value:.3g}" for value in values]
        cells[1] += " !" if is_below else ""
        names = (row["workload"], row["strategy"], row["optimizer"], str(row["workers"]), f"{row['latency']:g}")
        table.add_row(*names, f"{default['staleness']:.1f}", *cells)
    console.print(table)
    return below


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """One panel for each workload, strategy and optimizer: accuracy or loss against latency, a colour for each size."""
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row["workload"], row["strategy"], row["optimizer"]) for row in rows))
    columns = min(4, len(panels))
    figure, axes = plt.subplots(
        -(-len(panels) // columns), columns, figsize=(3.4 * columns, 2.7 * -(-len(panels) // columns)), squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, panel in zip(axes.flat, panels, strict=False):
        of_panel = [row for row in rows if (row["workload"], row["strategy"], row["optimizer"]) == panel]
        metric = "loss" if of_panel[0]["default"]["accuracy"] is None else "accuracy"
        for number, workers in enumerate(dict.fromkeys(row["workers"] for row in of_panel)):
            chosen = [row for row in of_panel if row["workers"] == workers]
            latencies = [row["latency"] for row in chosen]
            for kind, dashes in (("default", "-"), ("published", ":"), ("serial", "--")):
                label = f"{workers} workers" if kind == "default" else None
                axis.plot(latencies, [row[kind][metric] for row in chosen], dashes, color=f"C{number}", label=label)
        axis.set(title=" ".join(panel), xlabel="latency (s)", ylabel=metric)
        axis.set_xscale("symlog", linthresh=0.05)
        axis.set_yscale("log" if metric == "loss" else "linear")
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """A table of docs/staleness.md: a row for each number of workers, a column for each latency."""
    latencies = sorted({row["latency"] for row in rows})
    heads = ["workload", "strategy", "optimizer", "workers", *(f"{latency:g} s" for latency in latencies)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    keys = ("workload", "strategy", "optimizer", "workers")
    for names in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        of_line = {row["latency"]: row for row in rows if tuple(row[key] for key in keys) == names}
        cells = [in_words(of_line[latency]) if latency in of_line else "" for latency in latencies]
        lines.append("| " + " | ".join(map(str, [*names, *cells])) + " |")
    return "\n".join(lines)


def in_words(row: dict[str, Any]) -> str:
    """Published, default and without staleness at the same rates; and how stale."""
    texts = [in_digits(row, kind) for kind in ("published", "default", "serial")]
    return f"{texts[0]} **{texts[1]}** {texts[2]} (τ {row['default']['staleness']:.0f})"


def as_long_markdown(rows: list[dict[str, Any]]) -> str:
    """A table of docs/staleness.md: a row for each cell, with all kinds of runs, and the number of round trips."""
    heads = ["strategy", "optimizer", "workers", "latency (s)", "staleness", "round trips", *COLUMNS.values()]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        default = row["default"]
        round_trips = row["samples"] / default["samples_per_update"] / (1 + default["staleness"])
        names = (row["strategy"], row["optimizer"], str(row["workers"]), f"{row['latency']:g}")
        values = (in_digits(row, kind) for kind in KINDS)
        lines.append("| " + " | ".join([*names, f"{default['staleness']:.0f}", f"{round_trips:.0f}", *values]) + " |")
    return "\n".join(lines)


def in_digits(row: dict[str, Any], kind: str) -> str:
    """The accuracy of one kind of run of a cell, or its loss if the workload has no accuracy."""
    metric = "loss" if row["default"]["accuracy"] is None else "accuracy"
    value = row[kind][metric]
    return f"{value:.2f}".removeprefix("0") if metric == "accuracy" else f"{value:.2g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="digits")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="names, with commas between")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="names, with commas between")
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)), help="numbers, with commas between")
    parser.add_argument("--latencies", default=",".join(map(str, LATENCIES)), help="seconds, with commas between")
    parser.add_argument("--samples", type=int, default=60_000, help="how many samples a run has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many runs at a time")
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    parser.add_argument("--draw", type=Path, nargs="+", help="files of earlier sweeps to draw, instead of a new sweep")
    parser.add_argument("--figure", type=Path, default=Path("staleness.svg"), help="where --draw writes its figure")
    parser.add_argument("--long", action="store_true", help="with --draw: a table with all kinds of runs")
    arguments = parser.parse_args()
    if arguments.draw:
        rows = [row for path in arguments.draw for row in json.loads(path.read_text(encoding="utf-8"))]
        draw(rows, arguments.figure)
        print(as_long_markdown(rows) if arguments.long else as_markdown(rows))
        return 0
    cells = [
        Cell(arguments.workload, strategy, optimizer, int(workers), float(latency), arguments.seed, arguments.samples)
        for strategy in arguments.strategies.split(",")
        for optimizer in arguments.optimizers.split(",")
        if strategy != "apam" or optimizer == "adam"
        for workers in arguments.workers.split(",")
        for latency in arguments.latencies.split(",")
    ]
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        rows = list(pool.map(measure, cells))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    below = show(rows, Console(width=140))
    print(f"{below} of {len(rows)} are more than {MARGIN:g} below training without staleness at the same rate")
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
