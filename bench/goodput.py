"""What failures cost: how much of what 64 workers could compute ends in the parameters, and what that does to the loss.

    python bench/goodput.py [--json] [--processes N]

64 workers, each of which fails after 6,400 s on average and is back 120 s later; a step takes 1 s; in virtual time.

restart            plain synchronous training with a checkpoint every 60 s: when a worker fails, all wait until it is
                   back and continue from the last checkpoint
fmb                synchronous training that continues with the workers that are left
decoupled-diloco   workers that never wait, a quorum of half of them and a grace window at the hub

*goodput* is the number of samples that ended in the parameters over the number that all workers could have computed in
that time. What was undone, what died with its worker, and what was on its way at the end does not count. The hub sees
at once that a worker is gone, messages take no time, and workers are equally fast, except those of decoupled-diloco:
they are up to 10% slower or faster, so that they do not report together and the quorum and the grace window matter.
What they could have computed is what machines of just these speeds could.

*loss over fault free* is the loss on all training data after 1,500 s over that of the same strategy without failures,
after the same time. Without failures restart is fmb.

For restart the formula ΛC/((e^ΛC − 1)·e^ΛR) is printed as well, where Λ is 64/6,400 s, C the checkpoint interval and R
the recovery. It lets machines fail that are down already, which real ones do not, and is for long runs: short ones keep
some more, since all machines are up when they begin, and the end comes before the next failure. The share varies much
from run to run, since a few failures that follow closely stop everything for long. So the failures of 100 seeds are
drawn, `arithmetic` tells from their times alone what restart should keep under each, and the runs that are simulated
are those in the middle of each fifth of them, from the worst to the best. `rows` shows both numbers for each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import offbeat as ob
from offbeat.core.actions import Action, Record, Report, SetTimer
from offbeat.core.events import Event, TimerFired
from offbeat.records.schema import Membership, Undone, Update
from offbeat.simulation.simulator import Simulation
from offbeat.strategies.local_steps.local_steps_strategies import DecoupledDiLoCo

WORKERS = 64
MTBF_SECONDS = 6400.0
RECOVERY_SECONDS = 120.0
CHECKPOINT_SECONDS = 60.0
STEP_SECONDS = 1.0
BATCH = 4
"""Samples of a step: few, since what is measured does not depend on it."""
SECONDS = 1500.0
"""How long fmb and decoupled-diloco train, and when every loss is taken."""
RESTART_SECONDS = 4000.0
"""How long restart does."""
LONG_SECONDS = 200_000.0
"""How long it would have to train for the start, at which no worker is down, not to matter."""
SEEDS = {"decoupled-diloco": (0, 1), "fmb": (0,)}
"""Of those whose goodput hardly varies."""
DRAWN, STRATA = 100, 5
"""Seeds whose failures are drawn for restart, and how many of them are simulated."""
SPREAD = 0.1
"""How much slower and faster than a step a second the workers are, at the most."""
PATIENCE_SECONDS = 3600.0
"""Longer than any worker is down."""

RESTART, FMB, DECOUPLED = "restart", "fmb", "decoupled-diloco"
STRATEGIES: dict[str, ob.Strategy] = {
    RESTART: ob.RestartFromCheckpoint(
        batch=BATCH,
        microbatch=BATCH,
        checkpoint_interval_seconds=CHECKPOINT_SECONDS,
        patience_seconds=PATIENCE_SECONDS,
    ),
    FMB: ob.FixedMinibatch(batch=BATCH, microbatch=BATCH, patience_seconds=PATIENCE_SECONDS),
    DECOUPLED: DecoupledDiLoCo(
        batch=BATCH, microbatch=BATCH, every=24, fragments=4, grace=0.5, patience_seconds=PATIENCE_SECONDS
    ),
}


# What restart should keep


def formula() -> float:
    """The share that restarting from a checkpoint keeps in the long run."""
    rate = WORKERS / MTBF_SECONDS
    kept = rate * CHECKPOINT_SECONDS / math.expm1(rate * CHECKPOINT_SECONDS)
    return kept * math.exp(-rate * RECOVERY_SECONDS)


def arithmetic(seed: int, seconds: float) -> float:
    """The share that is kept under the failures of this seed: whole checkpoint intervals between failures."""
    begin, kept = 0.0, 0.0
    for crash in crashes(seed, seconds):
        kept += max(0.0, crash.at_seconds - begin) // CHECKPOINT_SECONDS * CHECKPOINT_SECONDS
        begin = crash.at_seconds + RECOVERY_SECONDS  # also where it falls into the recovery from another
    return (kept + max(0.0, seconds - begin) // STEP_SECONDS * STEP_SECONDS) / seconds


def expected() -> dict[str, float]:
    """What restart should keep: by the formula, and by arithmetic in long runs and in runs like those simulated."""
    return {
        "formula": round(formula(), 4),
        "long_runs": round(statistics.fmean(arithmetic(seed, LONG_SECONDS) for seed in range(DRAWN)), 4),
        "runs_like_these": round(statistics.fmean(arithmetic(seed, RESTART_SECONDS) for seed in range(DRAWN)), 4),
    }


def crashes(seed: int, seconds: float) -> tuple[ob.faults.Crash, ...]:
    return ob.faults.failures(WORKERS, MTBF_SECONDS, RECOVERY_SECONDS, seconds, seed)


def chosen_seeds() -> list[int]:
    """The middle of each stratum, from the seed whose failures cost restart the most to that where they cost least."""
    order = sorted(range(DRAWN), key=lambda seed: (arithmetic(seed, RESTART_SECONDS), seed))
    size = DRAWN // STRATA
    return [order[stratum * size + size // 2] for stratum in range(STRATA)]


# One run


@dataclass(frozen=True)
class Task:
    strategy: str
    seed: int
    seconds: float
    fails: bool


class Watch:
    """Counts what ends in the parameters, and takes them at one moment."""

    def __init__(self) -> None:
        self.samples = 0
        self.undone = 0
        self.restarts = 0
        self.updates = 0
        self.messages = 0
        self.without_all = 0
        self.windows = 0
        self.windows_that_ended = 0
        self.values: Tensor | None = None
        self._live: set[int] = set()

    def before(self, simulation: Simulation, rank: int, event: Event) -> None:
        if self.values is None and simulation.now >= SECONDS:
            self.take(simulation)

    def take(self, simulation: Simulation) -> None:
        values = simulation.processes[0].node.state()["parameters"]
        assert isinstance(values, Tensor)
        self.values = values

    def after(self, simulation: Simulation, rank: int, event: Event, actions: list[Action]) -> None:
        grace = [action for action in actions if isinstance(action, SetTimer) and action.name.startswith("grace")]
        self.windows += len(grace)
        if isinstance(event, TimerFired) and event.name.startswith("grace"):
            self.windows_that_ended += any(isinstance(action, Report) for action in actions)

    def write(self, record: Record) -> None:
        if isinstance(record, Update):
            self.samples = record.samples_total
            self.updates += 1
            self.messages += record.messages
            self.without_all += record.messages < len(self._live)
        elif isinstance(record, Undone):
            self.samples = record.samples_total
            self.undone += record.samples
            self.restarts += 1
        elif isinstance(record, Membership) and record.rank == 0:
            (self._live.add if record.joined else self._live.discard)(record.peer)


def one_run(task: Task) -> dict[str, Any]:
    """In virtual time, as a row."""
    torch.set_num_threads(1)
    built = ob.workloads.DigitsLogistic().build()
    workload = dataclasses.replace(built, test=built.train)
    strategy = STRATEGIES[task.strategy]
    factors = speeds() if task.strategy == DECOUPLED else ()
    faults = crashes(task.seed, task.seconds) if task.fails else ()
    cluster = ob.Cluster(
        seconds_per_sample=STEP_SECONDS / BATCH, factors=factors, faults=faults, crash_seen_seconds=0.0
    )
    watch = Watch()
    until = ob.Seconds(task.seconds)
    experiment = ob.Experiment(
        workload,
        strategy.with_default_optimizer(built.optimizer),
        cluster=cluster,
        workers=WORKERS,
        until=until,
        seed=task.seed,
        evaluate=None,
    )
    simulation = Simulation(experiment, watch, observer=watch)
    outcome = simulation.run()
    assert outcome.failure is None, outcome.failure
    if watch.values is None:
        watch.take(simulation)
    assert watch.values is not None
    loss = simulation.gradient_computer.evaluate(watch.values, ()).loss
    rate = sum(1.0 / factor for factor in factors or [1.0] * WORKERS) * BATCH / STEP_SECONDS
    return {
        **dataclasses.asdict(task),
        "failures": len(faults),
        "goodput": round(watch.samples / (rate * task.seconds), 4),
        "loss": float(f"{loss:.5g}"),
        "updates": watch.updates,
        **(_restarts(watch, task) if task.strategy == RESTART else {}),
        **(_merges(watch) if isinstance(strategy, DecoupledDiLoCo) else {}),
    }


def speeds() -> tuple[float, ...]:
    """From faster to slower, in equal steps."""
    return tuple(1.0 - SPREAD + 2.0 * SPREAD * worker / (WORKERS - 1) for worker in range(WORKERS))


def _restarts(watch: Watch, task: Task) -> dict[str, Any]:
    return {
        "arithmetic": round(arithmetic(task.seed, task.seconds), 4),
        "restarts": watch.restarts,
        "samples_undone": watch.undone,
    }


def _merges(watch: Watch) -> dict[str, Any]:
    strategy = STRATEGIES[DECOUPLED]
    assert isinstance(strategy, DecoupledDiLoCo)
    return {
        "fragments": strategy.fragments,
        "merges_without_all": watch.without_all,
        "messages_per_merge": round(watch.messages / max(1, watch.updates), 1),
        "grace_windows": watch.windows,
        "grace_windows_that_ended": watch.windows_that_ended,
    }


# All runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many runs are made at a time")
    arguments = parser.parse_args()
    rows = measured(arguments.processes)
    figures = {
        "goodput": {name: round(mean_of(rows, name, "goodput"), 4) for name in STRATEGIES},
        "loss_over_fault_free": {name: round(loss_ratio(rows, name), 4) for name in STRATEGIES},
    }
    if arguments.json:
        print(json.dumps({**figures, "restart_expected": expected(), "rows": rows}))
    else:
        show(figures, rows)


def measured(processes: int) -> list[dict[str, Any]]:
    tasks = [Task(name, seed, SECONDS, fails) for name in SEEDS for seed in SEEDS[name] for fails in (True, False)]
    tasks += [Task(RESTART, seed, RESTART_SECONDS, True) for seed in chosen_seeds()]
    console = Console(stderr=True)
    with (
        ProcessPoolExecutor(processes) as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        return list(progress.track(pool.map(one_run, tasks), total=len(tasks), description="simulating"))


def runs_of(rows: Sequence[dict[str, Any]], strategy: str, fails: bool) -> list[dict[str, Any]]:
    return [row for row in rows if row["strategy"] == strategy and row["fails"] == fails]


def mean_of(rows: Sequence[dict[str, Any]], strategy: str, what: str, fails: bool = True) -> float:
    return statistics.fmean(row[what] for row in runs_of(rows, strategy, fails))


def loss_ratio(rows: Sequence[dict[str, Any]], strategy: str) -> float:
    undisturbed = FMB if strategy == RESTART else strategy
    return mean_of(rows, strategy, "loss") / mean_of(rows, undisturbed, "loss", fails=False)


# The table


def show(figures: dict[str, dict[str, float]], rows: Sequence[dict[str, Any]]) -> None:
    console = Console()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for head in ("", "seed", "failures", "seconds", "goodput", "loss", ""):
        table.add_column(head, justify="right" if head else "left")
    for row in rows:
        table.add_row(
            row["strategy"],
            str(row["seed"]),
            f"{row['failures']:,}",
            f"{row['seconds']:,.0f}",
            f"{row['goodput']:.3f}",
            f"{row['loss']:.4f}",
            said_of(row),
        )
    console.print(table)
    for name in STRATEGIES:
        goodput, loss = figures["goodput"][name], figures["loss_over_fault_free"][name]
        console.print(f"{name}: goodput {goodput:.3f}, loss {loss:.3f} of that without failures")
    console.print(
        "restart should keep {formula:.3f} by the formula, {long_runs:.3f} by arithmetic in long runs, "
        "and {runs_like_these:.3f} in runs as short as these".format(**expected())
    )


def said_of(row: dict[str, Any]) -> str:
    if row["strategy"] == RESTART:
        return f"{row['restarts']} restarts; by arithmetic {row['arithmetic']:.3f}"
    if row["strategy"] == DECOUPLED:
        return (
            f"{row['updates']} merges of {row['messages_per_merge']:.0f} messages, {row['merges_without_all']} without "
            f"all learners, {row['grace_windows_that_ended']} at the end of a grace window"
        )
    return f"{row['updates']} updates"


if __name__ == "__main__":
    main()
