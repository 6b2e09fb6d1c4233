"""Loaders whose state the hub keeps: runs that are resumed, and workers that are killed, lose and repeat nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accounts import check_accounts
from torch import nn

import offbeat as ob
from offbeat.records.files import read_run
from offbeat.records.schema import Membership, RunRecords, Update, of_kind
from stateful_loaders import BufferedLoader, ShuffledLoader

SIZE = 300


def applied_samples(run: RunRecords, drawn: dict[int, dict[int, int]]) -> dict[int, list[int]]:
    """The numbers of the samples that updates have applied, by rank, in the order of their draws."""
    draws: dict[int, list[int]] = {}
    for update in of_kind(run, Update):
        for part in update.contributions:
            draws.setdefault(part.rank, []).extend(range(part.first, part.stop))
    return {rank: [drawn[rank][draw] for draw in sorted(of_rank)] for rank, of_rank in draws.items()}


def check_passes(samples: list[int]) -> None:
    """Of the passes over the data each has each sample once, but for the last, which has some of them."""
    for first in range(0, len(samples), SIZE):
        counts = Counter(samples[first : first + SIZE])
        assert set(counts.values()) == {1}, counts.most_common(3)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, from inside the loop."""


def train(directory: Path, loader: ShuffledLoader, drawn: dict[int, int], *, stop_at: int | None = None) -> RunRecords:
    """Train to 1,000 samples, or until one of the loop's draws is `stop_at`; `drawn` gets the sample of each draw."""
    torch.manual_seed(0)
    net = nn.Linear(1, 2)
    strategy = ob.FixedMinibatch(batch=48, microbatch=16, optimizer=ob.SGD(lr=0.1))
    with ob.join(net, strategy, until=1_000, out=directory, resume=stop_at is None) as run:
        for numbers in run.batches(loader, exactly_once=True):
            current = run._round
            assert current is not None
            first = current.action.draw + current.samples
            for offset, number in enumerate(numbers.tolist()):
                assert drawn.setdefault(first + offset, number) == number, "another sample at the same position"
            if stop_at is not None and first >= stop_at:
                raise Interrupted
            run.backward(F.cross_entropy(net(numbers[:, None] / SIZE), numbers % 2))
    return run.records


@pytest.mark.parametrize("stop_at", [70, 500])
def test_a_run_that_is_resumed_continues_in_the_middle_of_its_loader(stop_at: int, tmp_path: Path) -> None:
    drawn: dict[int, int] = {}
    with pytest.raises(Interrupted):
        train(tmp_path / "run", ShuffledLoader(SIZE, 40), drawn, stop_at=stop_at)
    train(tmp_path / "run", ShuffledLoader(SIZE, 40, seed=1), drawn)
    run = read_run(tmp_path / "run")
    check_accounts(run)
    [samples] = applied_samples(run, {0: drawn, 1: drawn}).values()
    assert len(samples) >= 1_000
    check_passes(samples)


def test_exactly_once_is_refused_in_one_sentence_before_training(tmp_path: Path) -> None:
    with pytest.raises(ob.ConfigurationError, match="cannot be repeated exactly once"):
        train(tmp_path / "run", BufferedLoader(SIZE, 40), {}, stop_at=500)


SCRIPT = """
import json, os, pathlib, signal, sys, warnings
import torch, torch.nn.functional as F
import offbeat as ob

directory, kind = pathlib.Path(sys.argv[1]), sys.argv[2]

def loader_of(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "stream":
            import datasets
            data = datasets.Dataset.from_dict({"number": list(range(300))}).to_iterable_dataset(num_shards=3)
            return data.with_format("torch").batch(40)
        from torchdata.stateful_dataloader import StatefulDataLoader
        data = [{"number": number} for number in range(300)]
        return StatefulDataLoader(data, batch_size=40, shuffle=True, num_workers=int(kind == "workers"))

net = torch.nn.Linear(1, 2)
strategy = ob.AsyncFixed(batch=48, microbatch=16, optimizer=ob.SGD(lr=0.1))
with ob.join(net, strategy, until=3_000, checkpoint_seconds=None) as run:
    log = (directory / f"drawn-{run.rank}.jsonl").open("a")
    killed = directory / f"killed-{run.rank}"
    for batch in run.batches(loader_of(run.rank), exactly_once=True):
        numbers = batch["number"]
        first = run._round.action.draw + run._round.samples
        log.write(json.dumps([first, numbers.tolist()]) + "\\n")
        log.flush()
        if first >= 400 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        run.backward(F.cross_entropy(net(numbers[:, None] / 300), numbers % 2))
"""


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["loader", "workers", "stream"])
def test_what_a_killed_worker_had_drawn_is_drawn_again_and_applied_exactly_once(kind: str, tmp_path: Path) -> None:
    """torchdata's StatefulDataLoader, without and with processes of its own, and a stream of Hugging Face."""
    script, directory = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT, encoding="utf-8")
    known = {name: value for name, value in os.environ.items() if not name.startswith("OFFBEAT_")}
    launch = ["launch", "-n", "3", "--out", str(directory), str(script), str(tmp_path), kind]
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", *launch],
        env={**known, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = read_run(directory)
    check_accounts(run)
    lost = [record.peer for record in of_kind(run, Membership) if not record.joined]
    assert {1, 2} <= set(lost), "both workers were killed once"
    drawn: dict[int, dict[int, int]] = {}
    for rank in (1, 2):
        for line in (tmp_path / f"drawn-{rank}.jsonl").read_text().splitlines():
            first, numbers = json.loads(line)
            for draw, number in enumerate(numbers, first):
                assert drawn.setdefault(rank, {}).setdefault(draw, number) == number
    samples = applied_samples(run, drawn)
    assert sum(map(len, samples.values())) >= 3_000
    for of_rank in samples.values():
        check_passes(of_rank)
