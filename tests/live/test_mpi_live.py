"""Real processes that mpirun has started: every strategy, a rank that is killed, and one that is missed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from accounts import check_accounts

from offbeat.launch.mpirun_command import mpirun_command
from offbeat.records.files import find_runs, read_run
from offbeat.records.schema import Round, Update, of_kind

pytestmark = pytest.mark.integration

OFFBEAT = [sys.executable, "-m", "offbeat"]
STRATEGIES = ["fmb", "amb", "async-fmb", "async-timed", "apam", "sync-amsgrad", "k-of-n"]
LOCAL = ["local-sgd", "diloco", "decoupled-diloco", "delayed-exchange", "population"]
CLUSTER = Path(__file__).parents[2] / "examples/cluster"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LIMIT_SECONDS = 500.0
"""For hangs alone: two cores may be shared with anything."""
ULFM = ["--with-ft", "ulfm"]


def mpirun(processes: int, *, tolerant: bool = True) -> list[str]:
    words = mpirun_command(processes)
    assert words[-2:] == ULFM
    return words if tolerant else words[:-2]


@contextmanager
def running(words: Sequence[str], directory: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, of which nothing is left afterwards."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OFFBEAT_", "OMPI_"))}
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    process = subprocess.Popen(
        words,
        cwd=directory,
        env={**environment, "PATH": path, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            for number in [*ranks_of(process.pid).values(), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=LIMIT_SECONDS)
    return process.returncode, out, errors


def ranks_of(parent: int) -> dict[int, int]:
    """The ranks that an mpirun has started, and their process numbers."""
    found = {}
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for number in children.read_text().split():
            try:
                variables = (Path("/proc") / number / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ranks = [entry.partition(b"=")[2] for entry in variables if entry.startswith(b"OMPI_COMM_WORLD_RANK=")]
            found.update({int(rank): int(number) for rank in ranks})
    return found


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert process.poll() is None, ended(process)
        assert time.monotonic() < until
        time.sleep(0.02)


def slow_cluster(directory: Path, workers: int) -> str:
    """Slow enough that something can be done to a run in its middle, whatever the machine."""
    path = directory / "slow.toml"
    overrides = f"[[workers]]\nworkers = {list(range(workers))}\nseconds_per_call = 0.01\n"
    path.write_text(overrides)
    return str(path)


def contributors(place: Path) -> set[int]:
    """Whose samples went into the model."""
    return {part.rank for update in of_kind(read_run(place), Update) for part in update.contributions}


def kill_in_its_middle(process: subprocess.Popen[str], out: Path, rank: int) -> None:
    """Kill a rank once the run has a checkpoint and some updates."""
    records = out / "async-fmb-seed0/records-0.jsonl"
    wait_for(lambda: records.exists() and records.read_bytes().count(b'"update"') >= 20, process)
    wait_for((out / "async-fmb-seed0/checkpoint-0.offbeat").exists, process)
    os.kill(ranks_of(process.pid)[rank], signal.SIGKILL)


def test_every_strategy_in_one_command_that_calls_mpirun_itself(tmp_path: Path) -> None:
    words = [
        *OFFBEAT,
        "train",
        "digits",
        *STRATEGIES,
        "--until",
        "4000",
        "--no-report",
        "--transport",
        "mpi",
        "--workers",
        "1",
    ]
    with running([*words, "--json", "--out", "runs"], tmp_path) as process:
        code, out, errors = ended(process)
    assert code == 0, errors
    runs: list[dict[str, Any]] = json.loads(out)["runs"]
    assert [run["strategy"] for run in runs] == STRATEGIES
    assert {(run["workers"], run["lost_peers"], run["failure"]) for run in runs} == {(1, 0, None)}
    assert min(run["samples"] for run in runs) >= 4000
    for place in find_runs([tmp_path / "runs"]):
        run = read_run(place)
        check_accounts(run)
        assert {record.rank for record in run.records if isinstance(record, Round)} == {1}


def test_local_steps_and_populations_reach_the_target_over_mpi(tmp_path: Path) -> None:
    words = [*OFFBEAT, "train", "digits", *LOCAL, "--until", "30000", "--workers", "2", "--transport", "mpi"]
    with running([*words, "--no-report", "--json", "--out", "runs"], tmp_path) as process:
        code, out, errors = ended(process)
    assert code == 0, errors
    runs = json.loads(out)["runs"]
    assert [(run["strategy"], run["workers"], run["failure"]) for run in runs] == [(name, 2, None) for name in LOCAL]
    assert min(run["accuracy"] for run in runs) >= 0.9
    for place in find_runs([tmp_path / "runs"]):
        check_accounts(read_run(place))


def test_a_killed_worker_is_lost_and_the_others_go_on_also_with_the_next_run(tmp_path: Path) -> None:
    """Started by the script for clusters, with a hostfile of this machine alone."""
    out = tmp_path / "runs"
    (tmp_path / "hosts").write_text("localhost slots=3\n")
    variables = {"HOSTS": str(tmp_path / "hosts"), "PROCESSES": "3", "RUN": str(out), **AS_ROOT}
    words = ["--batch", "32", "--until", "8000", "--seeds", "2", "--json", "--no-report"]
    slow = ["--cluster", slow_cluster(tmp_path, 2), "--checkpoint-seconds", "0.1"]
    with running(["bash", str(CLUSTER / "mpirun.sh"), *words, *slow], tmp_path, **variables) as process:
        kill_in_its_middle(process, out, 2)
        code, printed, errors = ended(process)
    assert code == 0, errors
    first, second = json.loads(printed)["runs"]
    for run in (first, second):
        assert (run["lost_peers"], run["rejoined_peers"], run["failure"]) == (1, 0, None)
        assert run["samples"] >= 8000
    assert first["accuracy"] >= 0.85
    for place in find_runs([out]):
        check_accounts(read_run(place))
    assert [contributors(out / f"async-fmb-seed{seed}") for seed in (0, 1)] == [{1, 2}, {1}]


def test_the_hostfile_has_as_many_slots_as_the_script_starts_processes() -> None:
    slots = re.findall(r"^\w+ slots=(\d)$", (CLUSTER / "hostfile").read_text(), re.MULTILINE)
    assert f"${{PROCESSES:-{sum(map(int, slots))}}}" in (CLUSTER / "mpirun.sh").read_text()


def test_without_tolerance_a_killed_worker_ends_the_run_in_one_sentence_and_it_can_go_on(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    words = [*OFFBEAT, "train", "digits", "async-fmb", "--batch", "32", "--quiet", "--out", str(out)]
    line = [
        *mpirun(2, tolerant=False),
        *words,
        "--cluster",
        slow_cluster(tmp_path, 1),
        "--checkpoint-seconds",
        "0.1",
        "--no-report",
    ]
    with running(line, tmp_path) as process:
        kill_in_its_middle(process, out, 1)
        code, _, errors = ended(process)
    assert code != 0
    ours = [line for line in errors.splitlines() if line.startswith("offbeat: mpirun")]
    place = out / "async-fmb-seed0"
    assert ours == [
        "offbeat: mpirun has asked this run to end (SIGTERM), as it does when a rank has died; with 'mpirun --with-ft "
        f"ulfm' the others go on; to resume from its checkpoint: offbeat train --resume {place}"
    ]
    assert "Traceback" not in errors
    with running(
        [*OFFBEAT, "train", "--resume", str(place), "--until", "5000", "--quiet", "--no-report"], tmp_path
    ) as process:
        code, _, errors = ended(process)
    assert code == 0, errors
    check_accounts(read_run(place))
