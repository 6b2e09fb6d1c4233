"""Whether a stopped worker delays the other one.

    python bench/faults.py [--json] [--repeats N] [--seconds S]

Two workers train the CNN of `cifar_shaped.py`; in mid-run the second is stopped by SIGSTOP, and later continued. What
is measured is the *other* worker alone: its samples that went into updates, per second, while the second stands still,
over the same before. When the stop was is read from the records: the longest time without an update that has samples of
the stopped worker in it. Half a second at each end of both stretches is left out, and a stretch is measured from its
first update with samples of the other worker to its last.

On fewer cores than processes a stopped worker leaves its share of the processor to the others, so the share can be well
above 1. A synchronous strategy falls to almost 0 until the silent worker is declared lost. Median over repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from itertools import pairwise

from rich import box
from rich.console import Console
from rich.table import Table

import offbeat as ob
from cifar_shaped import BATCH, Step, Trace, prepare, workload

REPEATS = 3
SECONDS = 4.0
EDGE_SECONDS = 0.5
OTHER, STOPPED = 1, 2

STRATEGIES: dict[str, ob.Strategy] = {
    "async-fmb": ob.AsyncFixed(batch=BATCH, microbatch=BATCH, messages=1),
    "async-timed": ob.AsyncTimed(worker_seconds=0.15, hub_seconds=0.15, microbatch=BATCH),
}


@dataclass(frozen=True)
class Rates:
    """Applied samples per second of the worker that goes on."""

    before: float
    during: float

    @property
    def share(self) -> float:
        return self.during / self.before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="how often the strategies take turns")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="how long the stop lasts, and the time before it"
    )
    arguments = parser.parse_args()
    prepare()
    measured: dict[str, list[Rates]] = {name: [] for name in STRATEGIES}
    for repeat in range(arguments.repeats):
        for name, strategy in STRATEGIES.items():
            rates = one_run(strategy, arguments.seconds)
            measured[name].append(rates)
            print(
                f"repeat {repeat}, {name}: {rates.before:,.0f} samples/s before the stop, {rates.during:,.0f} during",
                file=sys.stderr,
            )
    shares = {name: statistics.median(rates.share for rates in runs) for name, runs in measured.items()}
    if arguments.json:
        print(json.dumps({"others_keep": {name: round(share, 4) for name, share in shares.items()}}))
    else:
        show(measured, shares)


def one_run(strategy: ob.Strategy, seconds: float) -> Rates:
    """Train, with the second worker stopped for so long; the silence is shorter than what ends a link."""
    pause = ob.faults.Pause(STOPPED, at_seconds=seconds, seconds=seconds)
    cluster = ob.Cluster(faults=(pause,), silence_seconds=4 * seconds)
    run = ob.train(workload(), strategy, ob.Seconds(2.5 * seconds), workers=2, cluster=cluster, evaluate=None)
    steps = sorted(Trace.of(run).steps, key=lambda step: step.at)
    heard = [step.at for step in steps if step.rank == STOPPED]
    begins, ends = max(pairwise(heard), key=lambda pair: pair[1] - pair[0])
    if ends - begins < seconds / 2:
        raise SystemExit(f"the worker was to stand still for {seconds:g} s, but never did for half of that")
    other = [step for step in steps if step.rank == OTHER]
    return Rates(_rate(other, heard[0], begins), _rate(other, begins, ends))


def _rate(steps: list[Step], begins: float, ends: float) -> float:
    """Between two times, its edges left out."""
    inside = [step for step in steps if begins + EDGE_SECONDS <= step.at <= ends - EDGE_SECONDS]
    if len(inside) < 2:
        return 0.0
    return Trace(begins, tuple(inside), ()).rate


def show(measured: dict[str, list[Rates]], shares: dict[str, float]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("strategy")
    for head in ("samples/s\nbefore", "samples/s\nduring", "the other\nkeeps"):
        table.add_column(head, justify="right")
    for name, runs in measured.items():
        before, during = (
            statistics.median(values) for values in zip(*((r.before, r.during) for r in runs), strict=True)
        )
        table.add_row(name, f"{before:,.0f}", f"{during:,.0f}", f"{shares[name]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
