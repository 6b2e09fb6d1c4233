"""What notebooks show: runs, summaries, records, comparisons, graphs and clusters as HTML."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

import pytest
from made_records import a_gossip, a_small_run, a_toy, run

import offbeat as ob
from offbeat.core.notebook_html import notebook_html
from offbeat.lab.notebook.cluster_card import shown
from offbeat.lab.notebook.graph_cards import EDGES_MAX, PEERS_MAX
from offbeat.lab.report.table import columns
from offbeat.records.comparison import Comparison
from offbeat.records.metrics import summarize
from offbeat.records.schema import Ended, Evaluation, Notice

MALICE = "<script>alert('&')</script>"
VOID = ("br", "img", "progress")


class Parsed(HTMLParser):
    """Text and tags of HTML, which must be balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style" and data.strip():
            self.texts.append(data.strip())


def html_of(value: Any) -> str:
    html = value._repr_html_()
    assert isinstance(html, str)
    return html


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture(scope="module")
def simulated() -> ob.Run:
    return ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(batch=8), workers=2, until=ob.Samples(160))


def test_a_comparison_shows_headline_table_and_two_figures() -> None:
    comparison = Comparison.of([a_toy(label, 1, workers=3, seconds=20.0) for label in ("fmb", "apam")])
    parsed = Parsed(html_of(comparison))
    assert any(text.startswith(("apam reaches", "No strategy reaches")) for text in parsed.texts)
    assert {"fmb", "apam", "baseline", "idle", "Workload digits, 3 workers, 1 seed."} <= set(parsed.texts)
    assert parsed.tags.count("svg") == 2
    assert "3 gradients were older than staleness_max and were dropped" in " ".join(parsed.texts)


def test_the_table_of_a_comparison_has_the_cells_of_the_report() -> None:
    comparison = Comparison.of([a_gossip("gossip", 1, 4, 20.0), a_gossip("gossip-acid", 1, 4, 20.0)])
    texts = Parsed(html_of(comparison)).texts
    for column in columns(comparison):
        for strategy in comparison.strategies:
            assert column.on_page_only or column.cell(comparison, strategy) in texts


def test_a_run_shows_its_outcome_and_no_ratio_to_a_baseline(simulated: ob.Run) -> None:
    parsed = Parsed(html_of(simulated))
    assert parsed.texts[0].startswith("fmb on quadratic, 2 workers, seed 0: a loss of ")
    assert "speed-up" not in parsed.texts
    assert "baseline" not in parsed.texts
    assert parsed.tags.count("svg") == 2


def test_a_summary_shows_the_table_alone(simulated: ob.Run) -> None:
    parsed = Parsed(html_of(simulated.summary))
    assert parsed.texts[0].startswith("fmb on quadratic, 2 workers, seed 0: ")
    assert "svg" not in parsed.tags
    assert len(html_of(simulated.summary)) < 3000


def test_a_failed_run_shows_why_and_does_not_fail_itself() -> None:
    records = run([Ended(at=2.0, bytes_sent=0, messages_sent=0, failure="the hub was lost")])
    assert "failed: the hub was lost" in Parsed(html_of(summarize(records))).texts[0]
    texts = Parsed(html_of(Comparison.of([records]))).texts
    assert "1 of 1 run failed" in texts
    assert ", seed 1: the hub was lost" in texts


def test_records_show_their_kinds_and_numbers() -> None:
    records = a_small_run()
    texts = Parsed(html_of(records)).texts
    assert texts[texts.index("round") + 1] == "4"
    assert texts[texts.index("ended") + 1] == "1"
    assert repr(records) == f"<RunRecords of fmb on digits, seed 1: {len(records.records)} records>"


def test_the_text_of_a_comparison_is_one_line() -> None:
    assert repr(Comparison.of([a_small_run()])) == "<Comparison of fmb on digits: 1 run>"


def test_names_and_texts_from_outside_are_escaped() -> None:
    evaluation = Evaluation(at=1.0, rank=0, version=0, samples_total=0, loss=1.0, accuracy=0.5)
    notice = Notice(at=1.0, rank=0, text=MALICE)
    ended = Ended(at=1.0, bytes_sent=0, messages_sent=0, failure=MALICE)
    records = run([evaluation, notice, ended], label=MALICE, workload=MALICE)
    for value in (records, summarize(records), Comparison.of([records])):
        html = html_of(value)
        assert "<script" not in html
        assert "script" not in Parsed(html).tags
        assert "alert(" in html


