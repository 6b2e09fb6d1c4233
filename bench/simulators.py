"""Simulated federated averaging side by side: a bare loop in PyTorch, offbeat, pfl, and Flower's simulation.

    python bench/simulators.py [--json] [--models M ...] [--contestants C ...] [--rounds N] [--repeats N]

All compute the same: 50 clients with 50 images of CIFAR-10 each, all of them in each of 50 rounds, one local epoch in
batches of 10 by SGD, then the mean of their parameters; 12,500 local steps, without evaluation. Each client takes its
images in a new order in each round, the same one everywhere. Needs `offbeat data get cifar10`.

Models: `cnn` is the small CNN of pfl's benchmarks, 1.6 million parameters, without its dropout, so that results can be
compared; `cnn-dropout` has it, and no results are compared; `perceptron`, with one hidden layer of 64, has so little
arithmetic that batching pays.

    bare              a loop over rounds, clients and batches, with one model and `torch.optim.SGD`
    offbeat           `ob.LocalSGD` with its virtual clock, each gradient by itself (`batched="off"`)
    offbeat-batched   the same with gradients of several clients in one call (`batched="on"`)
    pfl               its `SimulatedBackend` in one process, as in its benchmarks
    flower            its simulation on Ray, a process of one thread for each core; all others are one such process

pfl and Flower are installed into environments of their own, in the cache of offbeat, at the first run; what cannot be
installed is left out with a sentence.

`seconds` is the wall time of training, without imports, reading the data and starting Ray; `megabytes` the peak memory
of all processes, imports included; `processor s` their processor time, from start to end. Contestants take turns within
a repeat, and ratios to the bare loop are of the same repeat. Shown are medians, and for ratios the range. `difference`
is how far the final parameters are from those of the bare loop, over how far training has moved these.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from federated.task import CLIENTS, IMAGES, MODELS, PARAMETERS, RESULT, STEPS, Task, new_model
from offbeat.core.examples import Order
from offbeat.lab.data.arrays import load_images
from peer_environments import PEERS, NotInstallable, Peer
from process_tree import run_measured

ROUNDS = 50
REPEATS = 5
WIDTH = 120
SECONDS_MAX = 3600
"""The longest run of a contestant."""
SCRIPTS = Path(__file__).parent / "federated"


@dataclass(frozen=True)
class Contestant:
    """A script in `bench/federated`, its arguments, and the library that it needs, if that is not offbeat."""

    script: str
    arguments: tuple[str, ...] = ()
    peer: Peer | None = None

    def python(self) -> Path:
        """The interpreter that runs it; raises `NotInstallable`."""
        return Path(sys.executable) if self.peer is None else self.peer.python()


CONTESTANTS = {
    "bare": Contestant("run_bare.py"),
    "offbeat": Contestant("run_offbeat.py", ("off",)),
    "offbeat-batched": Contestant("run_offbeat.py", ("on",)),
    "pfl": Contestant("run_pfl.py", peer=PEERS["pfl"]),
    "flower": Contestant("run_flower.py", peer=PEERS["flower"]),
}


@dataclass(frozen=True)
class Row:
    """What one contestant took in one repeat, and that over what the bare loop took in the same."""

    model: str
    repeat: int
    contestant: str
    seconds: float
    bytes_max: int
    processor_seconds: float
    seconds_over_bare: float
    bytes_over_bare: float
    difference: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["cnn", "perceptron"])
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="how often all of them take turns")
    arguments = parser.parse_args()
    interpreters, skipped = interpreters_of(["bare", *arguments.contestants])
    rows = [
        row
        for model in arguments.models
        for repeat in range(arguments.repeats)
        for row in one_repeat(make_task(model, arguments.rounds), repeat, interpreters)
    ]
    if arguments.json:
        print(json.dumps({"rounds": arguments.rounds, "rows": [asdict(row) for row in rows], "skipped": skipped}))
        return
    for model in arguments.models:
        print(f"{model}: {arguments.rounds} rounds, medians of {arguments.repeats} repeats")
        Console(width=WIDTH).print(table_of([row for row in rows if row.model == model]))
    for sentence in skipped:
        print(sentence)


def interpreters_of(names: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """The interpreter of each contestant, and sentences about those that are left out."""
    interpreters, skipped = {}, []
    for name in CONTESTANTS:
        if name in names:
            try:
                interpreters[name] = CONTESTANTS[name].python()
            except NotInstallable as reason:
                skipped.append(str(reason))
    return interpreters, skipped


def make_task(model: str, rounds: int) -> Task:
    """Client k has the k-th 50 training images of CIFAR-10, in the order in which offbeat draws them with seed 0."""
    data = load_images("cifar10").train.rows(0, CLIENTS * IMAGES)
    images = torch.from_numpy(np.array(data.images)).permute(0, 3, 1, 2).float().div_(255).contiguous()
    labels = torch.from_numpy(np.array(data.labels, dtype=np.int64))
    clients = [Order(np.arange(IMAGES), 0, client + 1) for client in range(CLIENTS)]
    orders = [torch.stack([order.take(r * IMAGES, (r + 1) * IMAGES) for order in clients]) for r in range(rounds)]
    torch.manual_seed(0)
    initial = nn.utils.parameters_to_vector(new_model(model).parameters()).detach()
    shape = CLIENTS, IMAGES
    return Task(model, images.unflatten(0, shape), labels.unflatten(0, shape), torch.stack(orders), initial)


def one_repeat(task: Task, repeat: int, interpreters: dict[str, Path]) -> list[Row]:
    """A run of each contestant, the bare loop first; raises `RuntimeError` where one has not done the same work."""
    rows: list[Row] = []
    trained: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        task.save(directory / "task.npz")
        for contestant, python in interpreters.items():
            script = CONTESTANTS[contestant]
            (directory / RESULT).unlink(missing_ok=True)
            paths = SCRIPTS / script.script, directory / "task.npz", directory
            command = [str(python), *map(str, paths), *script.arguments]
            measured = run_measured(command, environment(script), SECONDS_MAX)
            result = json.loads((directory / RESULT).read_text())
            steps = task.rounds * CLIENTS * STEPS
            if result["steps"] != steps:
                raise RuntimeError(f"{contestant} has taken {result['steps']} local steps, but {steps} were expected")
            trained[contestant] = torch.from_numpy(np.load(directory / PARAMETERS))
            bare = rows[0] if rows else None
            rows.append(
                Row(
                    model=task.name,
                    repeat=repeat,
                    contestant=contestant,
                    seconds=result["seconds"],
                    bytes_max=measured.bytes_max,
                    processor_seconds=measured.processor_seconds,
                    seconds_over_bare=result["seconds"] / (result["seconds"] if bare is None else bare.seconds),
                    bytes_over_bare=measured.bytes_max / (measured.bytes_max if bare is None else bare.bytes_max),
                    difference=difference(trained[contestant], trained["bare"], task),
                )
            )
    return rows


def environment(contestant: Contestant) -> dict[str, str]:
    """One thread in each process; libraries of another environment do not see the packages of this one."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or contestant.peer is None}
    return {**inherited, **one_thread}


def difference(parameters: torch.Tensor, bare: torch.Tensor, task: Task) -> float | None:
    """The distance from the parameters of the bare loop over the length of its way; None where dropout is random."""
    if task.name == "cnn-dropout":
        return None
    return float((parameters - bare).norm() / (bare - task.initial).norm())


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for head in ("", "seconds", "over bare", "megabytes", "over bare", "processor s", "difference"):
        table.add_column(head, justify="right" if head else "left")
    for name in dict.fromkeys(row.contestant for row in rows):
        own = [row for row in rows if row.contestant == name]
        differences = [row.difference for row in own if row.difference is not None]
        table.add_row(
            name,
            f"{statistics.median(row.seconds for row in own):.2f}",
            _shown([row.seconds_over_bare for row in own]),
            f"{statistics.median(row.bytes_max for row in own) / 1e6:,.0f}",
            _shown([row.bytes_over_bare for row in own]),
            f"{statistics.median(row.processor_seconds for row in own):.1f}",
            f"{max(differences):.1e}" if differences else "",
        )
    return table


def _shown(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})"


if __name__ == "__main__":
    main()
