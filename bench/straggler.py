"""Samples applied per second, with every worker healthy and with one that is slow: ours against DDP and the ceiling.

    python bench/straggler.py [--json] [--repeats N] [--seconds S]

Two workers train the CNN of `cifar_shaped.py` in micro-batches of 32. *Ceiling*: two processes that do not talk at all,
and keep the memory they have used, as offbeat's workers do (`launch/process_settings.py`: worth a quarter here).
*ddp*: torch's DistributedDataParallel over gloo, as it comes, and again with memory kept, to tell the two apart. The
others are strategies of ours, on whatever cores there are: gossip between the two workers alone, the rest with a hub in
a third process. Healthy, then straggling: every micro-batch of one worker takes 150 ms longer. All contestants take
turns, several times, in another order each time, between two measurements of the ceiling, of which the mean counts; a
ratio is taken within one repeat, and the median over repeats is printed. A turn during which other processes used more
than a fiftieth of the cores, or whose two ceilings differ by more than a twentieth, is announced and repeated, up to
three times in all; `disturbed` counts those that stayed so.

What counts is applied samples: those of optimizer steps (ceiling, ddp), and those that went into updates, of the hub or
of the peers themselves (ours); per second from the first of them to the last, so starting is not timed.
`seconds_to_target` is with the straggler: from the first micro-batch to when the mean training loss of the last 512
samples fell to 1.2 (the start is 2.3); null where that happened in fewer than half of the repeats.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat as ob
from cifar_shaped import BATCH, Trace, in_processes, plain_loop, prepare, workload
from offbeat.launch.process_settings import keep_freed_memory

WORKERS = 2
REPEATS = 6
SECONDS = 3.0
STRAGGLING_SECONDS = 5.5
STRAGGLE_SECONDS = 0.15
TURNS_MAX = 3
OTHERS_SHARE_MAX = 0.02
DRIFT_MAX = 0.05
TARGET = 1.2
TARGET_WINDOW = 512
DEMO_SECONDS = 8.0
CEILING = "ceiling"
DDP = "ddp"
DDP_KEPT = "ddp, memory kept"

STRATEGIES: dict[str, ob.Strategy] = {
    "async-fmb": ob.AsyncFixed(batch=BATCH, microbatch=BATCH, messages=1),
    "async-timed": ob.AsyncTimed(worker_seconds=0.15, hub_seconds=0.15, microbatch=BATCH),
    "fmb": ob.FixedMinibatch(batch=BATCH, microbatch=BATCH),
    "apam": ob.AsyncAdaptive(batch=BATCH, microbatch=BATCH),
    "gossip": ob.Gossip(graph=ob.graphs.Cycle(), rate=1.0, batch=BATCH, microbatch=BATCH),
    "gossip-acid": ob.GossipAcid(graph=ob.graphs.Cycle(), rate=1.0, batch=BATCH, microbatch=BATCH),
}


@dataclass(frozen=True)
class Row:
    """One contestant in one repeat."""

    repeat: int
    contestant: str
    straggler: bool
    samples_per_second: float
    of_ceiling: float
    over_ddp: float
    seconds_to_target: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="how often all contestants take turns")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long each healthy run trains")
    parser.add_argument("--straggling-seconds", type=float, default=STRAGGLING_SECONDS, help="how long the others do")
    parser.add_argument("--demo", action="store_true", help="one quick turn with the straggler: DDP and ours")
    arguments = parser.parse_args()
    prepare()
    if arguments.demo:
        show_demo(DEMO_SECONDS)
        return
    rows: list[Row] = []
    disturbed = 0
    for repeat in range(arguments.repeats):
        for straggler in (False, True):
            seconds = arguments.straggling_seconds if straggler else arguments.seconds
            turn, is_quiet = quiet_turn(repeat, straggler, seconds)
            rows += turn
            disturbed += not is_quiet
    figures = {name: figures_of(rows, name) for name in (DDP, DDP_KEPT, *STRATEGIES)}
    if arguments.json:
        print(json.dumps({"figures": figures, "disturbed": disturbed, "rows": [asdict(row) for row in rows]}))
    else:
        show(rows, figures)
        print(f"{disturbed} of {2 * arguments.repeats} turns were disturbed")


def quiet_turn(repeat: int, straggler: bool, seconds: float) -> tuple[list[Row], bool]:
    """The rows of a turn that nothing has disturbed, or else of the last of `TURNS_MAX`; and which of these it is."""
    for _ in range(TURNS_MAX):
        clock, all_before, own_before = time.monotonic(), busy_seconds(), own_seconds()
        rows, drift = one_turn(repeat, straggler, seconds)
        passed = (time.monotonic() - clock) * (os.cpu_count() or 1)
        others = (busy_seconds() - all_before - (own_seconds() - own_before)) / passed
        if others <= OTHERS_SHARE_MAX and drift <= DRIFT_MAX:
            return rows, True
        print(
            f"repeat {repeat}: disturbed: other processes used {others:.1%} of the cores, and the ceilings differ by "
            f"{drift:.1%}",
            file=sys.stderr,
        )
    return rows, False


def busy_seconds() -> float:
    """Processor time of all processes of the machine, with what a hypervisor gave to others; 0 where it is unknown."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, fields)
    return (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Processor time of this process and of those that it has started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def one_turn(repeat: int, straggler: bool, seconds: float) -> tuple[list[Row], float]:
    """Every contestant once, in another order each time, between two looks at the ceiling: the machine drifts.

    Returns the rows, and by how much the two ceilings differ.
    """
    contestants: dict[str, Callable[[], Trace]] = {
        name: functools.partial(ours, strategy, straggler, seconds) for name, strategy in STRATEGIES.items()
    }
    contestants[DDP] = functools.partial(ddp, straggler, seconds, keeps=False)
    contestants[DDP_KEPT] = functools.partial(ddp, straggler, seconds, keeps=True)
    order = list(contestants)
    random.Random(f"{repeat} {straggler}").shuffle(order)
    before = alone(straggler, seconds)
    traces: dict[str, Trace] = {}
    for name in order:
        traces[name] = contestants[name]()
        tell(repeat, straggler, name, traces[name].rate)
    after = alone(straggler, seconds)
    ceiling = (before.rate + after.rate) / 2
    tell(repeat, straggler, f"{CEILING}, before and after", before.rate, after.rate)
    rates = {CEILING: ceiling, **{name: trace.rate for name, trace in traces.items()}}
    rows = [
        Row(
            repeat=repeat,
            contestant=name,
            straggler=straggler,
            samples_per_second=rate,
            of_ceiling=rate / ceiling,
            over_ddp=rate / rates[DDP],
            seconds_to_target=seconds_to_target(traces[name]) if straggler and name != CEILING else None,
        )
        for name, rate in rates.items()
    ]
    return rows, abs(after.rate - before.rate) / ceiling


def tell(repeat: int, straggler: bool, name: str, *rates: float) -> None:
    condition = "straggling" if straggler else "healthy"
    shown = " and ".join(f"{rate:,.0f}" for rate in rates)
    print(f"repeat {repeat}, {condition}, {name}: {shown} samples/s", file=sys.stderr)


def figures_of(rows: list[Row], name: str) -> dict[str, float | None]:
    mine = [row for row in rows if row.contestant == name]
    healthy, straggling = ([row for row in mine if row.straggler == straggler] for straggler in (False, True))
    times = [row.seconds_to_target for row in straggling]
    reached = sorted(float("inf") if seconds is None else seconds for seconds in times)
    middle = statistics.median_high(reached)
    return {
        "healthy_of_ceiling": round(statistics.median(row.of_ceiling for row in healthy), 4),
        "healthy_over_ddp": round(statistics.median(row.over_ddp for row in healthy), 4),
        "straggler_of_ceiling": round(statistics.median(row.of_ceiling for row in straggling), 4),
        "straggler_over_ddp": round(statistics.median(row.over_ddp for row in straggling), 4),
        "seconds_to_target": None if middle == float("inf") else round(middle, 3),
    }


def seconds_to_target(trace: Trace) -> float | None:
    """When the mean loss over the last samples first was low enough."""
    window: deque[tuple[int, float]] = deque()
    samples, total = 0, 0.0
    for loss in sorted(trace.losses, key=lambda loss: loss.at):
        window.append((loss.samples, loss.total))
        samples, total = samples + loss.samples, total + loss.total
        while samples - window[0][0] >= TARGET_WINDOW:
            oldest = window.popleft()
            samples, total = samples - oldest[0], total - oldest[1]
        if samples >= TARGET_WINDOW and total / samples <= TARGET:
            return loss.at - trace.began
    return None


# The contestants


def ours(strategy: ob.Strategy, straggler: bool, seconds: float) -> Trace:
    slow = (ob.stragglers.WorkerOverride((1,), seconds_per_call=STRAGGLE_SECONDS),) if straggler else ()
    run = ob.train(
        workload(), strategy, ob.Seconds(seconds), workers=WORKERS, cluster=ob.Cluster(workers=slow), evaluate=None
    )
    return Trace.of(run)


def alone(straggler: bool, seconds: float) -> Trace:
    """Two processes that share nothing but the machine."""
    together = multiprocessing.get_context("fork").Barrier(WORKERS)
    return Trace.merged(in_processes(_alone, WORKERS, together, straggler, seconds))


def _alone(rank: int, together: Barrier, straggler: bool, seconds: float) -> Trace:
    keep_freed_memory()
    together.wait()
    until = time.monotonic() + seconds
    return plain_loop(rank, lambda number: time.monotonic() < until, _delay(rank, straggler))


def ddp(straggler: bool, seconds: float, keeps: bool) -> Trace:
    """Both processes, in step."""
    last = multiprocessing.get_context("fork").Value("q", sys.maxsize)
    with tempfile.TemporaryDirectory() as directory:
        return Trace.merged(in_processes(_ddp, WORKERS, last, Path(directory) / "store", straggler, seconds, keeps))


def _ddp(rank: int, last: Synchronized[int], store: Path, straggler: bool, seconds: float, keeps: bool) -> Trace:
    if keeps:
        keep_freed_memory()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORKERS)
    try:
        dist.barrier()
        until = time.monotonic() + seconds

        def goes_on(number: int) -> bool:
            # Rank 1 cannot have begun the step after this one, so it sees in time which is the last.
            if rank == 0 and last.value == sys.maxsize and time.monotonic() >= until:
                last.value = number + 1
            return number < last.value

        return plain_loop(rank, goes_on, _delay(rank, straggler), _in_step)
    finally:
        dist.destroy_process_group()


