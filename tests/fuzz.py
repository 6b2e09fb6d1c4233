"""Random cases of every strategy, for as long as wanted: `make fuzz SEEDS=150`.

Each case is a strategy with random settings on a random cluster, a pure function of (strategy, seed). Seeds that have
passed are kept in `runs/fuzz.json` for the present source code, so the same command with more seeds continues where the
last one stopped; after a change of the code it begins again. A failure prints the command that repeats it, and the
exit code is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn

import offbeat as ob
from offbeat.testing import check_strategy

CASES_PER_TASK = 10
STATE = Path("runs/fuzz.json")
SOURCE = Path(ob.__file__).parent


def code_digest() -> str:
    """Changes with any source file of the package."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_passed(state: Path, digest: str) -> dict[str, int]:
    """Strategy → how many seeds, from 0 on, have passed with this source code."""
    try:
        saved = json.loads(state.read_text(encoding="utf-8"))
        return {str(name): int(count) for name, count in saved["passed"].items()} if saved["code"] == digest else {}
    except (OSError, ValueError, KeyError, AttributeError):
        return {}


def write_passed(state: Path, digest: str, passed: dict[str, int]) -> None:
    state.parent.mkdir(parents=True, exist_ok=True)
    partial = state.with_suffix(".partial")
    partial.write_text(json.dumps({"code": digest, "passed": passed}), encoding="utf-8")
    partial.replace(state)


def prepare_process() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends the pool


def check(name: str, first: int, stop: int) -> str | None:
    """What went wrong with the first of these seeds that failed, or None."""
    for seed in range(first, stop):
        try:
            check_strategy(ob.Strategy.members[name](), seeds=[seed])
        except Exception as error:  # a strategy that raises has failed as well
            return f"{type(error).__name__}: {error}\n  to repeat it: offbeat replay {name} --seed {seed}"
    return None


def tasks(names: list[str], passed: dict[str, int], seeds: int) -> list[tuple[str, int, int]]:
    """Tasks of a few seeds each, all strategies in turn."""
    by_strategy = [
        [
            (name, first, min(first + CASES_PER_TASK, seeds))
            for first in range(passed.get(name, 0), seeds, CASES_PER_TASK)
        ]
        for name in names
    ]
    return [task for turn in itertools.zip_longest(*by_strategy) for task in turn if task is not None]


def fuzz(names: list[str], seeds: int, processes: int, state: Path) -> int:
    """Check `seeds` seeds of each strategy; the number of violations."""
    digest = code_digest()
    passed = read_passed(state, digest)
    waiting = tasks(names, passed, seeds)
    total = sum(stop - first for _, first, stop in waiting)
    already = sum(min(passed.get(name, 0), seeds) for name in names)
    print(f"{total:,} cases to check, {already:,} have passed before", flush=True)
    violations, checked, begun = 0, 0, time.monotonic()
    finished: dict[str, dict[int, int]] = {name: {} for name in names}
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[rate]:.1f} cases/s"))
    pool = ProcessPoolExecutor(processes, get_context("spawn"), prepare_process)
    bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
    with pool, bar:
        line = bar.add_task("fuzz", total=total, rate=0.0)
        running = {pool.submit(check, *task): task for task in waiting}
        try:
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    name, first, stop = running.pop(future)
                    sentence = future.result()
                    checked += stop - first
                    bar.update(line, completed=checked, rate=checked / (time.monotonic() - begun))
                    if sentence is not None:
                        violations += 1
                        print(f"{name}, seeds {first} to {stop - 1}: {sentence}", flush=True)
                        continue
                    finished[name][first] = stop
                    while passed.get(name, 0) in finished[name]:
                        passed[name] = finished[name].pop(passed.get(name, 0))
                    write_passed(state, digest, passed)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            print("interrupted; the same command goes on from here", flush=True)
    seconds = time.monotonic() - begun
    rate = checked / seconds if checked else 0.0
    print(f"{checked:,} cases in {seconds:.0f} s, {rate:.1f} per second: {violations} violations", flush=True)
    return violations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=150, help="seeds of each strategy, from 0 on")
    parser.add_argument("--strategies", default=",".join(ob.Strategy.members), help="names, with commas between")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many at a time")
    parser.add_argument("--state", type=Path, default=STATE, help="where the seeds that have passed are kept")
    arguments = parser.parse_args()
    names = arguments.strategies.split(",")
    unknown = [name for name in names if name not in ob.Strategy.members]
    if unknown or arguments.seeds < 1 or arguments.processes < 1:
        known = ", ".join(ob.Strategy.members)
        reason = f"unknown strategy {unknown[0]!r}; known: {known}" if unknown else "counts are whole numbers from 1 on"
        print(f"fuzz: {reason}", file=sys.stderr)
        return 2
    return 1 if fuzz(names, arguments.seeds, arguments.processes, arguments.state) else 0


if __name__ == "__main__":
    sys.exit(main())
