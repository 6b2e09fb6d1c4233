"""How well a calibrated simulation predicts live runs: FMB, AMB, Async-FMB and Async-Timed under induced sleeps.

    python bench/prediction.py [--json] [--repeats N] [--seconds S]

Two workers train the digits CNN, and sleep before their rounds as the mixture `cedar` says. One turn is: calibrate,
being told of `cedar`; train each strategy live; simulate the same experiments, seed for seed, on the cluster that was
measured, with `cedar`. Nothing else goes from the live runs to the simulated ones. There are several turns, since
machines drift; a ratio is taken within a turn, and the median over the turns is printed.

Samples per second, seconds per update and mean staleness are of the updates after the first seconds, in which live
processes warm up. Time to target counts from the first round; its interval is from the fastest to the slowest of all
turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import offbeat as ob
from offbeat.lab.calibration import calibrate
from offbeat.records.schema import Round, Update, of_kind

WORKERS = 2
REPEATS = 5
SECONDS = 8.0
CALIBRATION_SECONDS = 24.0
WARM_UP_SECONDS = 1.5
EVALUATE = ob.EverySeconds(0.25)
STRATEGIES: dict[str, ob.Strategy] = {
    "fmb": ob.FixedMinibatch(batch=256),
    "amb": ob.AnytimeMinibatch(seconds=0.15),
    "async-fmb": ob.AsyncFixed(batch=128),
    "async-timed": ob.AsyncTimed(worker_seconds=0.15, hub_seconds=0.15),
}


@dataclass(frozen=True)
class Pace:
    """How fast one run was."""

    samples_per_second: float
    seconds_per_update: float
    seconds_to_target: float | None
    staleness: float


@dataclass(frozen=True)
class Pair:
    """One strategy in one turn."""

    turn: int
    strategy: str
    live: Pace
    simulated: Pace

    @property
    def samples_ratio(self) -> float:
        return self.simulated.samples_per_second / self.live.samples_per_second

    @property
    def update_ratio(self) -> float:
        return self.simulated.seconds_per_update / self.live.seconds_per_update

    @property
    def staleness_difference(self) -> float:
        return self.simulated.staleness - self.live.staleness


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="how many turns")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long each run trains")
    arguments = parser.parse_args()
    pairs = [pair for turn in range(arguments.repeats) for pair in one_turn(turn, arguments.seconds)]
    rows = [row_of(name, [pair for pair in pairs if pair.strategy == name]) for name in STRATEGIES]
    if arguments.json:
        ratios = {row["strategy"]: row["samples_per_second_ratio"] for row in rows}
        print(json.dumps({"simulated_over_live": ratios, "rows": rows}))
    else:
        show(rows)


def one_turn(turn: int, seconds: float) -> list[Pair]:
    """Calibrate, then every strategy live and simulated."""
    calm = calibrate(
        ob.workloads.DigitsCNN(), workers=WORKERS, seconds=CALIBRATION_SECONDS, straggle=ob.stragglers.CEDAR
    ).cluster
    told = f"{calm.seconds_per_call * 1e3:.2f} ms per call, {calm.seconds_per_sample * 1e6:.1f} µs per sample"
    print(f"turn {turn}: {told}, {calm.seconds_per_update * 1e3:.2f} ms per update", file=sys.stderr)
    cluster = dataclasses.replace(calm, straggle=ob.stragglers.CEDAR)
    pairs = []
    for name, strategy in STRATEGIES.items():
        until = ob.Seconds(seconds)
        live = ob.train(
            ob.workloads.DigitsCNN(), strategy, until, workers=WORKERS, cluster=cluster, seed=turn, evaluate=EVALUATE
        )
        simulated = ob.simulate(
            ob.workloads.DigitsCNN(), strategy, cluster, until, turn, workers=WORKERS, evaluate=EVALUATE
        )
        pair = Pair(turn, name, pace_of(live), pace_of(simulated))
        pairs.append(pair)
        print(
            f"turn {turn}, {name}: live {pair.live.samples_per_second:,.0f} samples/s, simulated over live "
            f"{pair.samples_ratio:.3f}; seconds per update {pair.update_ratio:.3f}",
            file=sys.stderr,
        )
    return pairs


def pace_of(run: ob.Run) -> Pace:
    """Of the updates after warming up, from the first of them to the last."""
    began = min(record.start for record in of_kind(run.records, Round))
    updates = [record for record in of_kind(run.records, Update) if record.at >= began + WARM_UP_SECONDS]
    first, last = updates[0], updates[-1]
    seconds, reached = last.at - first.at, run.summary.seconds_to_target
    return Pace(
        samples_per_second=(last.samples_total - first.samples_total) / seconds,
        seconds_per_update=seconds / (last.version - first.version),
        seconds_to_target=None if reached is None else reached - began,
        staleness=statistics.fmean(part.staleness for update in updates for part in update.contributions),
    )


def row_of(name: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """One strategy over all turns."""
    return {
        "strategy": name,
        "samples_per_second_ratio": round(statistics.median(pair.samples_ratio for pair in pairs), 4),
        "seconds_per_update_ratio": round(statistics.median(pair.update_ratio for pair in pairs), 4),
        "live_staleness": round(statistics.median(pair.live.staleness for pair in pairs), 4),
        "staleness_difference": round(statistics.median(pair.staleness_difference for pair in pairs), 4),
        "live_samples_per_second": round(statistics.median(pair.live.samples_per_second for pair in pairs), 1),
        "simulated_samples_per_second": round(
            statistics.median(pair.simulated.samples_per_second for pair in pairs), 1
        ),
        "live_seconds_to_target": interval([pair.live.seconds_to_target for pair in pairs]),
        "simulated_seconds_to_target": interval([pair.simulated.seconds_to_target for pair in pairs]),
        "turns": [asdict(pair) for pair in pairs],
    }


def interval(times: Sequence[float | None]) -> dict[str, Any]:
    """Median, fastest and slowest of those that got there, and how many did."""
    reached = sorted(seconds for seconds in times if seconds is not None)
    if not reached:
        return {"median": None, "low": None, "high": None, "reached": 0}
    low, middle, high = reached[0], statistics.median(reached), reached[-1]
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3), "reached": len(reached)}


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="simulated over live")
    heads = ("strategy", "samples/s", "s/update", "live samples/s", "live staleness", "simulated less live")
    for head in (*heads, "live s to target", "simulated s to target"):
        table.add_column(head, justify="left" if head == "strategy" else "right")
    for row in rows:
        table.add_row(
            row["strategy"],
            f"{row['samples_per_second_ratio']:.3f}",
            f"{row['seconds_per_update_ratio']:.3f}",
            f"{row['live_samples_per_second']:,.0f}",
            f"{row['live_staleness']:.2f}",
            f"{row['staleness_difference']:+.3f}",
            shown(row["live_seconds_to_target"]),
            shown(row["simulated_seconds_to_target"]),
        )
    Console().print(table)


def shown(times: dict[str, Any]) -> str:
    return "not reached" if not times["reached"] else f"{times['median']:.2f} ({times['low']:.2f}–{times['high']:.2f})"


if __name__ == "__main__":
    main()
