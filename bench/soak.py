"""Whether a run with a fault every 20 seconds stays what it was: memory, descriptors, threads, samples, throughput.

    python bench/soak.py [--json] [--minutes M] [--every S] [--out DIR]

Four workers of async-fmb train digits under the command line, on this machine. Most of a round is induced delay, so
that all processes together leave the cores idle for more than a third of the time: otherwise the others would profit
from a dead worker. Faults take turns: a worker is killed and restarted; is stopped for 3 s, which its hub does not
notice; is stopped for 15 s, which is longer than `silence_seconds`, so that it is lost and joins again; the hub is
stopped for 2 s.

Printed: of each process the memory, descriptors and threads at the beginning (after a minute) and at the end, each the
median of a minute of samples; how many samples were applied, and how many of them twice; and the throughput in
proportion to the capacity that was there. Capacity is the time that workers were members and not stopped, times the
rate of a worker in the first half minute, which has no faults.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from offbeat.core.sample_ledger import SampleLedger
from offbeat.records.files import find_runs, read_run
from offbeat.records.schema import Membership, RunRecords, Update, of_kind

WORKERS = 4
QUIET_SECONDS = 30.0
SAMPLE_SECONDS = 2.0
WINDOW_SECONDS = 60.0
CLUSTER = """
[[workers]]
workers = [0, 1, 2, 3]
seconds_per_call = 0.12
"""
"""A micro-batch of 16 takes some 2 ms, and is then followed by so much sleep."""
FAULTS = ("kill", "stop 3", "stop 15", "stop the hub 2")


@dataclass
class Usage:
    """What one rank used, at moments of the run; a restarted process goes on in the list of its rank."""

    at: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    cpu_seconds: dict[int, float] = field(default_factory=dict)
    """process → its processor time"""


@dataclass(frozen=True)
class Stop:
    """A rank stood still by a signal, in seconds of the run."""

    rank: int
    begin: float
    end: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long the run takes")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    parser.add_argument("--out", type=Path, help="keep the run in this directory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="offbeat-soak-") as temporary:
        out = arguments.out or Path(temporary) / "out"
        usages, stops, counts, seconds = soak(out, arguments.minutes * 60.0, arguments.every)
        (directory,) = find_runs([out])
        result = evaluate(read_run(directory), usages, stops, seconds)
        result["faults"] = dict(counts)
        result["record_bytes"] = sum(path.stat().st_size for path in directory.glob("records*"))
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)
    sys.exit(1 if result["applied_twice"] else 0)


def soak(out: Path, seconds: float, every: float) -> tuple[dict[str, Usage], list[Stop], dict[str, int], float]:
    """Run, with faults; returns the usage by process, the stops, how many faults of each kind, and the wall time."""
    cluster = out.parent / "soak-cluster.toml"
    cluster.parent.mkdir(parents=True, exist_ok=True)
    cluster.write_text(CLUSTER)
    words = [sys.executable, "-m", "offbeat", "train", "digits", "async-fmb", "--workers", str(WORKERS)]
    words += ["--until", f"{seconds:g}s", "--cluster", str(cluster), "--restarts", "100000", "--out", str(out)]
    words += ["--batch", "16", "--evaluate", "10s", "--no-report"]
    usages: dict[str, Usage] = defaultdict(Usage)
    stops: list[Stop] = []
    counts: dict[str, int] = defaultdict(int)
    choices = random.Random(0)
    errors = out.parent / "soak-errors.txt"  # not a pipe: a full pipe would block the supervisor
    with errors.open("w") as target, subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=target) as process:
        while len(ranks := ranks_of(process.pid)) < WORKERS + 1 or not list(out.glob("*/records-4.jsonl")):
            time.sleep(0.05)
        began = time.monotonic()
        resume: dict[int, tuple[float, int]] = {}
        kinds = itertools.cycle(FAULTS)
        next_fault, next_sample = QUIET_SECONDS, 0.0
        while process.poll() is None:
            now = time.monotonic() - began
            for rank, (until, number) in list(resume.items()):
                if now >= until:
                    send(number, signal.SIGCONT)
                    del resume[rank]
            if now >= next_sample:
                next_sample = now + SAMPLE_SECONDS
                sample(usages, {**ranks_of(process.pid), -1: process.pid}, now)
            if now >= next_fault and now < seconds - every:
                next_fault = now + every
                kind, ranks = next(kinds), ranks_of(process.pid)
                free = sorted(ranks.keys() - resume.keys() - {0})
                if "hub" in kind:
                    free = [0]
                if free:
                    rank = choices.choice(free)
                    counts[kind] += 1
                    if kind == "kill":
                        send(ranks[rank], signal.SIGKILL)
                    else:
                        length = float(kind.split()[-1])
                        send(ranks[rank], signal.SIGSTOP)
                        resume[rank] = now + length, ranks[rank]
                        stops.append(Stop(rank, now, now + length))
            time.sleep(0.05)
    if process.returncode:
        sys.exit(f"the run failed with exit code {process.returncode}:\n{errors.read_text()}")
    return usages, stops, counts, time.monotonic() - began


def send(number: int, what: signal.Signals) -> None:
    try:
        os.kill(number, what)
    except ProcessLookupError:
        print(f"process {number} was gone when it was to get {what.name}", file=sys.stderr)


def ranks_of(parent: int) -> dict[int, int]:
    """rank → process, of those that a command has started."""
    found = {}
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for number in children.read_text().split():
            try:
                name = Path(f"/proc/{number}/comm").read_text().strip()
            except OSError:
                continue
            if name.startswith("offbeat "):
                found[int(name.removeprefix("offbeat "))] = int(number)
    return found


def sample(usages: dict[str, Usage], processes: dict[int, int], at: float) -> None:
    """Enter what each process uses now."""
    for rank, number in processes.items():
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{number}/status").read_text().splitlines())
            descriptors = len(os.listdir(f"/proc/{number}/fd"))
            ticks = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            megabytes, threads = int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"])
        except (OSError, KeyError):  # it has ended meanwhile
            continue
        usage = usages["supervisor" if rank < 0 else "hub" if rank == 0 else f"worker {rank}"]
        usage.at.append(at)
        usage.megabytes.append(megabytes)
        usage.descriptors.append(descriptors)
        usage.threads.append(threads)
        usage.cpu_seconds[number] = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")


def evaluate(records: RunRecords, usages: dict[str, Usage], stops: list[Stop], seconds: float) -> dict[str, object]:
    """The figures of a run."""
    applied, twice, per_rank_early = 0, 0, 0
    ledgers: dict[int, SampleLedger] = defaultdict(SampleLedger)
    first, last = None, 0.0
    for update in of_kind(records, Update):
        first = update.at if first is None else first
        last = update.at
        for part in update.contributions:
            samples = part.stop - part.first
            applied += samples
            if ledgers[part.rank].overlaps(part.first, part.stop):
                twice += samples
            else:
                ledgers[part.rank].add(part.first, part.stop)
            if update.at - first < QUIET_SECONDS:
                per_rank_early += samples
    assert first is not None
    rate = per_rank_early / QUIET_SECONDS / WORKERS
    up = sum(end - begin for rank in range(1, WORKERS + 1) for begin, end in up_times(records, stops, rank, last))
    hub_stops = sum(stop.end - stop.begin for stop in stops if stop.rank == 0)
    cpu = sum(sum(usage.cpu_seconds.values()) for usage in usages.values())
    return {
        "seconds": round(seconds, 1),
        "applied": applied,
        "applied_twice": twice,
        "rate_per_worker": round(rate, 1),
        "capacity_kept": round(applied / (rate * (up - WORKERS * hub_stops)), 4),
        "cores_used": round(cpu / seconds, 3),
        "usage": {name: summary(usage, seconds) for name, usage in sorted(usages.items())},
    }


def up_times(records: RunRecords, stops: list[Stop], rank: int, end: float) -> Iterator[tuple[float, float]]:
    """The times at which a rank was a member and not stopped."""
    since: float | None = None
    spans: list[tuple[float, float]] = []
    for record in of_kind(records, Membership):
        if record.peer != rank or record.rank != 0:
            continue
        if record.joined:
            since = record.at
        elif since is not None:
            spans.append((since, record.at))
            since = None
    if since is not None:
        spans.append((since, end))
    for begin, finish in spans:
        position = begin
        for stop in sorted((stop for stop in stops if stop.rank == rank), key=lambda stop: stop.begin):
            if position < stop.begin < finish:
                yield position, stop.begin
                position = min(finish, max(position, stop.end))
        if position < finish:
            yield position, finish


def summary(usage: Usage, seconds: float) -> dict[str, list[float]]:
    """Memory, descriptors and threads at the beginning and at the end."""
    begin = [index for index, at in enumerate(usage.at) if QUIET_SECONDS <= at < QUIET_SECONDS + WINDOW_SECONDS]
    end = [index for index, at in enumerate(usage.at) if at >= seconds - WINDOW_SECONDS]
    series: dict[str, Sequence[float]] = {
        "megabytes": usage.megabytes,
        "descriptors": usage.descriptors,
        "threads": usage.threads,
    }
    return {
        name: [round(statistics.median(values[index] for index in part), 1) if part else 0.0 for part in (begin, end)]
        for name, values in series.items()
    }


def show(result: dict[str, object]) -> None:
    usage = result["usage"]
    assert isinstance(usage, dict)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("process")
    for name in ("MB", "descriptors", "threads"):
        table.add_column(f"{name}: beginning", justify="right")
        table.add_column("end", justify="right")
    for name, values in usage.items():
        table.add_row(name, *(f"{value:g}" for pair in values.values() for value in pair))
    console = Console()
    console.print(table)
    for name, value in result.items():
        if name != "usage":
            console.print(f"{name.replace('_', ' ')}: {value}", highlight=False)


if __name__ == "__main__":
    main()
