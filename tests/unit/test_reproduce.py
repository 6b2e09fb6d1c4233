"""Studies: those of the package are consistent, and `offbeat reproduce` runs, stores and redraws one."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from offbeat.cli import main
from offbeat.errors import ConfigurationError
from offbeat.lab.plots.figures import CELLS
from offbeat.lab.reproduction.findings import check_study, compute_findings, format_interval, spell_interval
from offbeat.lab.reproduction.quantities import QUANTITIES, common_training_loss
from offbeat.lab.reproduction.runs import METRICS, read_study, tasks_of
from offbeat.lab.reproduction.study import (
    SCALES,
    Scale,
    Study,
    StudyRun,
    directory,
    load_study,
    names,
    study_of,
)
from offbeat.lab.reproduction.study_archive import archive, open_results
from offbeat.records.comparison import Interval
from offbeat.records.files import HEADER, RECORDS, find_runs
from offbeat.records.schema import RunRecords

OWN = """
title = "Digits by two strategies"
original = "none"
scaled = "everything"
expect = "something"
minutes = 1
columns = ["seconds_to_target", "seconds_to_common_loss", "accuracy", "seconds_per_epoch"]
epoch = 1000
each = {microbatch = 8}

[base]
workload = "digits"
workers = 3
seeds = 2
until = 1500
target = "accuracy:0.3"

[[base.strategy]]
name = "fmb"
batch = 16

[[base.strategy]]
name = "amb"
batch = 16

[[case]]
label = "even"
x = 1

[[case]]
label = "niagara"
x = 2
cluster = {straggle = "niagara"}

[[figure]]
file = "curves"
caption = "Curves."
cells = [["accuracy over time", "training loss over steps"]]
by = "both"

[[figure]]
file = "against"
caption = "Against."
x = "case (number)"
y = "seconds_per_epoch"
published = {"fmb" = [[1, 2.0]]}

[[claim]]
quantity = "seconds_per_epoch"
of = {strategy = "fmb", case = "niagara"}
over = {strategy = "amb", case = "niagara"}
sentence = "AMB was {ours} times as fast."
published = "1.3 to 1.5 times"
low = 1.3
high = 1.5

