"""The settings of the originals: each is that of our study, or says why not; the page has all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import ConfigurationError
from offbeat.lab.reproduction import published_settings, study
from offbeat.lab.reproduction.published_settings import (
    PublishedSetting,
    compare_settings,
    format_setting,
    read_settings,
)
from scripts import load_script

DOCS = Path(__file__).parents[2] / "docs"
STUDY = """
title = "t"
original = "o"
scaled = "s"
expect = "e"
minutes = 1
columns = ["accuracy"]
each = {batch = 32}

[base]
workload = {name = "digits", hidden = 16}
workers = 3
until = 1500
cluster = {straggle = "niagara"}

[[base.strategy]]
name = "fmb"
batch = 16
optimizer = {name = "sgd", lr = 0.1, momentum = 0.9}

[[case]]
label = "five"
workers = 5

[full]
each = {batch = 64}
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one study, in the place of that of the package."""
    (tmp_path / "made.toml").write_text(STUDY, encoding="utf-8")
    for module in (study, published_settings):
        monkeypatch.setattr(module, "directory", lambda: tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("docs/draw_settings.py")


def setting(published: Any, path: str = "", differs: str = "") -> PublishedSetting:
    return PublishedSetting(
        study="made", setting="s", published=published, source="a paper", path=path, differs=differs
    )


def test_all_settings_of_the_originals_are_ours_or_say_why_not() -> None:
    rows = read_settings()
    assert len(compare_settings(rows)) == len(rows)
    assert {row.study for row in rows} == set(study.names())


def test_the_page_has_what_its_script_makes_of_the_settings(script: Any) -> None:
    text = (DOCS / "reproducing.md").read_text(encoding="utf-8")
    assert script.page(text, compare_settings(read_settings())) == text


@pytest.mark.parametrize(
    ("published", "path"),
    [
        (64, "base.strategy.0.batch"),  # `each`, which is merged into strategies, at scale full
        (64, "case.0.strategy.0.batch"),
        (64, "each.batch"),
        (5, "case.0.workers"),
        (3.0, "base.workers"),
        ("niagara", "base.cluster.straggle"),
        ("niagara", "case.0.cluster.straggle"),
        ("digits", "base.workload.name"),
        (0.9, "base.strategy.0.optimizer.momentum"),
        (0.0, "base.strategy.0.optimizer.weight_decay"),  # a default, which the file does not have
        ("shared", "base.workload.split"),
    ],
)
def test_a_setting_that_is_the_same_needs_no_reason(published: Any, path: str, made: Path) -> None:
    (compared,) = compare_settings([setting(published, path)])
    assert format_setting(compared.ours) == format_setting(published)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (setting(16, "base.strategy.0.batch"), "is 16 in the original and 64 here; change it, or say why in differs"),
        (setting(True, "base.strategy.0.optimizer.momentum"), "is yes in the original and 0.9 here"),
        (setting("GPUs"), "is GPUs in the original and – here"),
        (setting(64, "each.batch", "no reason"), "is the same here; leave differs out"),
        (setting(64, "base.strategy.1.batch"), "has the path base.strategy.1.batch, which the study does not have"),
        (setting(64, "base.strategy.batch", "why"), "has the path base.strategy.batch"),
        (PublishedSetting(study="mad", setting="s", published=1, source="s"), "unknown study 'mad'; did you mean"),
    ],
)
def test_a_setting_without_reason_or_place_is_refused(row: PublishedSetting, sentence: str, made: Path) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        compare_settings([row])
    assert sentence in str(refusal.value)


def test_settings_are_read_from_a_file_and_become_a_table(made: Path, script: Any) -> None:
    path = made / "published_settings.toml"
    path.write_text(
        '[[setting]]\nstudy = "made"\nsetting = "batch"\npublished = 64\nsource = "p. 3"\npath = "each.batch"\n'
        '[[setting]]\nstudy = "made"\nsetting = "data"\npublished = "C4"\nsource = "p. 4"\npath = "base.workload"\n'
        'differs = "no text here"\n',
        encoding="utf-8",
    )
    assert study.names() == ["made"]  # the file itself is no study
    before = f"# Page\n\n{script.FIRST}\nold\n{script.LAST}\nend\n"
    text = script.page(before, compare_settings(read_settings()))
    assert "old" not in text
    assert text.startswith("# Page\n")
    assert text.endswith("end\n")
    assert "### made" in text
    assert "| batch | 64 | 64 |  | p. 3 |" in text
    assert "| data | C4 | digits, hidden 16 | no text here | p. 4 |" in text
    path.write_text('[[setting]]\nstudy = "made"\nsettings = "batch"\n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"published_settings\.toml cannot be read"):
        read_settings()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (False, "no"), (1e-8, "1e-08"), (1500000, "1,500,000"), (250000.0, "250,000"), (0.5, "0.5"),
        ([0.9, 0.999], "0.9, 0.999"), ({"lr": 0.1, "name": "sgd"}, "sgd, lr 0.1"),
    ],
)  # fmt: skip
def test_settings_are_written_for_people(value: Any, text: str) -> None:
    assert format_setting(value) == text
