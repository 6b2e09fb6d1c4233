"""`offbeat sample`."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_texts import make_text

from offbeat.cli import main

SMALL = ["--depth", "1", "--width", "16", "--heads", "2", "--context", "32"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A short simulated run on a made-up text."""
    monkeypatch.chdir(tmp_path)
    make_text(monkeypatch, tmp_path / "cache", "shakespeare")
    command = ["simulate", "shakespeare", "fmb", *SMALL, "--workers", "2", "--until", "256", "--out", "runs"]
    assert main([*command, "--test-examples", "5", "--no-report"]) == 0
    capsys.readouterr()
    return tmp_path / "runs"


def test_a_text_begins_with_its_prompt_and_repeats(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["sample", str(run), "--prompt", "KING", "--bytes", "60", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("KING") for text in texts)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", ""], "--prompt is empty"),
        (["--temperature", "inf"], "--temperature must be 0 or more and finite"),
        (["--bytes", "0"], "--bytes must be"),
    ],
)
def test_bad_options_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(["sample", str(run), *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_without_a_text_or_a_result_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [result] = run.rglob("result.offbeat")
    result.unlink()
    assert main(["sample", str(run)]) == 2
    assert "has no trained parameters" in capsys.readouterr().err
    assert main(["simulate", "quadratic", "fmb", "--until", "100", "--out", "other", "--no-report"]) == 0
    capsys.readouterr()
    assert main(["sample", "other"]) == 2
    assert "was trained on quadratic, which is no text; these are: shakespeare" in capsys.readouterr().err
    assert main(["sample", "nowhere"]) == 2
    assert "there is no run at nowhere" in capsys.readouterr().err
