"""How many bytes a language model needs to the same bits per byte: synchronous mini-batches against local steps.

    python bench/text_bytes.py [--json] [--tune] [--processes N] [--seeds S ...] [--keep FILE]

Eight workers and a hub in virtual time train the byte-level transformer of the workload `shakespeare`, at half its
default width so that a run takes minutes, each with batches of 16 windows, until `TARGET` bits per byte or `UNTIL`
samples. `every` of the strategies with local steps is `USUAL`; with `--tune` the one that reaches the target with the
fewest bytes on seed 0, and only other seeds are reported: the mean over seeds and its 95% interval, by Student's t.
Bytes are those of all messages, in both directions and by all ranks, by the time of the first evaluation that reached
the target. A setting that misses it on a seed is shown with what it reached. All runs take about an hour of two cores;
with `--keep`, the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import scipy.stats
import torch
from rich import box
from rich.console import Console
from rich.table import Table

import offbeat as ob
from offbeat.core.actions import Record
from offbeat.records.schema import Evaluation, Traffic
from offbeat.simulation.simulator import Simulation

WORKERS, BATCH, UNTIL = 8, 16, 240_000
"""DiLoCo needs more windows than fmb, so the limit is far beyond what fmb needs."""
WIDTH = 64
TARGET = ob.Target("loss", 2.8)
EVALUATE = 16
"""Steps of every worker from one evaluation to the next, about."""
TUNING_SEED, SEEDS = 0, (1, 2, 3)
CHOICES = {"local-sgd": (10, 20, 40), "diloco": (25, 50, 100), "decoupled-diloco": (24, 48)}
"""strategy → values of `every` that are tried"""
USUAL = {"local-sgd": 20, "diloco": 50, "decoupled-diloco": 24}
"""strategy → `every` where nothing is tried"""


@dataclass(frozen=True)
class Case:
    strategy: str
    every: int
    compressed: bool
    seed: int

    def build(self) -> ob.Strategy:
        compression = ob.compression.Int8() if self.compressed else None
        size = {"batch": BATCH, "microbatch": BATCH, "compression": compression}
        if self.strategy == "fmb":
            return ob.FixedMinibatch(**size)
        kinds = {"local-sgd": ob.LocalSGD, "diloco": ob.DiLoCo, "decoupled-diloco": ob.DecoupledDiLoCo}
        return kinds[self.strategy](every=self.every, **size)


@dataclass(frozen=True)
class Outcome:
    case: Case
    bytes_to_target: float | None
    samples_to_target: float | None
    bits_per_byte: float
    """The lowest of all evaluations."""


class EnoughError(Exception):
    """The target is reached."""


class Watch:
    """Keeps what an evaluation has shown, and ends the run where the target is reached."""

    def __init__(self, target: ob.Target) -> None:
        self.lowest = math.inf
        self.reached: tuple[float, int] | None = None
        """Bytes and samples at the target."""
        self._target = target
        self._sent: dict[int, int] = {}

    def write(self, record: Record) -> None:
        if isinstance(record, Traffic):
            self._sent[record.rank] = sum(flow.bytes for flow in record.sent.values())
        elif isinstance(record, Evaluation):
            self.lowest = min(self.lowest, record.loss)
            if self._target.reached(record.loss, record.accuracy):
                self.reached = float(sum(self._sent.values())), record.samples_total
                raise EnoughError


def run(case: Case) -> Outcome:
    torch.set_num_threads(1)
    steps = 1 if case.strategy == "fmb" else case.every / (4 if case.strategy == "decoupled-diloco" else 1)
    workload = ob.workloads.Shakespeare(width=WIDTH).build()
    watch = Watch(TARGET)
    experiment = ob.Experiment(
        strategy=case.build().with_default_optimizer(workload.optimizer),
        workload=workload,
        cluster=ob.Cluster(),
        workers=WORKERS,
        until=ob.Samples(UNTIL),
        seed=case.seed,
        evaluate=ob.EveryUpdates(max(1, round(EVALUATE / steps))),
    )
    with contextlib.suppress(EnoughError):
        Simulation(experiment, watch).run()
    return Outcome(case, *(watch.reached or (None, None)), watch.lowest)


def run_all(pool: ProcessPoolExecutor, cases: Sequence[Case], keep: Path | None) -> list[Outcome]:
    """Run these cases, those of later strategies first, since they take longer; `keep` has what was run before."""
    outcomes = kept(keep)
    running = [pool.submit(run, case) for case in reversed(cases) if case not in outcomes]
    for future in as_completed(running):
        outcome = future.result()
        outcomes[outcome.case] = outcome
        print(outcome, file=sys.stderr, flush=True)
        if keep is not None:
            with keep.open("a") as lines:
                lines.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
    return [outcomes[case] for case in cases]


def kept(path: Path | None) -> dict[Case, Outcome]:
    if path is None or not path.exists():
        return {}
    plain = [json.loads(line) for line in path.read_text().splitlines()]
    outcomes = [Outcome(Case(**one.pop("case")), **one) for one in plain]
    return {outcome.case: outcome for outcome in outcomes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print all runs as JSON")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tune", action="store_true", help="choose `every` on seed 0 first")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="seeds that are reported")
    parser.add_argument("--keep", type=Path, help="keep the outcomes of runs in this file, and do not repeat them")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as pool:
        tuning = [Case(name, every, False, TUNING_SEED) for name, values in CHOICES.items() for every in values]
        tried = run_all(pool, tuning, options.keep) if options.tune else []
        chosen = (
            {name: _best([one for one in tried if one.case.strategy == name]) for name in CHOICES} if tried else USUAL
        )
        rows = [("fmb", 1, False), ("local-sgd", chosen["local-sgd"], False), ("diloco", chosen["diloco"], False)]
        rows += [("diloco", chosen["diloco"], True), ("decoupled-diloco", chosen["decoupled-diloco"], False)]
        outcomes = run_all(pool, [Case(*row, seed) for row in rows for seed in options.seeds], options.keep)
    if options.json:
        print(json.dumps([dataclasses.asdict(outcome) for outcome in (*tried, *outcomes)]))
    else:
        if tried:
            Console().print(_table(tried, "tried on seed 0"))
        Console().print(_table(outcomes, f"seeds {', '.join(map(str, options.seeds))}"))


def _best(outcomes: list[Outcome]) -> int:
    """The value of `every` with the fewest bytes; the smallest one if none has reached the target."""
    reached = [one for one in outcomes if one.bytes_to_target is not None]
    if not reached:
        return min(one.case.every for one in outcomes)
    return min(reached, key=lambda one: one.bytes_to_target or 0.0).case.every


def _table(outcomes: list[Outcome], title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE)
    for column in ("strategy", "every", "MB to the target", "samples to it", "fewer bytes", "lowest bits per byte"):
        table.add_column(column)
    groups: dict[tuple[str, int, bool], list[Outcome]] = {}
    for outcome in outcomes:
        case = outcome.case
        groups.setdefault((case.strategy, case.every, case.compressed), []).append(outcome)
    baseline = next((group for (name, *_), group in groups.items() if name == "fmb"), None)
    base = None if baseline is None else [one.bytes_to_target for one in baseline]
    for (name, every, compressed), group in groups.items():
        sent = [one.bytes_to_target for one in group]
        fewer = [] if base is None else [b / s for b, s in zip(base, sent, strict=True) if b and s]
        table.add_row(
            name + ("+int8" if compressed else ""),
            str(every),
            _interval([value / 1e6 for value in sent if value is not None], len(group)),
            _interval([one.samples_to_target for one in group if one.samples_to_target is not None], len(group)),
            _interval(fewer, len(group)) if base else "",
            _interval([one.bits_per_byte for one in group], len(group), 3),
        )
    return table


def _interval(values: list[float], expected: int, digits: int = 1) -> str:
    """Mean and 95% interval, or how many runs have a value."""
    if len(values) < expected:
        return f"{len(values)} of {expected} runs"
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.{digits}f} ({mean - half:.{digits}f} to {mean + half:.{digits}f})"


if __name__ == "__main__":
    main()
