"""The files of examples/cluster, run as they are. What a cluster would bring along, such as srun, is stood in for.

Those for mpirun are run where a rank is killed, in test_mpi_live.py.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from accounts import check_accounts

from offbeat.records.files import read_run
from offbeat.records.metrics import summarize
from offbeat.records.schema import Membership, Round, RunRecords, of_kind

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples/cluster"
LIMIT_SECONDS = 500.0
SHORT = ["--until", "3000", "--quiet", "--no-report"]
SRUN = """#!/usr/bin/env bash
[ "$1" = --kill-on-bad-exit=0 ] && shift
for rank in $(seq 0 $((SLURM_NTASKS - 1))); do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""


@contextmanager
def started(file: str, *words: str, directory: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """One of the files, in a session of its own that ends with this block."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("OFFBEAT_", "SLURM_", "OMPI_"))}
    path = f"{directory}:{Path(sys.executable).parent}:{known['PATH']}"
    process = subprocess.Popen(
        ["bash", str(CLUSTER / file), *words],
        cwd=directory,
        env={**known, "PATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def printed(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, said
    return said


def checked(directory: Path, workers: set[int]) -> RunRecords:
    run = read_run(directory)
    assert summarize(run).failure is None
    assert summarize(run).samples >= 3000
    assert {record.rank for record in run.records if isinstance(record, Round)} == workers
    check_accounts(run)
    return run


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_slurm(tmp_path: Path) -> None:
    stand_in = tmp_path / "srun"
    stand_in.write_text(SRUN)
    stand_in.chmod(0o755)
    job = {"SLURM_JOB_ID": str(1_000_000 + os.getpid() % 12_000), "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    with started("slurm.sbatch", *SHORT, directory=tmp_path, **job) as process:
        printed(process)
    checked(tmp_path / f"runs/slurm-{job['SLURM_JOB_ID']}/async-fmb-seed0", {1})
    token = tmp_path / f"runs/token-{job['SLURM_JOB_ID']}"
    assert token.stat().st_mode & 0o077 == 0
    with started("slurm.sbatch", directory=tmp_path, **job) as process:  # as if it had been requeued
        said, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 2
    assert said.count("has ended already, so there is nothing to resume") == 1, said


def test_torchrun_on_two_machines(tmp_path: Path) -> None:
    """Both are this one, but they do not know it."""
    (tmp_path / "token").write_text("a secret only for this test")
    (tmp_path / "token").chmod(0o600)
    common = {"MASTER": "127.0.0.1", "PORT": str(free_port()), "SCRIPT": str(ROOT / "examples/train_digits.py")}
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                started("torchrun.sh", "--samples", "4000", directory=tmp_path, NODE_RANK=str(node), **common)
            )
            for node in range(2)
        ]
        said = "".join(printed(node) for node in nodes)
    assert sorted(re.findall(r"rank \d of \d", said)) == [f"rank {rank} of 4" for rank in range(4)], said


def test_cloud_machines_that_come_and_go(tmp_path: Path) -> None:
    port = free_port()
    hub = {"LISTEN": f"127.0.0.1:{port}", "WORKERS": "2"}
    worker = {"HUB": f"127.0.0.1:{port}", "PAUSE": "0.2", "WAIT": "60"}
    records = tmp_path / "runs/cloud/async-fmb-seed0/records-0.jsonl"

    def happened(*wanted: tuple[int, bool]) -> None:
        """Wait until these have joined, or were lost."""
        until = time.monotonic() + LIMIT_SECONDS
        seen: set[tuple[int, bool]] = set()
        while not records.exists() or not seen.issuperset(wanted):
            assert there.poll() is None, there.communicate()
            assert time.monotonic() < until, seen
            time.sleep(0.05)
            if records.exists():
                seen = {(record.peer, record.joined) for record in of_kind(read_run(records.parent), Membership)}

    with ExitStack() as stack:
        words = ["--until", "100000000", "--no-report"]
        there = stack.enter_context(started("cloud_hub.sh", *words, directory=tmp_path, **hub))
        happened()
        first = stack.enter_context(started("cloud_worker.sh", directory=tmp_path, **worker))
        happened((1, True))
        second = stack.enter_context(started("cloud_worker.sh", directory=tmp_path, **worker))
        happened((1, True), (2, True))
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=LIMIT_SECONDS) == 143
        happened((1, False))
        there.send_signal(signal.SIGINT)
        said, _ = there.communicate(timeout=LIMIT_SECONDS)
        assert there.returncode == 130, said
        printed(second)
    check_accounts(read_run(records.parent))
