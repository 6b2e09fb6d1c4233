"""docs/results.md is generated from the records, and so is every figure on it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from offbeat.lab.reproduction.runs import read_manifest
from offbeat.lab.reproduction.study import load_study, names
from offbeat.lab.reproduction.study_archive import open_results
from scripts import load_script

DOCS = Path(__file__).parents[2] / "docs"
RECORDS_BYTES_MAX = 5_000_000


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("docs/draw_results.py")


def test_the_page_is_what_its_script_makes_of_the_records(script: Any) -> None:
    assert script.page(draw=False) == (DOCS / "results.md").read_text(encoding="utf-8")


def test_the_page_begins_with_one_table_of_all_claims() -> None:
    title, table, *_ = (DOCS / "results.md").read_text(encoding="utf-8").split("\n\n")
    head, _, *rows = table.splitlines()
    assert title == "# Results"
    assert head == "| claim | published | ours | verdict | command |"
    assert len(rows) == sum(len(load_study(name).description.claims) for name in names())
    assert {cell.split("`")[1] for cell in rows} == {f"offbeat reproduce {name}" for name in names()}


def test_the_records_in_the_repository_are_thinned_and_small() -> None:
    archives = sorted((DOCS / "results").glob("*.zip"))
    assert sum(path.stat().st_size for path in archives) <= RECORDS_BYTES_MAX
    for path in archives:
        with open_results(path) as place:
            assert read_manifest(place).thinned is not None, f"write {path.name} again with --redraw and --save"


def test_every_study_is_on_the_page_with_its_figures() -> None:
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    assert re.findall(r"^## ([\w-]+): ", text, flags=re.MULTILINE) == names()
    figures = re.findall(r"\]\((images/results/[^)]+)\)", text)
    archives = {path.stem for path in (DOCS / "results").glob("*.zip")}
    assert archives <= set(names())
    assert {figure.split("/")[2] for figure in figures} == archives
    assert text.count("Not run at these settings yet") == len(set(names()) - archives)
    drawn = {path.relative_to(DOCS).as_posix() for path in (DOCS / "images/results").rglob("*.svg")}
    assert set(figures) == drawn
