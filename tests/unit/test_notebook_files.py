"""The tutorial notebook as a file; tests/integrations/test_tutorial.py executes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.ipynb"
SIZE_MAX = 400_000


def cells(kind: str) -> list[dict[str, Any]]:
    every = json.loads(TUTORIAL.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in every if cell["cell_type"] == kind]


def test_its_outputs_come_from_one_execution_from_top_to_bottom() -> None:
    code = cells("code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert "error" not in {output["output_type"] for output in outputs}
    assert "stderr" not in {output.get("name") for output in outputs}


def test_it_is_small_and_holds_nothing_of_the_machine_that_executed_it() -> None:
    text = TUTORIAL.read_text(encoding="utf-8")
    assert len(text.encode()) < SIZE_MAX
    assert not re.findall(r"/(?:home|root|tmp|work|usr|Users)/|0x[0-9a-f]{8}", text)
    assert json.loads(text)["metadata"]["language_info"] == {"name": "python"}


def test_its_links_resolve() -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)", "".join("".join(cell["source"]) for cell in cells("markdown")))
    assert len(links) >= 5
    assert [link for link in links if not (TUTORIAL.parent / link).is_file()] == []


def test_its_shown_results_are_tables_and_figures() -> None:
    html = [
        "".join(output["data"].get("text/html", ""))
        for cell in cells("code")
        for output in cell["outputs"][-1:]
        if "data" in output
    ]
    assert sum(text.count("<svg") for text in html) == 5
    assert sum("<table" in text for text in html) >= 8
