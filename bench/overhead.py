"""What hub, wire and engine cost: one worker with a hub against the plain loop, and a large message there and back.

    python bench/overhead.py [--json] [--repeats N] [--seconds S]

`one_worker_of_plain`: samples applied per second by a hub and one worker, over those of an ordinary training loop in
one process; the CNN of `cifar_shaped.py`, in turn, the median of the pairs.

`roundtrip_44mb_over_bare`: a gradient of 44 MB to the hub, a fused AMSGrad update, 44 MB of parameters back. Ours: what
a worker of a live run waits between handing its gradient in and being able to start the next round. Bare: two processes
and one gloo group, one operation of 44 MB, the same update, one operation back. In turn, the median of the pairs of
medians. Reading the new parameters into the model comes after both.

`rows` hold bytes and time per message: of each kind of run and sender, how long its messages kept the link busy.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import offbeat as ob
from cheap_gradients import cheap_workload
from cifar_shaped import BATCH, Trace, in_processes, plain_loop, prepare, workload
from offbeat.launch.process_settings import keep_freed_memory
from offbeat.records.schema import Ended, Round

REPEATS = 5
SECONDS = 5.0
ROUNDTRIPS = 25
WARM_UP = 5
"""Round trips that are not counted: memory is touched for the first time."""
LAYERS, WIDTH = 11, 1000
"""Eleven matrices of a million parameters each: 44 MB."""
RATE = 1e-5


@dataclass(frozen=True)
class Row:
    """Something measured in one repeat; what does not apply to it is None."""

    repeat: int
    what: str
    samples_per_second: float | None = None
    roundtrip_seconds: float | None = None
    bytes_per_message: float | None = None
    seconds_per_message: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="how often all of them take turns")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long each training run lasts")
    arguments = parser.parse_args()
    prepare()
    rows: list[Row] = []
    shares: list[float] = []
    factors: list[float] = []
    for repeat in range(arguments.repeats):
        plain = in_processes(_plain, 1, arguments.seconds)[0]
        mine, messages = one_worker(repeat, arguments.seconds)
        rows += [Row(repeat, "plain loop", samples_per_second=plain.rate), *messages]
        shares.append(mine.rate / plain.rate)
        print(f"repeat {repeat}: {mine.rate:,.0f} samples/s, plain loop {plain.rate:,.0f}", file=sys.stderr)
        bare = bare_roundtrip()
        seconds, row = roundtrip(repeat)
        rows += [Row(repeat, "44 MB bare", roundtrip_seconds=bare), row]
        factors.append(seconds / bare)
        print(
            f"repeat {repeat}: 44 MB there and back {seconds * 1e3:.0f} ms, bare {bare * 1e3:.0f} ms", file=sys.stderr
        )
    share, factor = statistics.median(shares), statistics.median(factors)
    if arguments.json:
        figures = {"one_worker_of_plain": round(share, 4), "roundtrip_44mb_over_bare": round(factor, 4)}
        print(json.dumps({**figures, "rows": [asdict(row) for row in rows]}))
    else:
        show(rows, share, factor)


# Training the CNN


def _plain(rank: int, seconds: float) -> Trace:
    keep_freed_memory()  # as workers of ours do
    until = time.monotonic() + seconds
    return plain_loop(rank + 1, lambda number: time.monotonic() < until)


def one_worker(repeat: int, seconds: float) -> tuple[Trace, list[Row]]:
    strategy = ob.AsyncFixed(batch=BATCH, microbatch=BATCH, messages=1)
    run = ob.train(workload(), strategy, ob.Seconds(seconds), workers=1, evaluate=None)
    trace = Trace.of(run)
    link = statistics.median(record.send_seconds for record in _rounds(run)[WARM_UP:])
    return trace, [
        Row(repeat, "hub and one worker", samples_per_second=trace.rate),
        Row(repeat, "gradients of the CNN", bytes_per_message=_bytes(run, 1), seconds_per_message=link),
        Row(repeat, "parameters of the CNN", bytes_per_message=_bytes(run, 0)),
    ]


def _rounds(run: ob.Run) -> list[Round]:
    return [record for record in run.records.records if isinstance(record, Round)]


def _bytes(run: ob.Run, rank: int) -> float:
    """Bytes per message that a rank has sent."""
    ends = [record for record in run.records.records if isinstance(record, Ended) and record.rank == rank]
    return sum(end.bytes_sent for end in ends) / max(1, sum(end.messages_sent for end in ends))


# 44 MB there and back


def roundtrip(repeat: int) -> tuple[float, Row]:
    """Seconds that a worker which waits for its answer is idle between two rounds."""
    strategy = ob.AsyncAdaptive(batch=1, microbatch=1, optimizer=ob.AMSGrad(lr=RATE))
    run = ob.train(cheap_workload(LAYERS, WIDTH), strategy, ob.Samples(ROUNDTRIPS + WARM_UP), workers=1, evaluate=None)
    rounds = _rounds(run)[WARM_UP:]
    seconds = statistics.median(record.idle_seconds for record in rounds)
    link = statistics.median(record.send_seconds for record in rounds)
    row = Row(
        repeat,
        "44 MB gradients",
        roundtrip_seconds=seconds,
        bytes_per_message=_bytes(run, 1),
        seconds_per_message=link,
    )
    return seconds, row


def bare_roundtrip() -> float:
    """The same without us."""
    together = multiprocessing.get_context("fork").Barrier(2)
    with tempfile.TemporaryDirectory() as directory:
        return float(in_processes(_bare, 2, together, Path(directory) / "store")[1])


def _bare(rank: int, together: Barrier, store: Path) -> float:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parameters, gradient = torch.zeros(LAYERS * WIDTH * WIDTH), torch.zeros(LAYERS * WIDTH * WIDTH)
    shaped = [nn.Parameter(part.view(WIDTH, WIDTH)) for part in parameters.split(WIDTH * WIDTH)]
    for parameter, part in zip(shaped, gradient.split(WIDTH * WIDTH), strict=True):
        parameter.grad = part.view(WIDTH, WIDTH)
    optimizer = torch.optim.Adam(shaped, lr=RATE, amsgrad=True, fused=True)
    times = []
    try:
        for _ in range(WARM_UP + ROUNDTRIPS):
            together.wait()
            began = time.monotonic()
            if rank == 1:
                dist.send(gradient, 0)
                dist.recv(parameters, 0)
            else:
                dist.recv(gradient, 1)
                optimizer.step()
                dist.send(parameters, 1)
            times.append(time.monotonic() - began)
    finally:
        dist.destroy_process_group()
    return statistics.median(times[WARM_UP:])


# The table


def show(rows: list[Row], share: float, factor: float) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("median of all repeats")
    for head in ("samples/s", "round trip\nms", "bytes per\nmessage", "ms per\nmessage"):
        table.add_column(head, justify="right")
    for what in dict.fromkeys(row.what for row in rows):
        mine = [row for row in rows if row.what == what]
        table.add_row(
            what,
            _middle([row.samples_per_second for row in mine], "{:,.0f}"),
            _middle([row.roundtrip_seconds for row in mine], "{:.1f}", 1e3),
            _middle([row.bytes_per_message for row in mine], "{:,.0f}"),
            _middle([row.seconds_per_message for row in mine], "{:.2f}", 1e3),
        )
    console = Console()
    console.print(table)
    console.print(f"hub and one worker: {share:.3f} of the plain loop")
    console.print(f"44 MB there and back: {factor:.2f} × the bare cost")


def _middle(values: list[float | None], form: str, scale: float = 1.0) -> str:
    known = [value for value in values if value is not None]
    return form.format(statistics.median(known) * scale) if known else ""


if __name__ == "__main__":
    main()
