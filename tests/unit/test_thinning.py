"""Thinned records: whatever a quantity or a plot declares to read, it computes the same from that alone."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_records import a_gossip, a_toy

from offbeat.cli import main
from offbeat.errors import ConfigurationError
from offbeat.lab.plots.figures import CELLS, cell_reads, panel
from offbeat.lab.plots.style import svg_text
from offbeat.lab.reproduction.findings import compute_findings
from offbeat.lab.reproduction.quantities import FIRST_PARAMETERS, QUANTITIES
from offbeat.lab.reproduction.runs import MANIFEST, read_study
from offbeat.lab.reproduction.study import StudyRun
from offbeat.lab.reproduction.study_archive import archive, open_results
from offbeat.lab.reproduction.study_figures import draw_all
from offbeat.records.curves import ROUND_GROUPS_MAX
from offbeat.records.files import find_runs, read_run
from offbeat.records.metrics import end_of, summarize
from offbeat.records.schema import (
    AnyRecord,
    Consensus,
    Ended,
    Evaluation,
    Exchange,
    Membership,
    Round,
    RunRecords,
    Traffic,
    Undone,
    Update,
    of_kind,
)
from offbeat.records.thinning import CONSENSUS, STALENESS, TRAINING_LOSS, Reads, thin, union
from offbeat.strategies.hub.hub_worker import Welcome
from offbeat.strategies.local_training import Begin
from scripts import load_script

DOCS = Path(__file__).parents[2] / "docs"


def varied(run: RunRecords) -> RunRecords:
    """The same run, where the fields that made-up records leave constant differ from record to record."""
    dice = random.Random(run.header.label)

    def vary(record: AnyRecord) -> AnyRecord:
        if isinstance(record, Round):
            return msgspec.structs.replace(
                record, loss=20 * dice.random() + 1, samples=dice.randrange(5, 15), send_seconds=dice.random()
            )
        if isinstance(record, Update):
            return msgspec.structs.replace(record, learning_rate=dice.random(), messages=dice.randrange(1, 9))
        if isinstance(record, Evaluation):
            return msgspec.structs.replace(record, accuracy_top5=0.5 + dice.random() / 2)
        return record

    return dataclasses.replace(run, records=tuple(map(vary, run.records)))


def with_undone_updates(run: RunRecords) -> RunRecords:
    """The same run, which in its middle returns to an earlier version."""
    updates = list(of_kind(run, Update))
    middle = updates[len(updates) // 2]
    undone = Undone(
        at=middle.at, rank=0, version=9, to_version=5, samples=100, samples_total=middle.samples_total - 100
    )
    at = run.records.index(middle) + 1
    return dataclasses.replace(run, records=(*run.records[:at], undone, *run.records[at:]))


@pytest.fixture(scope="module")
def runs() -> list[RunRecords]:
    """Runs with and without a hub, one of which undoes updates, and one whose consensus distance is estimated."""
    made = [
        a_toy("fmb", 1, workers=4),
        with_undone_updates(a_toy("async-sgd", 1, workers=4)),
        a_gossip("gossip", peers=4),
        a_gossip("gossip-live", peers=4, live=True),
    ]
    return [varied(run) for run in made]


def thinned(runs: Sequence[RunRecords], reads: Reads) -> list[RunRecords]:
    return [dataclasses.replace(run, records=tuple(thin(run, reads))) for run in runs]


def values(name: str, runs: Sequence[RunRecords], whole: Sequence[RunRecords]) -> list[float | None]:
    """A quantity from records, and from the metrics of whole runs."""
    pairs = zip(runs, whole, strict=True)
    return QUANTITIES[name].of([StudyRun("", run, summarize(other)) for run, other in pairs], 1000)


@pytest.mark.parametrize("name", QUANTITIES)
def test_a_quantity_is_the_same_from_what_it_declares_to_read(name: str, runs: list[RunRecords]) -> None:
    expected = values(name, runs, runs)
    assert any(value is not None for value in expected)
    assert values(name, thinned(runs, QUANTITIES[name].reads), runs) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_a_plot_is_the_same_from_what_it_declares_to_read(name: str, runs: list[RunRecords]) -> None:
    whole = svg_text(panel(runs, [[name]]))
    assert "none recorded" not in whole
    assert svg_text(panel(thinned(runs, cell_reads(name)), [[name]])) == whole


def test_quantities_and_plots_have_different_names() -> None:
    """The manifest of an archive lists both together."""
    assert not QUANTITIES.keys() & CELLS.keys()


def test_what_is_not_read_is_left_out(runs: list[RunRecords]) -> None:
    for run in runs:
        records = list(thin(run, {}))
        ranks = {update.rank for update in of_kind(run, Update)}
        assert [record for record in records if isinstance(record, Ended)] == list(of_kind(run, Ended))
        assert len(records) == 1 + len(ranks)  # and an update of each rank, which tells whether there is a hub
        assert end_of(dataclasses.replace(run, records=tuple(records))) == end_of(run)


def test_exchanges_are_kept_only_where_no_consensus_distance_is_recorded(runs: list[RunRecords]) -> None:
    gossip, live = runs[2:]
    assert any(of_kind(gossip, Consensus))
    assert not any(isinstance(record, Exchange) for record in thin(gossip, CONSENSUS))
    assert len({record.distance for record in thin(live, CONSENSUS) if isinstance(record, Exchange)}) > 10


def test_many_rounds_are_merged_where_only_their_training_loss_is_read(runs: list[RunRecords]) -> None:
    """The curve is computed from as many groups either way, so that it is the same."""
    gossip = varied(a_gossip("gossip", peers=4, seconds=400.0))
    (merged,) = thinned([gossip], TRAINING_LOSS)
    assert sum(1 for _ in of_kind(gossip, Round)) > 2 * ROUND_GROUPS_MAX
    assert sum(1 for _ in of_kind(merged, Round)) == ROUND_GROUPS_MAX
    assert sum(one.samples for one in of_kind(merged, Round)) == sum(one.samples for one in of_kind(gossip, Round))
    assert values("training_loss", [merged], [gossip]) == values("training_loss", [gossip], [gossip])
    cell = "training loss over time"
    assert svg_text(panel([merged], [[cell]])) == svg_text(panel([gossip], [[cell]]))


def test_thinning_twice_changes_nothing(runs: list[RunRecords]) -> None:
    reads = union([TRAINING_LOSS, STALENESS])
    once = thinned(runs, reads)
    assert thinned(once, reads) == once


# A study of which everything is read, in an archive

SMALL = """
title = "Digits by gossip and by a hub"
original = "none"
scaled = "everything"
expect = "something"
minutes = 1
columns = ["accuracy_last5", "exchanges_per_gradient", "consensus_distance"]

