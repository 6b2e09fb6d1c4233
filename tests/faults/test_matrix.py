"""Every cell of the fault matrix: nothing hangs, no process is left, no sample is applied twice, no traceback."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from cells import CELLS, MEANINGS, QUICK, Cell
from commands import Hung, processes_in, run_forked, run_new

from offbeat.core.sample_ledger import SampleLedger
from offbeat.failpoints import REACHED_VARIABLE, VARIABLE
from offbeat.launch.mpirun_command import mpirun_command
from offbeat.records.files import find_runs, read_run
from offbeat.records.schema import Dropped, Update, of_kind

OFFBEAT = [sys.executable, "-m", "offbeat"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
PAGE = Path(__file__).parents[2] / "docs/faults.md"

CLUSTER = """
silence_seconds = 2.0
[[workers]]
workers = {workers}
seconds_per_call = 0.01
"""


def command(cell: Cell, directory: Path) -> list[str]:
    """A run of some seconds with two workers, or three peers."""
    workers = 3 if cell.system == "gossip" else 2
    (directory / "cluster.toml").write_text(CLUSTER.format(workers=list(range(workers))))
    strategy = {"hub": "fmb", "gossip": "gossip", "mpi": "async-fmb"}[cell.system]
    words = ["train", "quadratic", strategy, "--until", "4s", "--cluster", str(directory / "cluster.toml")]
    words += ["--evaluate", "0.2s", "--checkpoint-seconds", "0.4", "--patience-seconds", "20", "--no-report"]
    words += ["--out", cell.out or str(directory / "out"), "--batch", "16"]
    if cell.system != "gossip":
        words += ["--hang-seconds", "1", "--hang-factor", "3"]
    return words if cell.system == "mpi" else [*words, "--workers", str(workers)]


def run(words: list[str], cell: Cell, directory: Path, failpoints: str = "") -> tuple[int, str]:
    """Run `offbeat WORDS` to its end, of which nothing may be left; its exit code and what it wrote to stderr."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OFFBEAT_", "OMPI_"))}
    variables |= {"OMP_NUM_THREADS": "1", **AS_ROOT, REACHED_VARIABLE: str(directory / "reached")}
    variables |= {VARIABLE: failpoints} if failpoints else {}
    try:
        if cell.system == "mpi":
            result = run_new([*mpirun_command(3), *OFFBEAT, *words], directory, variables, cell.limits)
        elif cell.limits:
            result = run_new([*OFFBEAT, *words], directory, variables, cell.limits)
        else:
            result = run_forked(words, directory, variables)
    except Hung as hung:
        pytest.fail(f"{cell.name}: it hung; it had written:\n{hung}")
    wait_until_none_is_left(directory)
    return result


def wait_until_none_is_left(directory: Path) -> None:
    """What was started to resume a stopped process sleeps for its time; all else has to end at once."""
    until = time.monotonic() + 10.0
    while left := list(processes_in(directory)):
        assert time.monotonic() < until, [Path(f"/proc/{number}/cmdline").read_bytes() for number in left]
        time.sleep(0.05)


def damage(directory: Path, pattern: str, how: str) -> None:
    """Damage the files of a run that match a pattern."""
    files = sorted(directory.glob(pattern))
    assert files
    for path in files:
        content = path.read_bytes()
        middle = len(content) // 2
        match how:
            case "truncated":
                path.write_bytes(content[:middle])
            case "flipped":
                path.write_bytes(content[:middle] + bytes([content[middle] ^ 0x80]) + content[middle + 1 :])
            case "empty":
                path.write_bytes(b"")
            case "removed":
                path.unlink()
            case "incomplete":
                path.write_bytes(content + b'{"kind":"round","at":1')


def check_samples(cell: Cell, directory: Path) -> None:
    """No sample was applied twice.

    A peer that crashes loses what it has not exchanged, and computes that again: its samples are counted per life,
    which begins with version 1.
    """
    records = read_run(directory)
    ledgers: dict[int, SampleLedger] = {}
    versions: dict[int, int] = {}
    applied = 0
    for update in of_kind(records, Update):
        if cell.system == "gossip" and update.version <= versions.get(update.rank, 0):
            del ledgers[update.rank]
        versions[update.rank] = update.version
        for part in update.contributions:
            ledgers.setdefault(part.rank, SampleLedger()).add(part.first, part.stop)  # raises if it is there already
            applied += part.stop - part.first
    for dropped in of_kind(records, Dropped):
        ledgers.setdefault(dropped.rank, SampleLedger()).add(dropped.first, dropped.stop)
    assert applied > 0


def check_sentence(cell: Cell, code: int, errors: str) -> None:
    """A run that does not go on says why in a sentence; one that is killed can say nothing."""
    assert "Traceback" not in errors, errors
    if code >= 0 and cell.outcome != "goes on":
        assert code in (1, 2) or cell.system == "mpi", (code, errors)
        assert "offbeat: " in errors, errors


PARAMETERS = [pytest.param(cell, id=cell.name, marks=() if cell.quick else pytest.mark.faults) for cell in CELLS]


@pytest.mark.parametrize("cell", PARAMETERS)
def test_a_fault_has_its_expected_outcome(cell: Cell, tmp_path: Path) -> None:
    code, errors = run(command(cell, tmp_path), cell, tmp_path, cell.failpoints)
    reached = (tmp_path / "reached").read_text().splitlines() if cell.failpoints else []
    assert sorted(reached) == sorted(filter(None, cell.failpoints.split("; "))), f"not every fault came: {errors}"
    if cell.outcome == "goes on":
        assert code == 0, errors
        assert "Traceback" not in errors, errors
        (directory,) = find_runs([tmp_path / "out"])
        check_samples(cell, directory)
        return
    assert code != 0 or cell.system == "mpi", errors  # mpirun has 0 for what its processes survive
    check_sentence(cell, code, errors)
    if cell.out is not None or cell.limits:
        return
    (directory,) = [path.parent for path in (tmp_path / "out").glob("*/run.json")] or [tmp_path / "out"]
    if cell.damage is not None:
        damage(directory, *cell.damage)
    code, errors = run(["train", "--resume", str(directory), "--no-report"], cell, tmp_path)
    assert "Traceback" not in errors, errors
    if cell.outcome == "ends":
        assert code != 0, errors
        assert "offbeat: " in errors, errors
        return
    assert code == 0, errors
    check_samples(cell, directory)


def test_the_page_lists_every_cell_and_its_outcome() -> None:
    assert PAGE.read_text() == page()


def test_a_dozen_cells_are_quick() -> None:
    assert {cell.name for cell in CELLS if cell.quick} == QUICK
    assert len(QUICK) == 12
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def page() -> str:
    """The page of the matrix."""
    lines = [
        "# Faults",
        "",
        "What comes of a fault, by the process that it happens to and by the moment. `make faults` makes each of them",
        "happen in a run of real processes: two workers of a hub (`fmb`), three peers (`gossip`), or two workers of a",
        "hub under mpirun (`async-fmb`). In every case nothing hangs, no process is left behind, no sample is applied",
        "twice, and what ends a run is said in one sentence.",
        "",
        *(f"- **{outcome}**: {meaning}." for outcome, meaning in MEANINGS.items()),
        "",
    ]
    for system in dict.fromkeys(cell.system for cell in CELLS):
        lines += [f"## {system}", "", "| process | fault | moment | outcome |", "|---|---|---|---|"]
        lines += [f"| {c.who} | {c.fault} | {c.moment} | {c.outcome} |" for c in CELLS if c.system == system]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