def _in_step(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _delay(rank: int, straggler: bool) -> float:
    return STRAGGLE_SECONDS if straggler and rank == WORKERS - 1 else 0.0


# The tables


def show_demo(seconds: float) -> None:
    """Time to the target with one straggler, measured once."""
    table = Table(
        title=f"Two workers, one of them {STRAGGLE_SECONDS * 1000:.0f} ms slower per step: measured once, right here",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for head in ("", f"seconds to loss {TARGET:g}", "samples per second"):
        table.add_column(head, justify="right" if head else "left")
    contestants: dict[str, Callable[[], Trace]] = {"DDP": lambda: ddp(True, seconds, keeps=False)}
    for name in ("async-fmb", "async-timed"):
        contestants[name] = lambda name=name: ours(STRATEGIES[name], True, seconds)
    with Progress(transient=True) as progress:
        for name, contest in progress.track(list(contestants.items()), description="a CNN, DDP and ours"):
            trace = contest()
            reached = seconds_to_target(trace)
            table.add_row(name, "not reached" if reached is None else f"{reached:.1f}", f"{trace.rate:,.0f}")
    Console().print(table)


def show(rows: list[Row], figures: dict[str, dict[str, float | None]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("strategy")
    for head in ("healthy\nsamples/s", "of\nceiling", "over\nDDP"):
        table.add_column(head, justify="right")
    for head in ("straggling\nsamples/s", "of\nceiling", "over\nDDP", f"seconds to\nloss {TARGET:g}"):
        table.add_column(head, justify="right")
    for name in (CEILING, *figures):
        healthy, straggling = (
            statistics.median(
                row.samples_per_second for row in rows if row.contestant == name and row.straggler == straggler
            )
            for straggler in (False, True)
        )
        shown: dict[str, Any] = figures.get(name) or figures_of(rows, name)
        seconds = shown["seconds_to_target"]
        table.add_row(
            name,
            f"{healthy:,.0f}",
            f"{shown['healthy_of_ceiling']:.2f}",
            f"{shown['healthy_over_ddp']:.2f}×",
            f"{straggling:,.0f}",
            f"{shown['straggler_of_ceiling']:.2f}",
            f"{shown['straggler_over_ddp']:.2f}×",
            "–" if seconds is None else f"{seconds:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
