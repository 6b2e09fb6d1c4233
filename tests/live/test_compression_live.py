"""Compressed messages between real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accounts import check_accounts, check_traffic

from offbeat.cli import main
from offbeat.records.files import read_run

CODED = {"async-fmb": ("Gradient", "Parameters"), "gossip": ("Offer", "Answer")}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["async-fmb", pytest.param("gossip", marks=pytest.mark.slow)])
def test_digits_are_learned_with_a_third_of_the_bytes(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "digits", strategy, "--compression", "int8", "--workers", "2", "--until", "40000"]
    flags = ["--batch", "16", "--out", str(tmp_path / "run"), "--json", "--no-report", "--quiet"]
    assert main([*words, *flags]) == 0
    [summary] = json.loads(capsys.readouterr().out)["runs"]
    assert summary["accuracy"] > 0.9
    run = read_run(Path(summary["directory"]))
    check_traffic(run)
    if strategy != "gossip":
        check_accounts(run)
    for kind in CODED[strategy]:
        flow = summary["traffic"][kind]
        assert flow["messages"] > 10
        assert flow["bytes"] < flow["bytes_uncompressed"] / 3
