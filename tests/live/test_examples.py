"""The examples are run in every way that the guide to live runs shows, and what they print is looked at."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from accounts import check_accounts

from offbeat.launch.mpirun_command import mpirun_command
from offbeat.records.files import read_run
from offbeat.records.metrics import summarize
from offbeat.records.schema import Exchange, Update, of_kind

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples/train_digits.py"
ANYTIME = ROOT / "examples/anytime_single.py"
GUIDE = (ROOT / "docs/live.md").read_text(encoding="utf-8")
WAYS = re.findall(r"^(?:python|offbeat|torchrun|mpirun|srun)\b.*\bexamples/train_digits\.py .*$", GUIDE, re.MULTILINE)
LINES = {line.split()[0]: line for line in WAYS}
"""program → how the guide starts the example with it"""
PROGRAMS = {
    "python": [sys.executable],
    "offbeat": [sys.executable, "-m", "offbeat"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "mpirun": [mpirun_command(1)[0], "--allow-run-as-root", "--oversubscribe"],
}


@contextmanager
def started(line: str, directory: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Type a line of the guide; nothing that it started is there afterwards."""
    program, *words = shlex.split(line)
    known = {name: value for name, value in os.environ.items() if not name.startswith(("OFFBEAT_", "SLURM_"))}
    process = subprocess.Popen(
        [*PROGRAMS[program], *(str(ROOT / word) if word.startswith("examples/") else word for word in words)],
        cwd=directory,
        env={**known, "PATH": f"{Path(sys.executable).parent}:{known['PATH']}", "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def typed(line: str, directory: Path) -> str:
    """What a line of the guide prints."""
    with started(line, directory) as process:
        printed, _ = process.communicate()
    assert process.returncode == 0, printed
    return printed


def check_ranks(printed: str, ranks: range, processes: int) -> None:
    """Every rank has said what it ended with, which is the same for all, and has learnt something."""
    # Not line by line: where Python does not buffer, the end of a line is written on its own, and ranks get in between.
    found = re.findall(r"rank (\d) of (\d): accuracy (\d\.\d{3}), loss (\d+\.\d{3})", printed)
    assert sorted((int(rank), int(of)) for rank, of, _, _ in found) == [(rank, processes) for rank in ranks], printed
    assert len({(accuracy, loss) for _, _, accuracy, loss in found}) == 1, printed
    assert float(found[0][2]) > 0.4


def check_summary(printed: str, workers: str) -> None:
    """The one rank that knows has told how the run went."""
    found = re.findall(r"async-fmb on Sequential, (\d workers?): ([\d,]+) samples in", printed)
    assert [who for who, _ in found] == [workers], printed
    assert int(found[0][1].replace(",", "")) >= 4000


def test_the_guide_shows_five_ways() -> None:
    assert [line.split()[0] for line in WAYS] == ["python", "offbeat", "torchrun", "mpirun", "srun"]


@pytest.mark.slow
def test_alone(tmp_path: Path) -> None:
    printed = typed(LINES["python"], tmp_path)
    check_ranks(printed, range(1, 2), 2)
    check_summary(printed, "1 worker")


@pytest.mark.integration
def test_launched(tmp_path: Path) -> None:
    printed = typed(LINES["offbeat"], tmp_path)
    check_ranks(printed, range(3), 3)
    check_summary(printed, "2 workers")
    run = read_run(tmp_path / "runs/train_digits-001")
    check_accounts(run)
    assert summarize(run).failure is None
    assert re.findall(r"^  rank (\d): [\d,]+ samples in", printed, re.MULTILINE) == ["1", "2"]


@pytest.mark.integration
def test_under_torchrun(tmp_path: Path) -> None:
    printed = typed(LINES["torchrun"], tmp_path)
    check_ranks(printed, range(3), 3)
    check_summary(printed, "2 workers")


@pytest.mark.integration
def test_under_mpirun(tmp_path: Path) -> None:
    printed = typed(LINES["mpirun"], tmp_path)
    check_ranks(printed, range(3), 3)
    check_summary(printed, "2 workers")


@pytest.mark.integration
def test_under_srun(tmp_path: Path) -> None:
    """SLURM is not here, but what a script sees of it is: its variables."""
    srun, option, tasks, line = LINES["srun"].split(maxsplit=3)
    assert (srun, option, tasks) == ("srun", "-n", "3")
    port = free_port(20_000, 40_000)
    job = {"SLURM_NTASKS": tasks, "SLURM_NNODES": "1", "SLURM_JOB_ID": str(20_000 * 7 + port - 20_000)}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started(line, tmp_path, SLURM_PROCID=str(rank), **job)) for rank in range(int(tasks))
        ]
        printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], "".join(printed)
    check_ranks("".join(printed), range(3), 3)
    check_summary(printed[0], "2 workers")