@dataclass(frozen=True)
class Ring(ob.graphs.Graph):
    """A graph whose name needs escaping."""

    name = MALICE  # type: ignore[misc]

    def neighbours(self, rank: int, peers: int) -> tuple[int, ...]:
        return ((rank + 1) % peers, (rank - 1) % peers)


def test_the_name_of_a_graph_is_escaped() -> None:
    assert "<script" not in html_of(Ring())


def test_without_matplotlib_the_table_and_the_line_that_installs_it_are_shown(
    without_matplotlib: None, simulated: ob.Run
) -> None:
    for value in (simulated, Comparison.of([simulated.records])):
        parsed = Parsed(html_of(value))
        assert "svg" not in parsed.tags
        assert parsed.tags.count("table") == 1
        assert [text for text in parsed.texts if "pip install 'offbeat[report]'" in text] == [
            "No figures: the report needs matplotlib, which is not installed; type: pip install 'offbeat[report]'"
        ]


def test_a_comparison_of_summaries_alone_has_no_figures() -> None:
    comparison = Comparison.of_summaries([summarize(a_small_run())], None)
    assert comparison.runs == ()
    assert "svg" not in Parsed(html_of(comparison)).tags


def test_a_graph_is_drawn_with_its_constants_and_without_matplotlib(without_matplotlib: None) -> None:
    parsed = Parsed(html_of(ob.graphs.Cycle()))
    assert parsed.texts[0] == "cycle, 16 peers, rate 1"
    assert parsed.tags.count("circle") == 16
    assert {"χ1", "spectral gap", "degree"} <= set(parsed.texts)
    of_star = Parsed(html_of(ob.graphs.Topology(ob.graphs.Star(), 5)))
    assert (of_star.tags.count("circle"), of_star.texts[0]) == (5, "star, 5 peers, rate 1")


def test_a_graph_that_is_not_connected_shows_why_it_has_no_constants() -> None:
    halves = ob.graphs.Topology(ob.graphs.Cycle(), 8, members=(0, 1, 4, 5))
    texts = Parsed(html_of(halves)).texts
    assert texts[0] == "cycle, 4 of 8 peers, rate 1"
    assert texts[-1].startswith("this graph is not connected: rank 4 cannot be reached")


def test_a_graph_that_cannot_have_sixteen_peers_shows_its_text_alone() -> None:
    class Odd(Ring):
        def check(self, peers: int) -> None:
            raise ob.ConfigurationError("it has an odd number of peers")

    assert Odd()._repr_html_() is None


def test_a_large_graph_is_not_drawn() -> None:
    assert EDGES_MAX < 80 * 79 / 2
    assert (
        "With 3,160 edges it is too large to draw here."
        in Parsed(html_of(ob.graphs.Topology(ob.graphs.Complete(), 80))).texts
    )
    large = Parsed(html_of(ob.graphs.Topology(ob.graphs.Cycle(), PEERS_MAX + 1)))
    assert "table" not in large.tags


def test_a_cluster_shows_what_differs_from_equal_machines_first() -> None:
    crashes = (ob.faults.Crash(1, 3.0), ob.faults.Crash(2, 4.0))
    cluster = ob.Cluster(straggle=ob.stragglers.NIAGARA, factors=(1, 4), faults=crashes, size=4)
    texts = Parsed(html_of(cluster)).texts
    changed, rest = texts[: texts.index("defaults")], texts[texts.index("defaults") :]
    assert texts[0] == "Cluster of 4 workers"
    assert any(text.startswith("niagara: Mixture(components=") for text in changed)
    assert {"(1, 4)", "Crash(rank=1, at_seconds=3.0)", "Crash(rank=2, at_seconds=4.0)"} <= set(changed)
    assert "silence_seconds" in rest
    assert "silence_seconds" not in changed


def test_values_of_a_cluster_are_shown_as_python_writes_them() -> None:
    assert shown(ob.Link(latency_seconds=0.1)) == "Link(latency_seconds=0.1)"
    assert shown(None) == "none"
    assert shown(()) == "none"


def test_an_object_without_a_form_in_html_shows_its_text() -> None:
    assert notebook_html(object()) is None


def test_html_follows_the_theme_of_the_notebook(simulated: ob.Run) -> None:
    for value in (simulated, ob.Cluster(), ob.graphs.Cycle()):
        html = html_of(value)
        assert "prefers-color-scheme" not in html
        assert "background: #" not in html
        assert "http" not in html.replace("http://www.w3.org/", "")
    assert 'fill="currentColor"' in html_of(ob.graphs.Cycle())