[full.base]
workers = 5
"""

INLINE = ["--processes", "1", "--no-figures"]
"""Most tests need neither processes of their own nor figures."""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.toml"
    path.write_text(OWN, encoding="utf-8")
    return path


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", names())
def test_a_study_names_only_quantities_plots_and_cases_that_exist(name: str, scale: Scale) -> None:
    study = load_study(name, scale)
    description = study.description
    sides = {(case.label, label) for case in study.cases for label in case.plan.labels}
    labels = {label for _, label in sides}
    assert set(description.columns) <= set(QUANTITIES)
    for drawing in description.figures:
        assert bool(drawing.cells) != bool(drawing.y), drawing.file
        assert {cell for row in drawing.cells for cell in row} <= set(CELLS)
        assert set(drawing.cases) <= {case.label for case in study.cases}
        assert {*drawing.strategies, *drawing.published} <= labels
        assert not drawing.y or drawing.y in QUANTITIES
        assert not drawing.y or any(case.x is not None for case in study.cases)
    assert description.claims, "a study compares with what was published"
    for claim in description.claims:
        assert claim.quantity in QUANTITIES
        assert "{ours}" in claim.sentence
        for side in (claim.of, claim.over):
            assert side is None or (side.case, side.strategy) in sides
    assert len({drawing.file for drawing in description.figures}) == len(description.figures)
    check_study(study)


@pytest.mark.parametrize("name", names())
def test_the_comment_at_the_top_of_a_study_describes_the_original_and_the_command(name: str) -> None:
    text = (directory() / f"{name}.toml").read_text(encoding="utf-8")
    head = "\n".join(line for line in text.split("title =")[0].splitlines() if line.startswith("#"))
    for words in ("The original:", "Scaled down by default:", f"offbeat reproduce {name}"):
        assert words in head
    assert "expect" in head.lower()


def test_the_full_scale_replaces_the_default(own: Path) -> None:
    assert {case.plan.workers for case in load_study(str(own)).cases} == {3}
    assert {case.plan.workers for case in load_study(str(own), "full").cases} == {5}
    assert all(strategy.microbatch == 8 for strategy in load_study(str(own)).cases[0].plan.strategies)  # type: ignore[attr-defined]


def reproduce(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["reproduce", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def without_directories(cases: dict[str, Any]) -> dict[str, Any]:
    return {
        label: {**case, "runs": [{**run, "directory": None} for run in case["runs"]]} for label, case in cases.items()
    }


@pytest.mark.slow
def test_a_study_is_run_printed_archived_and_redrawn(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = reproduce(str(own), "--out", "here", "--json", "--save", "kept.zip", capsys=capsys)
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    assert [(row["case"], row["strategy"], row["runs"]) for row in result["rows"]] == [
        ("even", "fmb", 2), ("even", "amb", 2), ("niagara", "fmb", 2), ("niagara", "amb", 2),
    ]  # fmt: skip
    for row in result["rows"]:
        cell = row["seconds_per_epoch"]
        assert cell["low"] <= cell["mean"] <= cell["high"]
        assert cell["count"] == 2
    (finding,) = result["findings"]
    assert finding["ours"]["mean"] > 1
    assert finding["sentence"].startswith("AMB was ")
    assert set(result["cases"]) == {"even", "niagara"}
    assert set(result["cases"]["niagara"]) >= {"runs", "speedup", "baseline", "target"}
    figures = {f"{file}.{form}" for file in ("curves", "against") for form in ("png", "svg", "pdf")}
    assert {Path(path).name for path in result["figures"]} == figures
    assert all(Path(path).stat().st_size > 1000 for path in result["figures"])
    assert len(err.splitlines()) == 8  # a line for each run that has ended

    # From the archive: the same, and nothing is trained.
    code, out, err = reproduce("--redraw", "kept.zip", "--out", "again", "--json", capsys=capsys)
    assert code == 0, err
    again: dict[str, Any] = json.loads(out)
    assert (again["rows"], again["findings"]) == (result["rows"], result["findings"])
    assert without_directories(again["cases"]) == without_directories(result["cases"])
    for path in Path("here").glob("*.svg"):
        assert (Path("again") / path.name).read_bytes() == path.read_bytes()

    # As a table.
    code, out, err = reproduce("--redraw", "here", "--no-figures", capsys=capsys)
    assert code == 0, err
    assert "figure:" not in out
    assert "means over 2 seeds; ± is half of a 95% interval" in out
    assert finding["sentence"] in out


def test_a_finished_run_is_not_repeated(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(own), "--out", "here", "--seeds", "1", "--quiet", "--json", *INLINE)
    code, before, err = reproduce(*words, capsys=capsys)
    assert (code, err) == (0, "")
    whole, cut, *others = find_runs([Path("here")])
    stamps = {run: (run / RECORDS).stat().st_mtime_ns for run in (whole, *others)}
    lines = (cut / RECORDS).read_bytes().splitlines(keepends=True)
    (cut / RECORDS).write_bytes(b"".join(lines[: len(lines) // 2]))
    code, after, err = reproduce(*words, capsys=capsys)
    assert (code, err) == (0, "")
    assert json.loads(after) == json.loads(before)
    assert (cut / RECORDS).read_bytes().splitlines(keepends=True) == lines
    assert {run: (run / RECORDS).stat().st_mtime_ns for run in stamps} == stamps


def test_a_directory_with_other_runs_is_refused(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "digits", "fmb", "--workers", "2", "--until", "200", "--out", "other", "--no-report"]) == 0
    capsys.readouterr()
    code, _, err = reproduce(str(own), "--out", "other", capsys=capsys)
    assert (code, err) == (2, "offbeat: other holds other runs; name another place with --out\n")
    code, _, err = reproduce(str(own), "--out", "here", "--seeds", "1", "--quiet", *INLINE, capsys=capsys)
    assert code == 0, err
    code, _, err = reproduce(str(own), "--out", "here", "--scale", "full", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("offbeat: here holds the study own at scale default")
    own.write_text(OWN.replace("until = 1500", "until = 900"), encoding="utf-8")
    code, _, err = reproduce(str(own), "--out", "here", "--seeds", "1", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "holds a run with other settings" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no study is named; type one of "),
        (["anytim"], "unknown study 'anytim'; did you mean 'anytime'?"),
        (["anytime", "--scale", "huge"], "there is no scale 'huge'; type --scale default or --scale full"),
        (["anytime", "--seeds", "0"], "--seeds must be 1 or more, but is 0"),
        (["anytime", "--processes", "0"], "--processes must be 1 or more, but is 0"),
        (["nothing.toml"], "the study file nothing.toml cannot be read: no such file or directory"),
        (["--redraw", "nowhere"], "nowhere holds no study; name a directory or an archive"),
        (["--redraw", "bad.zip"], "bad.zip cannot be read"),
        (["anytime", "--redraw", "nowhere"], "--redraw takes its study from the records; leave the name out"),
    ],
)
def test_a_mistake_is_answered_in_one_sentence(
    words: list[str], sentence: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.zip").write_bytes(b"not an archive")
    code, out, err = reproduce(*words, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert sentence in err


def test_missing_data_is_reported_before_anything_is_run(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OFFBEAT_DATA", str(own.parent / "empty"))
    own.write_text(OWN.replace('"digits"', '"fashion-mnist"'), encoding="utf-8")
    code, _, err = reproduce(str(own), capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "offbeat data get fashion-mnist" in err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("[base]\nworkload", "[bse]\nworkload"), "names no workload"),
        (('label = "niagara"', 'label = "even"'), "two cases of one label"),
        (("minutes = 1", 'minutes = "one"'), "cannot be read"),
        (('x = "case (number)"', 'xs = "case (number)"'), "cannot be read"),
        (("batch = 16", "batsch = 16"), "batsch"),
    ],
)
def test_a_file_that_is_no_study_is_refused(change: tuple[str, str], sentence: str, own: Path) -> None:
    own.write_text(OWN.replace(*change, 1), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=sentence):
        load_study(str(own))


def of_own(own: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Study, list[Any]]:
    assert main(["reproduce", str(own), "--out", "here", "--quiet", "--json", "--seeds", "1", *INLINE]) == 0
    capsys.readouterr()
    return read_study(Path("here"))


def test_quantities_have_the_values_of_their_definitions(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, runs = of_own(own, capsys)
    even = [run for run in runs if run.case == "even"]
    level = common_training_loss(even)
    for run, seconds in zip(even, QUANTITIES["seconds_to_common_loss"].of(even, 1000), strict=True):
        assert seconds is not None
        assert 0 < seconds <= run.summary.seconds
    assert 0 < level < 2.5
    for run, value in zip(runs, QUANTITIES["seconds_per_epoch"].of(runs, 1000), strict=True):
        assert value == pytest.approx(run.summary.seconds / run.summary.samples * 1000)
    for run, value in zip(runs, QUANTITIES["samples_per_second"].of(runs, 1), strict=True):
        assert value == pytest.approx(run.summary.samples / run.summary.seconds)
    row = compute_findings(study, runs).rows[0]
    assert row.cells["accuracy"] == Interval(even[0].summary.accuracy or 0.0, None, None, 1)


def test_intervals_are_written_with_significant_digits() -> None:
    assert format_interval(None) == "–"
    assert (
        format_interval(Interval(1.234567, None, None, 1))
        == spell_interval(Interval(1.234567, None, None, 1))
        == "1.23"
    )
    assert format_interval(Interval(12345.6, 12345.1, 12346.1, 3)) == "12,346 ±0.5"
    assert format_interval(Interval(1.5e6, 1e6, 2e6, 3), QUANTITIES["bytes_sent"]) == "1.50 MB ±500 kB"
    assert spell_interval(Interval(12345.6, 12000.0, 13000.0, 3)) == "12,346 (12,000–13,000)"
    assert format_interval(Interval(0.5, 0.25, 0.75, 2), QUANTITIES["accuracy"]) == "0.500 ±0.250"
    assert spell_interval(Interval(0.5, 0.25, 0.75, 2), QUANTITIES["accuracy"]) == "0.500 (0.250–0.750)"


def test_a_mean_over_some_of_the_runs_says_how_many(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A target that only some runs reach must not look like one that all reach."""
    assert format_interval(Interval(2.0, 1.0, 3.0, 2), None, 3) == "2 ±1 (2 of 3)"
    own.write_text(OWN.replace('quantity = "seconds_per_epoch"', 'quantity = "seconds_to_target"'), encoding="utf-8")
    study, runs = of_own(own, capsys)
    more = [dataclasses.replace(run, records=with_seed(run, 1)) for run in runs]
    missed = [
        dataclasses.replace(run, summary=msgspec.structs.replace(run.summary, seconds_to_target=None))
        if run.strategy == "fmb"
        else run
        for run in more
    ]
    findings = compute_findings(study, [*runs, *missed])
    assert "That is of 1 of 2 seeds; the others have no such number." in findings.sentences[0].sentence
    cell = findings.rows[0].cells["seconds_to_target"]
    assert cell is not None
    assert (cell.count, findings.rows[0].runs) == (1, 2)