def free_port(first: int, stop: int) -> int:
    """A free port in this range; the search starts at another port in every process."""
    for number in range(stop - first):
        port = first + (os.getpid() * 7 + number) % (stop - first)
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("all ports are taken")


# From DDP, and back

FROM_DDP = "examples/from_ddp.py"
PAGE = (ROOT / "docs/from_ddp.md").read_text(encoding="utf-8")
FROM_DDP_LINES = {
    line.split()[0]: line for line in re.findall(rf"^(?:python|offbeat|torchrun)\b.*\b{FROM_DDP}$", PAGE, re.MULTILINE)
}


def check_accuracy(printed: str) -> None:
    """One rank has said how well the model does."""
    found = re.findall(r"^accuracy (\d\.\d{3})$", printed, re.MULTILINE)
    assert len(found) == 1, printed
    assert float(found[0]) >= 0.9


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("python", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.integration) for name in ("offbeat", "torchrun")),
    ],
)
def test_the_script_that_came_from_ddp(program: str, tmp_path: Path) -> None:
    check_accuracy(typed(FROM_DDP_LINES[program], tmp_path))
    if program == "offbeat":
        run = read_run(tmp_path / "runs/from_ddp-001")
        assert summarize(run).failure is None
        assert {record.rank for record in of_kind(run, Update)} == {0, 1}
        assert any(record.outcome == "averaged" for record in of_kind(run, Exchange))


def as_it_was(script: str) -> str:
    """The script before it was changed: what stands behind `# DDP: ` in the place of what stands before it."""
    lines = []
    for line in script.splitlines(keepends=True):
        now, _, before = line.partition("# DDP: ")
        indent = now[: len(now) - len(now.lstrip())]
        lines += [line] if not before else [] if before.startswith("nothing") else [indent + before]
    return "".join(lines)


@pytest.mark.integration
def test_the_script_as_it_was_runs_under_ddp(tmp_path: Path) -> None:
    before = as_it_was((ROOT / FROM_DDP).read_text(encoding="utf-8"))
    assert "offbeat as ob" not in before
    assert "peer" not in before.partition("def main")[2]
    (tmp_path / "before.py").write_text(before, encoding="utf-8")
    check_accuracy(typed("torchrun --nproc-per-node 1 before.py", tmp_path))


# In this process, which has paid for importing torch already


def run_script(path: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, object]:
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    return runpy.run_path(str(path), run_name="__main__")


STRATEGIES = list(runpy.run_path(str(DIGITS))["STRATEGIES"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_strategy_by_flag(
    strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Where the clock ends a round, a fast machine makes few updates of many samples, and needs more to learn as much.
    samples = "15000" if strategy == "async-timed" else "3000"
    run_script(DIGITS, "--strategy", strategy, "--samples", samples, monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    check_ranks(printed, range(1, 2), 2)
    assert f"{strategy} on Sequential, 1 worker: " in printed


def test_gradients_by_the_clock_in_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_script(ANYTIME, "--seconds", "0.02", "--updates", "80", monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    found = re.fullmatch(r"(\d+) updates in [\d.]+ s, accuracy ([\d.]+)\nsamples per update: (\d+) to (\d+)\n", printed)
    assert found is not None, printed
    updates, accuracy, least, most = (float(number) for number in found.groups())
    assert updates >= 1
    assert 0 < least <= most
    assert accuracy > 0.4
