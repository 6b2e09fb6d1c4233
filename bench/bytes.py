"""How many fewer bytes local steps and compression need than synchronous mini-batches do, at equal loss.

    python bench/bytes.py [--json] [--quick] [--workloads NAME ...] [--processes N]

Eight workers and a hub in virtual time train logistic regression, an MLP and a CNN on the digits. The *objective* is
what their optimizers minimise: the mean loss over all training data plus ½ · 0.001 · ‖x‖². The *target* is 1.02 times
the lowest objective of the best fixed mini-batch (FMB), seed by seed.

Three settings are chosen on seeds 0 to 2: the FMB with the lowest objective, which sets the target; the FMB that gets
there in the fewest updates; and of everything else the one that gets there with the fewest bytes, and of several with
as many the one that is lowest then. They then run on seeds 3 to 7, and only those are reported:
`fewer_bytes_at_equal_loss` is bytes of the fewest updates over bytes of the chosen one, `samples_factor` is its samples
over theirs, each the mean over seeds, and `merges` are the updates that the chosen one took, seed by seed. With
one merge, the factor is that of one-shot averaging, of models that were trained alone, and not of DiLoCo.

Bytes are those of the messages that were sent by when the target was reached, in both directions and by all ranks:
headers and the parameters that each worker starts from included. FMB is evaluated every few
updates, and what lies between is interpolated; the others count up to the end of the merge that gets there.

`rows` has all settings that were tried, the bad ones too. One that misses the target on a seed cannot be chosen, and is
not run on further seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

import offbeat as ob
from offbeat.core.actions import Record
from offbeat.core.configuration import to_plain
from offbeat.core.workload import Measured
from offbeat.records.schema import Evaluation, Traffic
from offbeat.simulation.simulator import Simulation
from offbeat.strategies.local_steps.local_steps_strategies import DecoupledDiLoCo, DiLoCo, LocalSGD

WORKERS = 8
DECAY = 1e-3
"""Weight decay, added to the gradient, so that it belongs to the objective whatever the optimizer."""
CLOSE = 1.02
"""Times the lowest objective of the best FMB: the target."""
TUNING = (0, 1, 2)
"""Seeds on which settings are chosen."""
REPORTING = (3, 4, 5, 6, 7)
"""Seeds that are reported."""
JOINING = ("Welcome", "Begin")
"""Messages that a rank gets when it joins: all parameters, in full precision."""
PLAIN, USUAL, PUBLISHED = ob.SGD(lr=1.0), ob.SGD(lr=0.7, momentum=0.5, nesterov=True), ob.SGD(0.7, 0.9, True)
"""Outer optimizers: the mean itself; what suits few rounds; what was published, for many."""

INT8 = ob.compression.Int8()
OTHER_COMPRESSIONS = (None, ob.compression.BFloat16(), ob.compression.TopK(0.1))
"""What is tried beside one byte per element."""

LOGISTIC, MLP, CNN = "logistic", "mlp", "cnn"
NAMED: dict[str, ob.workloads.NamedWorkload] = {
    LOGISTIC: ob.workloads.DigitsLogistic(),
    MLP: ob.workloads.Digits(),
    CNN: ob.workloads.DigitsCNN(width=8),
}


class Regularised(ob.Workload):
    """Its loss is the objective: on all training data, with the regulariser."""

    def evaluate(self, model: nn.Module) -> Measured:
        measured = super().evaluate(model)
        squares = sum(float(parameter.detach().double().square().sum()) for parameter in model.parameters())
        return measured._replace(loss=measured.loss + 0.5 * DECAY * squares)


def regularised(name: str) -> ob.Workload:
    built = NAMED[name].build()
    values = {item.name: getattr(built, item.name) for item in dataclasses.fields(built)}
    return Regularised(**{**values, "test": built.train})


# What is tried


@dataclass(frozen=True)
class Case:
    """One setting on one workload, and for how many updates it may run."""

    workload: str
    strategy: ob.Strategy
    updates: int
    evaluate: int = 1
    """Updates from one evaluation to the next."""

    @property
    def is_baseline(self) -> bool:
        return isinstance(self.strategy, ob.FixedMinibatch) and self.strategy.compression is None

    @property
    def samples(self) -> int:
        """All samples of so many updates; a fragment of the parameters is merged, not all, where there are several."""
        strategy: Any = self.strategy
        steps: float = getattr(strategy, "every", 1) / getattr(strategy, "fragments", 1)
        batch: int = strategy.batch
        return math.ceil(self.updates * steps * WORKERS * batch)


def sgd(lr: float | ob.schedules.Schedule) -> ob.SGD:
    return ob.SGD(lr=lr, momentum=0.9, nesterov=True, weight_decay=DECAY)


def adam(lr: float | ob.schedules.Schedule) -> ob.Adam:
    return ob.Adam(lr=lr, weight_decay=DECAY)


def fmb(
    workload: str,
    batch: int,
    optimizer: ob.nodes.Optimizer,
    updates: int,
    compression: ob.compression.Compression | None = None,
) -> Case:
    strategy = ob.FixedMinibatch(batch=batch, microbatch=batch, optimizer=optimizer, compression=compression)
    return Case(workload, strategy, updates, evaluate=max(1, updates // 200))


def falling(lr: float, updates: int, batch: int) -> ob.schedules.Linear:
    """On a straight line to nothing, where FMB ends."""
    return ob.schedules.Linear(lr, 0.0, updates * batch * WORKERS)


def diloco(
    workload: str,
    every: int,
    batch: int,
    inner: ob.nodes.Optimizer,
    updates: int,
    outer: ob.nodes.Optimizer = USUAL,
    compression: ob.compression.Compression | None = INT8,
) -> Case:
    strategy = DiLoCo(every=every, batch=batch, microbatch=batch, inner=inner, outer=outer, compression=compression)
    return Case(workload, strategy, updates)


def local_sgd(workload: str, every: int, batch: int, optimizer: ob.nodes.Optimizer, updates: int) -> Case:
    strategy = LocalSGD(every=every, batch=batch, microbatch=batch, optimizer=optimizer, compression=INT8)
    return Case(workload, strategy, updates)


def decoupled(workload: str, every: int, batch: int, inner: ob.nodes.Optimizer, rounds: int) -> Case:
    strategy = DecoupledDiLoCo(every=every, batch=batch, microbatch=batch, inner=inner, outer=USUAL, compression=INT8)
    return Case(workload, strategy, rounds * strategy.fragments)


def cases(workload: str) -> list[Case]:
    return {LOGISTIC: logistic_cases, MLP: mlp_cases, CNN: cnn_cases}[workload]()


def quick_cases() -> list[Case]:
    name = LOGISTIC
    return [
        fmb(name, 32, sgd(1.5), 120),
        fmb(name, 32, sgd(0.5), 120),
        diloco(name, 50, 32, sgd(0.5), 6),
        diloco(name, 200, 32, sgd(0.5), 2, outer=PLAIN),
    ]


def logistic_cases() -> list[Case]:
    name, long = LOGISTIC, 300
    return [
        *(fmb(name, batch, sgd(lr), long) for batch in (32, 128) for lr in (0.5, 1.0, 1.5, 2.0)),
        *(fmb(name, batch, adam(lr), long) for batch in (32, 128) for lr in (0.05, 0.1)),
        fmb(name, 128, sgd(falling(1.5, long, 128)), long),
        fmb(name, 32, sgd(1.5), long, INT8),
        fmb(name, 32, sgd(1.5), long, ob.compression.TopK(0.01)),
        *(diloco(name, every, 32, sgd(0.5), 800 // every) for every in (25, 50, 100, 200, 400)),
        *(diloco(name, every, 32, sgd(0.5), 800 // every, outer=PLAIN) for every in (25, 50, 100, 200, 400)),
        *(diloco(name, 200, batch, sgd(lr), 4, outer=PLAIN) for batch in (32, 64) for lr in (0.3, 1.0)),
        diloco(name, 100, 64, sgd(1.0), 8, outer=PLAIN),
        diloco(name, 100, 32, sgd(0.5), 8, outer=PUBLISHED),
        *(diloco(name, 100, 32, adam(lr), 8) for lr in (0.02, 0.05)),
        *(diloco(name, 200, 32, sgd(0.5), 4, outer=PLAIN, compression=c) for c in OTHER_COMPRESSIONS),
        local_sgd(name, 200, 32, sgd(0.5), 4),
        decoupled(name, 100, 32, sgd(0.5), 8),
    ]


def mlp_cases() -> list[Case]:
    name, long = MLP, 600
    return [
        *(fmb(name, batch, adam(lr), long) for batch in (32, 128) for lr in (0.01, 0.03)),
        fmb(name, 128, adam(falling(0.03, long, 128)), long),
        *(fmb(name, 128, sgd(lr), long) for lr in (0.2, 0.4)),
        fmb(name, 128, adam(0.03), long, INT8),
        diloco(name, 100, 32, sgd(0.2), 12),
        *(diloco(name, every, 64, sgd(0.3), 2400 // every) for every in (50, 100, 200)),
        *(diloco(name, every, 64, sgd(0.3), 2400 // every, outer=PLAIN) for every in (100, 200, 400)),
        diloco(name, 100, 64, sgd(0.3), 12, outer=PUBLISHED),
        diloco(name, 100, 64, adam(0.01), 12),
        *(diloco(name, 200, 64, sgd(0.3), 6, outer=PLAIN, compression=c) for c in OTHER_COMPRESSIONS),
        local_sgd(name, 200, 64, sgd(0.4), 6),
        decoupled(name, 100, 64, sgd(0.3), 12),
    ]


def cnn_cases() -> list[Case]:
    name, long = CNN, 400
    slower = adam(ob.schedules.Linear(0.02, 0.002, 1600 * 64 * WORKERS))
    return [
        *(fmb(name, 64, adam(lr), long) for lr in (0.01, 0.02)),
        fmb(name, 64, adam(falling(0.03, long, 64)), long),
        fmb(name, 64, sgd(0.1), long),
        diloco(name, 100, 32, sgd(0.1), 16),
        *(diloco(name, every, 64, slower, 2000 // every, outer=PLAIN) for every in (100, 200, 400)),
        diloco(name, 200, 64, slower, 10),
        diloco(name, 200, 64, slower, 10, outer=PLAIN, compression=None),
    ]


# One run


@dataclass(frozen=True)
class Task:
    case: Case
    seed: int
    target: float | None
    """Where to stop; None: at the end."""


@dataclass(frozen=True)
class Point:
    """How far a run had come."""

    updates: float
    nbytes: float
    """All that were sent."""
    joining: float
    """Of these, what ranks got when they joined."""
    samples: float
    objective: float

    @property
    def exchanged(self) -> float:
        return self.nbytes - self.joining


@dataclass(frozen=True)
class Found:
    """What one run has shown: its objective over time, and where it first was at its target."""

    task: Task
    points: tuple[Point, ...]

    @property
    def lowest(self) -> float:
        return min(point.objective for point in self.points)

    def at(self, target: float) -> Point | None:
        """Where the target was reached; between two evaluations of FMB by a straight line."""
        after = next((place for place, point in enumerate(self.points) if point.objective <= target), None)
        if after is None:
            return None
        if after == 0 or not self.task.case.is_baseline:
            return self.points[after]
        first, second = self.points[after - 1], self.points[after]
        share = (first.objective - target) / (first.objective - second.objective)
        both = zip(dataclasses.astuple(first), dataclasses.astuple(second), strict=True)
        return Point(*(old + share * (new - old) for old, new in both))


class EnoughError(Exception):
    """There is nothing more to see in this run."""


class Watch:
    """Keeps the objective and the bytes of each evaluation, and ends the run where the target is reached."""

    def __init__(self, target: float | None) -> None:
        self.points: list[Point] = []
        self._target = target
        self._nbytes = 0
        self._joining = 0

    def write(self, record: Record) -> None:
        if isinstance(record, Traffic):
            self._nbytes = sum(flow.bytes for flow in record.sent.values())
            self._joining = sum(flow.bytes for kind, flow in record.sent.items() if kind in JOINING)
        elif isinstance(record, Evaluation):
            objective = math.inf if record.loss is None or math.isnan(record.loss) else record.loss
            self.points.append(Point(record.version, self._nbytes, self._joining, record.samples_total, objective))
            if math.isinf(objective) or (self._target is not None and objective <= self._target):
                raise EnoughError


def one_run(task: Task) -> Found:
    """In virtual time; how long anything takes does not matter here."""
    torch.set_num_threads(1)
    case, watch = task.case, Watch(task.target)
    experiment = ob.Experiment(
        strategy=case.strategy,
        workload=regularised(case.workload),
        cluster=ob.Cluster(),
        workers=WORKERS,
        until=ob.Samples(case.samples),
        seed=task.seed,
        evaluate=ob.EveryUpdates(case.evaluate),
    )
    try:
        outcome = Simulation(experiment, watch).run()
    except EnoughError:
        return Found(task, tuple(watch.points))
    assert outcome.failure is None or "not finite" in outcome.failure, outcome.failure
    return Found(task, tuple(watch.points))


# All runs


@dataclass
class Chosen:
    """What was chosen for one workload."""

    best: Case
    fewest: Case
    fewest_bytes: Case | None = None


@dataclass
class Study:
    """All that has been run, and what was chosen from it on the tuning seeds."""

    cases: list[Case]
    tuning: tuple[int, ...]
    reporting: tuple[int, ...]
    found: dict[tuple[Case, int], Found] = field(default_factory=dict)
    chosen: dict[str, Chosen] = field(default_factory=dict)

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(case.workload for case in self.cases))

    def of(self, workload: str, *, baselines: bool) -> list[Case]:
        return [case for case in self.cases if case.workload == workload and case.is_baseline is baselines]

    def target(self, workload: str, seed: int) -> float:
        return CLOSE * self.found[self.chosen[workload].best, seed].lowest

    def reached(self, case: Case, seed: int) -> Point | None:
        """Where this case was at the target of this seed; None where it never was, or has not been run."""
        found = self.found.get((case, seed))
        return None if found is None else found.at(self.target(case.workload, seed))

    def all_reached(self, case: Case, seeds: Iterable[int]) -> list[Point] | None:
        points = [self.reached(case, seed) for seed in seeds]
        return None if None in points else [point for point in points if point is not None]

    # What to run, stage by stage

    def tune_baselines(self) -> list[Task]:
        return [Task(case, seed, None) for case in self.cases if case.is_baseline for seed in self.tuning]

    def choose_baselines(self) -> None:
        for workload in self.workloads:
            mine = self.of(workload, baselines=True)
            best = min(mine, key=lambda case: statistics.fmean(self.found[case, s].lowest for s in self.tuning))
            self.chosen[workload] = Chosen(best, best)
            there = [(points, case) for case in mine if (points := self.all_reached(case, self.tuning))]
            _, self.chosen[workload].fewest = min(
                there, key=lambda entry: statistics.fmean(point.updates for point in entry[0])
            )

    def report_targets(self) -> list[Task]:
        return [Task(self.chosen[w].best, seed, None) for w in self.workloads for seed in self.reporting]

    def tune_others(self, seeds: Sequence[int], after: Sequence[int] = ()) -> list[Task]:
        """Everything but plain FMB on these seeds, if it has reached the target on all of `after`."""
        return [
            Task(case, seed, self.target(case.workload, seed))
            for case in self.cases
            if not case.is_baseline and self.all_reached(case, after) is not None
            for seed in seeds
        ]

    def choose_others(self) -> None:
        for workload in self.workloads:
            there = [
                (points, case)
                for case in self.of(workload, baselines=False)
                if (points := self.all_reached(case, self.tuning))
            ]
            if there:
                _, self.chosen[workload].fewest_bytes = min(there, key=lambda entry: _cost(entry[0]))

    def report_chosen(self) -> list[Task]:
        return [
            Task(case, seed, self.target(workload, seed))
            for workload in self.workloads
            for case in (self.chosen[workload].fewest, self.chosen[workload].fewest_bytes)
            if case is not None
            for seed in self.reporting
            if (case, seed) not in self.found
        ]

    # What came out

    def factors(self, case: Case, seeds: Iterable[int]) -> dict[str, Any] | None:
        """Means over seeds of what it took, and against the fewest updates of FMB; None where it missed a seed."""
        mine = self.all_reached(case, seeds)
        theirs = self.all_reached(self.chosen[case.workload].fewest, seeds)
        if not mine or not theirs:
            return None
        pairs = list(zip(mine, theirs, strict=True))
        return {
            "updates": _mean(point.updates for point in mine),
            "updates_by_seed": [_digits(point.updates) for point in mine],
            "bytes": _mean(point.nbytes for point in mine),
            "samples": _mean(point.samples for point in mine),
            "fewer_bytes": _mean(other.nbytes / point.nbytes for point, other in pairs),
            "fewer_bytes_by_seed": [_digits(other.nbytes / point.nbytes) for point, other in pairs],
            "fewer_bytes_after_joining": _mean(other.exchanged / point.exchanged for point, other in pairs),
            "samples_factor": _mean(point.samples / other.samples for point, other in pairs),
        }


def _cost(points: Sequence[Point]) -> tuple[float, float]:
    """Bytes, and where these are the same, the objective that they were spent for: who has some to spare is surer."""
    return statistics.fmean(point.nbytes for point in points), statistics.fmean(point.objective for point in points)


def _mean(values: Iterable[float]) -> float:
    return _digits(statistics.fmean(values))


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="a few settings of logistic regression, one seed each")
    parser.add_argument("--workloads", nargs="+", choices=list(NAMED), default=list(NAMED), help="which workloads")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many runs are made at a time")
    arguments = parser.parse_args()
    if arguments.quick:
        study = Study(quick_cases(), TUNING[:1], REPORTING[:1])
    else:
        study = Study([case for name in arguments.workloads for case in cases(name)], TUNING, REPORTING)
    with ProcessPoolExecutor(arguments.processes) as pool:
        conduct(study, pool)
    rows = [row_of(study, case) for case in study.cases]
    keys = {
        "fewer_bytes_at_equal_loss": "fewer_bytes",
        "samples_factor": "samples_factor",
        "merges": "updates_by_seed",
    }
    figures = {
        name: {workload: reported(study, workload, key) for workload in study.workloads} for name, key in keys.items()
    }
    if arguments.json:
        print(json.dumps({**figures, "rows": rows}))
    else:
        show(figures, rows)


def conduct(study: Study, pool: Executor) -> None:
    """Run everything, and choose in between."""
    first, others = study.tuning[:1], study.tuning[1:]
    carry_out(study, pool, study.tune_baselines(), "FMB on the tuning seeds")
    study.choose_baselines()
    carry_out(study, pool, [*study.tune_others(first), *study.report_targets()], "the others on the first tuning seed")
    carry_out(study, pool, study.tune_others(others, after=first), "the others on further tuning seeds")
    study.choose_others()
    carry_out(study, pool, study.report_chosen(), "what was chosen, on the reported seeds")


def carry_out(study: Study, pool: Executor, tasks: Sequence[Task], what: str) -> None:
    # The longest first, so that no process is left alone with one of them at the end.
    order = sorted(tasks, key=lambda task: (task.case.workload == CNN, task.case.samples), reverse=True)
    with progress(what, len(order)) as advance:
        for found in pool.map(one_run, order):
            study.found[found.task.case, found.task.seed] = found
            advance()


@contextmanager
def progress(what: str, total: int) -> Iterator[Any]:
    """A bar on a terminal's stderr, a line elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{total} runs: {what}", highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def reported(study: Study, workload: str, key: str) -> Any:
    """None where nothing could be chosen, or what was chosen missed the target on a reported seed."""
    case = study.chosen[workload].fewest_bytes
    over = None if case is None else study.factors(case, study.reporting)
    return None if over is None else over[key]


