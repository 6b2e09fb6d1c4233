"""`offbeat topology` as a command: what is printed and drawn, and one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from offbeat.cli import main
from offbeat.cli.topology_command import drawing
from offbeat.lab.plots.rank_pairs import graph_figure, layout
from offbeat.lab.report.topology_table import sentences
from offbeat.topology.graphs import Complete, Cycle, Edges, ExponentialGraph, Star
from offbeat.topology.topology import Topology

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def printed(capsys: Captured, *words: str) -> str:
    assert main(["topology", *words]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_it_prints_the_constants_the_graph_and_what_they_mean(capsys: Captured) -> None:
    text = printed(capsys, "cycle", "-n", "16", "--rate", "1")
    assert text.startswith("cycle, 16 peers, rate 1\n")
    cells = {line.split("  ")[0]: line.split()[1] for line in text.splitlines() if line[:2] in ("χ1", "χ2", "η ", "α̃")}
    assert cells == {"χ1": "13.13707", "χ2": "0.93750", "η": "0.14247", "α̃": "1.87169"}
    assert "spectral gap    0.07612" in text
    assert "order of χ1 = 13.1 gradients, and with acceleration of √(χ1·χ2) = 3.51: 3.7 times shorter." in text
    assert any(line.split()[-3:] == ["15", "0", "14"] for line in text.splitlines()), "who is next to rank 15"


def test_the_page_about_graphs_shows_what_is_printed(capsys: Captured) -> None:
    page = (Path(__file__).parents[2] / "docs/topology.md").read_text(encoding="utf-8")
    text = printed(capsys, "cycle", "-n", "16", "--rate", "1")
    assert "```text\n" + "".join(f"{line.rstrip()}\n" for line in text.splitlines()) + "```" in page


def test_sixteen_peers_and_rate_one_are_the_defaults(capsys: Captured) -> None:
    assert printed(capsys, "exponential") == printed(capsys, "exponential", "--peers", "16", "--rate", "1.0")


def test_a_neighbour_over_a_double_edge_is_marked(capsys: Captured) -> None:
    assert "1 2 4×2 6 7" in printed(capsys, "exponential", "-n", "8")


def test_json_holds_all_of_it(capsys: Captured) -> None:
    result = json.loads(printed(capsys, "exponential", "-n", "4", "--rate", "2", "--json"))
    edges = result.pop("edges")
    assert [(*edge["ranks"], edge["counts"]) for edge in edges] == [
        (0, 1, 1), (0, 2, 2), (0, 3, 1), (1, 2, 1), (1, 3, 2), (2, 3, 1),
    ]  # fmt: skip
    assert result == {
        "graph": {"name": "exponential"},
        "peers": 4,
        "rate": 2.0,
        "chi1": pytest.approx(0.5),
        "chi2": pytest.approx(5 / 12),
        "eta": pytest.approx(2 * 0.5477226),
        "alpha": 0.5,
        "alpha_tilde": pytest.approx(0.5477226),
        "gap": pytest.approx(2.0),
        "speedup": pytest.approx(1.0954451),
        "degree_min": 4,
        "degree_max": 4,
    }


def test_a_file_has_the_size_of_its_edges(capsys: Captured) -> None:
    Path("path.txt").write_text("0 1\n1 2\n", encoding="utf-8")
    assert printed(capsys, "path.txt").startswith("path.txt, 3 peers, rate 1\n")
    result = json.loads(printed(capsys, "path.txt", "--json"))
    assert result["graph"] == {"name": "edges", "edges": [[0, 1], [1, 2]]}
    assert (result["peers"], result["degree_min"], result["degree_max"]) == (3, 1, 2)


def test_a_large_graph_is_not_drawn_in_text(capsys: Captured) -> None:
    text = printed(capsys, "cycle", "-n", "33")
    assert "neighbours\n" not in text
    assert "too large to draw here; add --plot graph.png" in text
    assert "too large" not in printed(capsys, "cycle", "-n", "33", "--plot", "cycle.svg")


@pytest.mark.parametrize("words", [["complete", "-n", "4"], ["cycle", "-n", "2"]])
def test_where_acceleration_gains_nothing_the_sentence_tells_it(words: list[str], capsys: Captured) -> None:
    assert "acceleration has nothing to gain here" in printed(capsys, *words)


def test_one_peer_has_no_other_to_average_with(capsys: Captured) -> None:
    assert "One peer has no other to average with." in printed(capsys, "star", "-n", "1")
    assert sentences(Topology(Star(), 1), Topology(Star(), 1).constants(1.0)) == [
        "One peer has no other to average with."
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "offbeat topology needs GRAPH"),
        (["cyle"], "unknown graph 'cyle'; did you mean 'cycle'?"),
        (["cycle", "star"], "'star' is one word too many"),
        (["exponential", "-n", "12"], "take 8 or 16 of them"),
        (["cycle", "-n", "0"], "-n must be 1 or more, but is 0"),
        (["cycle", "-n", "two"], "-n is a whole number, but 'two' was given"),
        (["cycle", "-n", "3000"], "constants are computed for up to 2048 peers, but 3000 were asked for"),
        (["cycle", "--rate", "0"], "--rate must be greater than 0, but is 0"),
        (["cycle", "--rate", "-1"], "--rate must be greater than 0, but is -1"),
        (["cycle", "--rate", "inf"], "--rate must be greater than 0"),
        (["cycle", "--rate", "often"], "--rate is a number, but 'often' was given"),
        (["none.txt"], "the edge list none.txt cannot be read: no such file"),
        (["bad.txt"], "line 2 of the edge list bad.txt is '1'; write two ranks, such as 0 1"),
        (["apart.txt"], "in this edge list rank 2 cannot be reached from rank 0"),
        (["path.txt", "-n", "4"], "so 3 peers, but 4 were asked for; take 3 of them"),
        (["edges"], "an edge list is a file with one pair of ranks a line"),
        (["cycle", "--plot", "graph.doc"], "cannot draw to graph.doc; name a file that ends in .svg, .png or .pdf"),
        (["cycle", "--plot", "path.txt/graph.png"], "cannot write path.txt/graph.png"),
        (["cycle", "--plto", "graph.png"], "unknown option '--plto'; did you mean '--plot'?"),
    ],
)
def test_a_mistake_is_answered_by_one_sentence(words: list[str], sentence: str, capsys: Captured) -> None:
    Path("bad.txt").write_text("0 1\n1\n", encoding="utf-8")
    Path("apart.txt").write_text("0 1\n2 3\n", encoding="utf-8")
    Path("path.txt").write_text("0 1\n1 2\n", encoding="utf-8")
    assert main(["topology", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("offbeat: ")
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1


# Drawings


def test_the_drawing_has_every_rank_and_a_line_for_each_edge() -> None:
    lines = drawing(Topology(Cycle(), 4)).splitlines()
    ranks = ["".join(sign for sign in line if sign.isdigit()) for line in lines]
    assert (ranks[0], ranks[9], ranks[18], "".join(ranks)) == ("0", "31", "2", "0312")
    assert all(any(ord(sign) > 0x2800 for sign in line) for line in lines), "lines go from top to bottom"
    middle = len(lines) // 2
    assert set(lines[middle][2:-2]) == {" "}, "a cycle is empty inside"
    with_diagonals = drawing(Topology(Complete(), 4)).splitlines()
    assert all(ord(sign) > 0x2800 for sign in with_diagonals[middle][2:-2])


def test_the_middle_of_a_star_stands_in_the_middle() -> None:
    star = Topology(Star(), 5)
    assert layout(star)[0].tolist() == [0.0, 0.0]
    assert np.allclose(np.hypot(*layout(star)[1:].T), 1.0)
    assert np.allclose(np.hypot(*layout(Topology(Cycle(), 5)).T), 1.0)
    lines = drawing(star).splitlines()
    assert lines[len(lines) // 2].strip()[1:-1].count("0") == 1


@pytest.mark.parametrize("name", ["graph.png", "new/graph.svg"])
def test_a_figure_is_written_where_it_is_asked_for(name: str, capsys: Captured) -> None:
    assert printed(capsys, "exponential", "-n", "8", "--plot", name).endswith(f"written: {name}\n")
    begins = b"\x89PNG" if name.endswith("png") else b"<?xml"
    assert Path(name).read_bytes().startswith(begins)


def test_json_stays_alone_on_standard_output_beside_a_figure(capsys: Captured) -> None:
    assert json.loads(printed(capsys, "cycle", "--json", "--plot", "graph.png"))["peers"] == 16
    assert Path("graph.png").is_file()


def test_in_the_figure_edges_are_as_wide_as_they_count() -> None:
    figure = graph_figure(Topology(ExponentialGraph(), 8), "exponential, 8 peers")
    (lines,) = figure.axes[0].collections[:1]
    ends = {tuple(np.round(segment, 6).ravel()) for segment in lines.get_segments()}  # type: ignore[attr-defined]
    widths = np.asarray(lines.get_linewidth())
    assert len(ends) == len(widths) == 20
    assert sorted(set(np.round(widths / widths.min(), 6))) == [1.0, 2.0]
    assert int((widths == widths.max()).sum()) == 4
    assert sorted(int(text.get_text()) for text in figure.axes[0].texts) == list(range(8))


def test_a_figure_of_many_peers_has_no_numbers_and_one_of_a_lone_peer_no_lines() -> None:
    assert graph_figure(Topology(Cycle(), 65), "many").axes[0].texts[:] == []
    alone = graph_figure(Topology(Edges(((0, 1),)), 1), "alone").axes[0]
    assert [text.get_text() for text in alone.texts] == ["0"]
    assert alone.collections[0].get_segments() == []  # type: ignore[attr-defined]
