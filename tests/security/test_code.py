"""Python files that a run names are not run unless the user has allowed it: a run may come from somewhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbeat.cli import class_lookup, main
from offbeat.errors import ConfigurationError

TRAP = "from pathlib import Path\nPath('was-run').touch()\n"


@pytest.mark.parametrize("entry", ["trap.py:Mine", {"name": "trap.py:Mine", "batch": 4}])
@pytest.mark.parametrize("field", ["strategy", "workload"])
@pytest.mark.parametrize("allowed", [[], ["other.py"]])
def test_a_file_is_run_only_if_it_is_allowed(
    field: str, entry: object, allowed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trap.py").write_text(TRAP)
    with pytest.raises(ConfigurationError, match=r"names trap.py:Mine, .* if you trust it, add: --allow trap\.py"):
        class_lookup.load_files({field: entry}, "the run", allowed)
    assert not Path("was-run").exists()
    with pytest.raises(ConfigurationError, match=r"in trap\.py 'Mine'"):
        class_lookup.load_files({field: entry}, "the run", ["./trap.py"])
    assert Path("was-run").exists()


@pytest.mark.parametrize("command", [["replay"], ["train", "--resume"]], ids=" ".join)
def test_a_directory_of_somebody_else_runs_nothing(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["quadratic", "fmb", "--workers", "1", "--until", "500", "--no-report", "--quiet", "--out", "runs"]
    assert main(["simulate", *words]) == 0
    (directory,) = Path("runs").glob("fmb-*")
    header = json.loads((directory / "run.json").read_text())
    header["engine"] = "simulated" if command == ["replay"] else "live"
    assert header["experiment"]["strategy"]["name"] == "fmb"
    header["experiment"]["strategy"]["name"] = "trap.py:Mine"
    (directory / "run.json").write_text(json.dumps(header))
    Path("trap.py").write_text(TRAP)
    assert main([*command, str(directory)]) == 2
    assert "if you trust it, add: --allow trap.py" in capsys.readouterr().err
    assert not Path("was-run").exists()