def with_seed(run: StudyRun, seed: int) -> RunRecords:
    return dataclasses.replace(run.records, header=msgspec.structs.replace(run.records.header, seed=seed))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('"accuracy", "seconds_per_epoch"', '"accuracies"'), "unknown quantity 'accuracies'"),
        (('y = "seconds_per_epoch"', 'y = "second"'), "unknown quantity 'second'"),
        (('over = {strategy = "amb"', 'over = {strategy = "abm"'), "claims something of"),
        (("{ours}", "{mine}"), "something else in braces"),
        (('case = "niagara"', 'case = "niagra"'), "claims something of"),
        (('by = "both"', 'by = "strategy"'), "would draw several cases or strategies as one line (amb, fmb)"),
        (("epoch = 1000", "tuning_seeds = [1, 7]"), "own reports seeds that its settings were chosen on (1); report"),
        (("high = 1.5", 'high = 1.5\ncause = {text = "t", of = {strategy = "fmb"}}'), "claims something of"),
    ],
)
def test_an_unknown_quantity_or_run_is_refused_before_anything_is_run(
    change: tuple[str, str], sentence: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own.write_text(OWN.replace(*change), encoding="utf-8")
    code, _, err = reproduce(str(own), "--out", "here", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert sentence in err
    assert not Path("here").exists()


def test_two_runs_never_share_a_directory(own: Path) -> None:
    own.write_text(
        OWN.replace('label = "niagara"\nx', 'label = "even?"\nx').replace('label = "even"', 'label = "even!"')
    )
    with pytest.raises(ConfigurationError, match="would share the directory"):
        tasks_of(load_study(str(own)), Path("here"))


def test_an_archive_contains_the_records_and_the_study_only(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, runs = of_own(own, capsys)
    first, second = archive(Path("here"), Path("a.zip")), archive(Path("here"), Path("b.zip"))
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as held:
        assert {Path(name).name for name in held.namelist()} == {
            "study.json", "study.toml", HEADER, METRICS, RECORDS,
        }  # fmt: skip
    shutil.rmtree("here")
    with open_results(first) as place:
        again, read = read_study(place)
        assert [run.records.header for run in read] == [run.records.header for run in runs]
        assert compute_findings(again, read) == compute_findings(study, runs)
        assert len(tasks_of(again, place)) == len(tasks_of(study, place)) == 4


def test_live_cases_run_on_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, place = tmp_path / "live.toml", tmp_path / "here"
    path.write_text(OWN.replace("x = 1\n", 'x = 1\nengine = "live"\n').replace("workers = 3", "workers = 2"))
    words = (str(path), "--out", str(place), "--seeds", "1", "--json", *INLINE)
    code, out, err = reproduce(*words, capsys=capsys)
    assert code == 0, err
    runs = find_runs([place])
    engines = {run.parent.name: json.loads((run / HEADER).read_text())["engine"] for run in runs}
    assert engines == {"even": "live", "niagara": "simulated"}
    assert [row["runs"] for row in json.loads(out)["rows"]] == [1, 1, 1, 1]
    archive(place, tmp_path / "kept.zip")
    code, again, err = reproduce("--redraw", str(tmp_path / "kept.zip"), "--json", "--no-figures", capsys=capsys)
    assert code == 0, err
    assert json.loads(again)["rows"] == json.loads(out)["rows"]
    code, same, err = reproduce(*words, capsys=capsys)  # what has ended is not run again, live runs neither
    assert (code, json.loads(same)["rows"]) == (0, json.loads(out)["rows"]), err


def test_a_study_needs_its_table() -> None:
    with pytest.raises(ConfigurationError, match="no table"):
        study_of("x", {}, "default")
