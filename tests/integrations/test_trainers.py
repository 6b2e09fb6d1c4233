"""Trainers of other libraries, run for real: examples/integrations by python, offbeat launch and torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
LAUNCHERS = {
    "python": [],
    "offbeat": ["-m", "offbeat", "launch", "-n", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
WAIT_SECONDS = 500.0

WATCH = """
import json, os, pathlib, runpy, sys
import torch, torch.distributed
import offbeat as ob

def refused(*arguments, **named):
    raise AssertionError("gradients would be averaged by torch.distributed")

torch.nn.parallel.DistributedDataParallel.__init__ = refused
torch.distributed.all_reduce = refused
torch.distributed.init_process_group = refused
shard = ob.AsyncDataParallel.shard

def watched(peer, data):
    part = shard(peer, data)
    indices = list(getattr(part, "indices", range(len(part))))
    pathlib.Path(sys.argv[2], f"rank-{peer.rank}.json").write_text(json.dumps([peer.processes, indices]))
    return part

ob.AsyncDataParallel.shard = watched
sys.path.insert(0, str(pathlib.Path(sys.argv[1]).parent))
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run(script: Path, launcher: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OFFBEAT_", "PYTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], str(script), *arguments],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )


def result_of(output: str) -> float:
    found = re.findall(r"(?:loss|accuracy) (\d\.\d+)$", output, re.MULTILINE)
    assert found, output
    return float(found[-1])


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("example", ["hf_trainer", "lightning_trainer", "accelerate_loop"])
def test_an_example_trains_each_process_on_its_shard_and_averages_no_gradient(
    example: str, launcher: str, tmp_path: Path
) -> None:
    watch = tmp_path / "watch.py"
    watch.write_text(WATCH, encoding="utf-8")
    done = run(watch, launcher, str(EXAMPLES / f"{example}.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = result_of(done.stdout)
    assert result < 1.6 if example == "hf_trainer" else result > 0.85, done.stdout
    shards = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*.json"))]
    processes = 1 if launcher == "python" else 2
    assert [count for count, _ in shards] == [processes] * processes
    drawn = [index for _, indices in shards for index in indices]
    assert len(drawn) == len(set(drawn)) == (2304 if example == "hf_trainer" else 1437)
    assert ("hidden from here on" in done.stderr) == (launcher == "torchrun")


TOO_LATE = """
import torch
from accelerate import Accelerator
import offbeat as ob

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 2)
peer = ob.AsyncDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
try:
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(peer.optimizer)
except ob.ConfigurationError as error:
    print(f"refused: {error}", flush=True)
    raise SystemExit(3)
"""

WRAPPED = """
import torch
from accelerate import Accelerator
import offbeat as ob

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 2)
peer = ob.AsyncDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
wrapped = accelerator.prepare(model)
try:
    wrapped(torch.ones(3, 4))
except ob.ConfigurationError as error:
    print(f"refused: {error}", flush=True)
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("script", "sentence"),
    [(TOO_LATE, "take peer.optimizer before TrainingArguments"), (WRAPPED, "called by DistributedDataParallel")],
    ids=["too late", "wrapped"],
)
def test_a_trainer_that_has_connected_the_processes_is_refused(script: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(script, encoding="utf-8")
    done = run(path, "torchrun")
    assert done.returncode != 0
    assert done.stdout.count("refused: ") >= 1, done.stdout + done.stderr
    assert sentence in done.stdout