def row_of(study: Study, case: Case) -> dict[str, Any]:
    """One setting: how it did on the tuning seeds, and on the others, where it was chosen."""
    chosen = study.chosen[case.workload]
    roles = {"best FMB": chosen.best, "fewest updates": chosen.fewest, "fewest bytes": chosen.fewest_bytes}
    ran = {seed: found for (other, seed), found in study.found.items() if other == case}
    over = {seeds: study.factors(case, seeds) for seeds in (study.tuning, study.reporting)}
    return {
        "workload": case.workload,
        "algorithm": case.strategy.name,
        "settings": settings(case),
        "chosen_for": [role for role, other in roles.items() if other == case],
        "lowest_objective": {seed: _digits(found.lowest) for seed, found in sorted(ran.items())},
        "missed_on_seeds": [seed for seed in sorted(ran) if study.reached(case, seed) is None],
        "tuning": over[study.tuning],
        "reporting": over[study.reporting],
        "strategy": to_plain(case.strategy),
    }


def settings(case: Case) -> str:
    """What tells a case from the others, in one line."""
    strategy: Any = case.strategy
    parts = [f"batch {strategy.batch}"]
    if hasattr(strategy, "every"):
        parts.insert(0, f"every {strategy.every}")
    parts.append(stepping(getattr(strategy, "inner", None) or strategy.optimizer))
    if isinstance(strategy, DiLoCo | DecoupledDiLoCo):
        parts.append(f"outer {strategy.outer.lr:g}, {strategy.outer.momentum:g}")  # type: ignore[attr-defined]
    if strategy.compression is not None:
        share = f" {strategy.compression.share:g}" if isinstance(strategy.compression, ob.compression.TopK) else ""
        parts.append(f"{strategy.compression.name}{share}")
    return "; ".join(parts)