[base]
workload = "digits"
workers = 4
seeds = 2
until = 1500
target = "accuracy:0.3"
evaluate = "updates:3"

[[base.strategy]]
name = "fmb"
batch = 16

[[base.strategy]]
name = "gossip"
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
cells = [["accuracy over steps", "training loss over time"], ["staleness", "consensus over time"]]
cases = ["niagara"]

[[figure]]
file = "against"
caption = "Against."
x = "case (number)"
y = "samples_per_second"

[[claim]]
quantity = "updates_to_target"
of = {strategy = "fmb", case = "niagara"}
sentence = "It took {ours} updates."
published = "1 to 100"
low = 1
high = 100
"""


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("docs/draw_results.py")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a study that has been run."""
    place = tmp_path_factory.mktemp("small")
    (place / "small.toml").write_text(SMALL, encoding="utf-8")
    words = [str(place / "small.toml"), "--out", str(place / "here"), "--processes", "1", "--quiet", "--no-figures"]
    assert main(["reproduce", *words]) == 0
    return place / "here"


def drawn(script: Any, directory: Path, images: Path) -> dict[str, bytes]:
    """The section of the page, and its figures."""
    study, runs = read_study(directory)
    section = script.section(study, compute_findings(study, runs), runs, [])
    figures = draw_all(study, runs, [], images, ("svg",))
    return {"page": section.encode()} | {path.name: path.read_bytes() for path in figures}


def kinds_in(place: Path) -> set[type[AnyRecord]]:
    return {type(record) for run in find_runs([place]) for record in read_run(run).records}


def test_a_page_from_an_archive_is_that_from_all_records_byte_for_byte(
    script: Any, small: Path, tmp_path: Path
) -> None:
    path = archive(small, tmp_path / "kept.zip")
    with open_results(path) as place:
        again = drawn(script, place, tmp_path / "again")
        assert archive(place, tmp_path / "twice.zip").read_bytes() == path.read_bytes()
        assert {Membership, Traffic}.isdisjoint(kinds_in(place))
        assert Round in kinds_in(place / "niagara")
        assert Round not in kinds_in(place / "even")  # only the figure of the other case reads them
    assert again == drawn(script, small, tmp_path / "first")
    assert set(again) == {"page", "curves.svg", "against.svg"}


def test_an_archive_says_what_can_be_computed_from_it(small: Path, tmp_path: Path) -> None:
    with open_results(archive(small, tmp_path / "kept.zip")) as place:
        manifest = json.loads((place / MANIFEST).read_text())
    assert manifest["thinned"]["even"] == ["accuracy_last5"]  # the others are metrics, which are stored whole
    assert {"accuracy over steps", "staleness"} <= set(manifest["thinned"]["niagara"])
    assert json.loads((small / MANIFEST).read_text())["thinned"] is None


def test_an_archive_is_refused_by_a_study_that_reads_more_than_it_has(small: Path, tmp_path: Path) -> None:
    with open_results(archive(small, tmp_path / "kept.zip")) as place:
        more = SMALL.replace('"accuracy_last5", ', '"accuracy_last5", "idle_share", "training_loss", ')
        (place / "study.toml").write_text(more, encoding="utf-8")
        with pytest.raises(ConfigurationError, match="has no records for training_loss, which"):
            read_study(place)


def test_a_study_is_not_continued_on_thinned_records(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_results(archive(small, tmp_path / "kept.zip")) as place:
        assert main(["reproduce", str(small.parent / "small.toml"), "--out", str(place)]) == 2
    assert "holds the thinned records of an archive; name another place with --out" in capsys.readouterr().err


def test_redraw_writes_an_archive_again(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.zip"
    assert main(["reproduce", "--redraw", str(small), "--no-figures", "--save", str(kept)]) == 0
    assert kept.read_bytes() == archive(small, tmp_path / "other.zip").read_bytes()
    assert main(["reproduce", "--redraw", str(small), "--no-figures", "--save", str(tmp_path / "kept")]) == 2
    assert "--save writes an archive" in capsys.readouterr().err


def test_messages_with_first_parameters_have_the_names_that_are_subtracted() -> None:
    assert {Begin.__name__, Welcome.__name__} == set(FIRST_PARAMETERS)
