"""`offbeat calibrate` on real processes: the cluster that it writes serves `simulate` and `train`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from offbeat.cli import main
from offbeat.cluster.presets import load_cluster

QUICK = ["--workers", "2", "--seconds", "12", "--quiet"]


@pytest.mark.slow
def test_a_measured_cluster_can_be_simulated_and_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "digits", *QUICK, "--out", "here.toml", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    cluster = load_cluster("here.toml")
    assert printed["file"] == "here.toml"
    assert [worker["worker"] for worker in printed["workers"]] == [0, 1]
    assert all(worker["spread"]["max"] >= worker["spread"]["p50"] > 0 for worker in printed["workers"])
    assert cluster.measured
    assert cluster.speed_trace is not None
    assert cluster.seconds_per_sample + cluster.seconds_per_call > 0
    assert cluster.seconds_per_update > 0
    assert cluster.link.bytes_per_second is not None
    assert printed["cluster"]["seconds_per_call"] == tomllib.loads(Path("here.toml").read_text())["seconds_per_call"]
    words = ["digits", "fmb", "--cluster", "here.toml", "--workers", "2", "--until", "2000", "--quiet", "--no-report"]
    assert main(["simulate", *words, "--straggle", "cedar", "--out", "simulated"]) == 0
    assert main(["train", *words, "--out", "live"]) == 0
