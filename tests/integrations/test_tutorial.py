"""The tutorial notebook runs from top to bottom, and the outputs in the file are those of its code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

DOCS = Path(__file__).parents[2] / "docs"
LIVE = ("ob.train(", '"launch"', "read_run(")
"""Cells whose numbers, and words about lost messages and the like, depend on the speed of the machine."""
NUMBER = r"\d[\d,]*(?:\.\d+)?"
Cell = dict[str, Any]


def code_cells(path: Path) -> list[Cell]:
    cells: list[Cell] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def shown(cell: Cell) -> str:
    """What the outputs of a cell say: HTML without figures and tags, or else text."""
    texts = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        text = "".join(data.get("text/html") or data.get("text/plain") or output.get("text", []))
        text = re.sub(r"<(svg|style)\b.*?</\1>", " ", text, flags=re.DOTALL)
        texts.append(re.sub(r"<[^>]+>", " ", text))
    return " ".join(" ".join(texts).split())


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(NUMBER, text)]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    target = tmp_path_factory.mktemp("tutorial") / "executed.ipynb"
    subprocess.run([sys.executable, str(DOCS / "execute_tutorial.py"), str(target)], check=True, timeout=500)
    return code_cells(target)


def test_every_cell_runs_and_shows_what_the_file_says(executed: list[Cell]) -> None:
    """The words exactly; the numbers of simulations nearly, since other processors and builds of torch round."""
    committed = code_cells(DOCS / "tutorial.ipynb")
    assert [cell["source"] for cell in executed] == [cell["source"] for cell in committed]
    for new, old in zip(executed, committed, strict=True):
        kinds = [[output["output_type"] for output in cell["outputs"]] for cell in (new, old)]
        assert kinds[0] == kinds[1]
        if not any(word in "".join(new["source"]) for word in LIVE):
            assert re.sub(NUMBER, "N", shown(new)) == re.sub(NUMBER, "N", shown(old))
            assert numbers(shown(new)) == [pytest.approx(value, rel=0.15, abs=1) for value in numbers(shown(old))]


def test_results_are_shown_with_figures_and_live_runs_train(executed: list[Cell]) -> None:
    barrier, comparison = executed[1], executed[3]
    for cell in (barrier, comparison):
        assert "".join(cell["outputs"][-1]["data"]["text/html"]).count("<svg") == 2
    live, loop = (shown(cell) for cell in executed if any(word in "".join(cell["source"]) for word in LIVE[:2]))
    assert "async-fmb on custom, 2 workers, seed 0" in live
    assert "gossip on Sequential, 2 workers: 20,000 samples in 400 updates" in loop


def test_progress_is_a_line_of_text_in_the_file_that_is_kept(executed: list[Cell]) -> None:
    for cell, text in ((executed[1], r"fmb, seed 0: target reached after [\d.]+ s"), (executed[3], "9 of 9 runs")):
        data = cell["outputs"][0]["data"]
        assert list(data) == ["text/plain"]
        assert re.fullmatch(text, "".join(data["text/plain"]))