def stepping(optimizer: Any) -> str:
    rate = optimizer.lr
    return (
        f"{optimizer.name} {rate.start:g} falling"
        if isinstance(rate, ob.schedules.Linear)
        else f"{optimizer.name} {rate:g}"
    )


# The table


def show(figures: dict[str, dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
    console = Console()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, title="To 1.02 × the best objective", title_justify="left")
    for head in ("", "", "", "updates", "kB", "fewer bytes", "samples"):
        table.add_column(head, justify="right" if head else "left", no_wrap=bool(head))
    for row in rows:
        for seeds in ("tuning", "reporting"):
            if seeds == "tuning" or row["reporting"] is not None:
                table.add_row(*cells(row, seeds))
    console.print(table)
    for workload, fewer in figures["fewer_bytes_at_equal_loss"].items():
        if fewer is None:
            console.print(f"{workload}: the target was missed")
            continue
        merges = ", ".join(f"{count:g}" for count in figures["merges"][workload])
        factor = figures["samples_factor"][workload]
        console.print(f"{workload}: {fewer:.0f} times fewer bytes, {factor:.1f} times the samples, merges: {merges}")


def cells(row: dict[str, Any], seeds: str) -> list[str]:
    name = f"{row['algorithm']}: {row['settings']}" if seeds == "tuning" else f"  on fresh seeds: {roles(row)}"
    over = row[seeds]
    if over is None:
        lowest = min(row["lowest_objective"].values())
        return [row["workload"], name, f"missed, at {lowest:.4f}", "", "", "", ""]
    return [
        row["workload"],
        name,
        "",
        f"{over['updates']:.4g}",
        f"{over['bytes'] / 1e3:.4g}",
        f"{over['fewer_bytes']:.3g}",
        f"{over['samples_factor']:.2g}",
    ]


def roles(row: dict[str, Any]) -> str:
    return ", ".join(row["chosen_for"])


if __name__ == "__main__":
    main()
