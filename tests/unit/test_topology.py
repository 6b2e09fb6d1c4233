"""Graphs and their constants: the published figures, sizes that a graph allows, edge lists, survivors, schedules."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from offbeat.core.configuration import from_plain, to_plain
from offbeat.core.validation import check_types
from offbeat.errors import ConfigurationError
from offbeat.topology.graphs import Complete, Cycle, Edges, ExponentialGraph, Graph, Star
from offbeat.topology.topology import Constants, Topology

ORACLES = [
    # graph, n, χ1, χ2, η, α̃ at rate 1
    (Cycle(), 2, 0.5, 0.5, 1.0, 0.5),
    (Cycle(), 4, 1.0, 0.75, 0.57735, 0.57735),
    (Cycle(), 8, 3.41421, 0.875, 0.289281, 0.987669),
    (Cycle(), 16, 13.13707, 0.9375, 0.142474, 1.871689),
    (Cycle(), 32, 52.04343, 0.96875, 0.070418, 3.664773),
    (Cycle(), 64, 207.67253, 0.98438, 0.034970, 7.262385),
    (ExponentialGraph(), 2, 0.5, 0.5, 1.0, 0.5),
    (ExponentialGraph(), 4, 1.0, 0.83333, 0.547723, 0.547723),
    (ExponentialGraph(), 8, 1.5, 0.96371, 0.415864, 0.623796),
    (ExponentialGraph(), 16, 2.0, 1.00966, 0.351858, 0.703716),
    (ExponentialGraph(), 32, 2.5, 1.02294, 0.312662, 0.781656),
    (ExponentialGraph(), 64, 3.0, 1.02408, 0.285262, 0.855785),
]
ALL: list[Graph] = [Complete(), Cycle(), ExponentialGraph(), Star()]
SQUARE_AND_DIAGONAL = Edges(((0, 1), (1, 2), (2, 3), (3, 0), (0, 2)))


@pytest.mark.parametrize(("graph", "peers", "chi1", "chi2", "eta", "alpha_tilde"), ORACLES)
def test_the_constants_are_the_published_ones(
    graph: Graph, peers: int, chi1: float, chi2: float, eta: float, alpha_tilde: float
) -> None:
    constants = Topology(graph, peers).constants(1.0)
    assert [constants.chi1, constants.chi2] == pytest.approx([chi1, chi2], abs=6e-6)
    assert [constants.eta, constants.alpha_tilde] == pytest.approx([eta, alpha_tilde], abs=6e-7)
    assert constants.alpha == 0.5
    assert constants.gap == pytest.approx(1.0 / constants.chi1)


def test_a_complete_graph_and_a_star_have_the_constants_of_their_formulas() -> None:
    """Complete, n = 5: λ = ¼ on each edge, so λ2 = 5/4. Star, n = 5: each spoke has ½(1 + ¼), and λ2 is that."""
    complete, star = Topology(Complete(), 5).constants(1.0), Topology(Star(), 5).constants(1.0)
    assert (complete.chi1, complete.chi2) == pytest.approx((0.8, 0.8))
    assert (star.chi1, star.chi2) == pytest.approx((1.6, 0.8))


def test_a_single_peer_has_an_eta_of_zero() -> None:
    for graph in [*ALL, SQUARE_AND_DIAGONAL]:
        alone = Topology(graph, 1)
        assert (alone.members, alone.neighbours(0), alone.edges, alone.connected) == ((0,), (), [], True)
        assert alone.constants(3.0) == Constants(chi1=0, chi2=0, eta=0, alpha=0.5, alpha_tilde=0.5, gap=0)
        assert alone.matchings() == ()
        assert alone.laplacian(1.0).tolist() == [[0.0]]


# Neighbours


def test_neighbours_are_sorted_and_repeated_by_their_weight() -> None:
    assert Complete().neighbours(2, 4) == (0, 1, 3)
    assert Cycle().neighbours(0, 5) == (1, 4)
    assert Cycle().neighbours(1, 2) == (0,)
    assert Star().neighbours(0, 4) == (1, 2, 3)
    assert Star().neighbours(3, 4) == (0,)
    assert ExponentialGraph().neighbours(0, 8) == (1, 2, 4, 4, 6, 7)
    assert ExponentialGraph().neighbours(0, 2) == (1, 1)
    assert Edges(((1, 0), (0, 1), (2, 0))).neighbours(0, 3) == (1, 1, 2)


def test_an_edge_that_counts_twice_is_used_twice_as_often() -> None:
    topology = Topology(Edges(((0, 1), (0, 1), (0, 2))), 3)
    # Rank 0 chooses rank 1 two times in three; rank 0 is the only neighbour of ranks 1 and 2.
    assert topology.edges == [(0, 1, pytest.approx((2 / 3 + 1) / 2)), (0, 2, pytest.approx((1 / 3 + 1) / 2))]


def test_the_laplacian_of_a_path_by_hand() -> None:
    """Rank 1 is in the middle: λ = ½(1 + ½) = ¾ on both edges, times the rate."""
    path = Topology(Edges(((0, 1), (1, 2))), 3)
    assert path.laplacian(2.0).tolist() == [[1.5, -1.5, 0.0], [-1.5, 3.0, -1.5], [0.0, -1.5, 1.5]]


# Sizes


@pytest.mark.parametrize("graph", ALL)
def test_one_peer_is_always_allowed_and_none_never(graph: Graph) -> None:
    graph.check(1)
    with pytest.raises(ConfigurationError, match="a graph has 1 peer or more, but 0 were asked for"):
        graph.check(0)


@pytest.mark.parametrize(("peers", "near"), [(3, "2 or 4"), (12, "8 or 16"), (63, "32 or 64")])
def test_an_exponential_graph_names_the_sizes_that_are_near(peers: int, near: str) -> None:
    sentence = f"a power of two of peers, but {peers} were asked for; take {near} of them"
    with pytest.raises(ConfigurationError, match=sentence):
        Topology(ExponentialGraph(), peers)


def test_an_edge_list_has_the_size_of_its_ranks() -> None:
    SQUARE_AND_DIAGONAL.check(4)
    for peers in (2, 3, 5):
        with pytest.raises(ConfigurationError, match=f"so 4 peers, but {peers} were asked for; take 4 of them"):
            SQUARE_AND_DIAGONAL.check(peers)


@pytest.mark.parametrize(("edges", "rank"), [(((0, 1), (2, 3)), 2), (((0, 1), (1, 3)), 2), (((1, 2),), 1)])
def test_an_edge_list_is_connected(edges: tuple[tuple[int, int], ...], rank: int) -> None:
    graph = Edges(edges)
    with pytest.raises(ConfigurationError, match=f"rank {rank} cannot be reached from rank 0"):
        graph.check(graph.peers)


@pytest.mark.parametrize(
    ("edges", "sentence"),
    [
        (((0, 1), (2, 2)), r"the edge \(2, 2\) joins rank 2 to itself"),
        (((0, -1),), r"the edge \(0, -1\) names rank -1; ranks start at 0"),
        ((), "needs one edge or more"),
    ],
)
def test_invalid_edges_are_refused(edges: tuple[tuple[int, int], ...], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        Edges(edges)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_is_a_positive_number(rate: float) -> None:
    for ask in (Topology(Cycle(), 4).constants, Topology(Cycle(), 4).laplacian, Topology(Cycle(), 1).constants):
        with pytest.raises(ConfigurationError, match="rate of averaging must be greater than 0"):
            ask(rate)


# Words, files, plain data


def test_a_name_is_a_graph() -> None:
    assert [Graph.shorthand(graph.name) for graph in ALL] == ALL
    assert Graph.shorthand("edges:0,1+1,2") == Edges(((0, 1), (1, 2)))
    with pytest.raises(ConfigurationError, match="unknown graph 'cicle'; did you mean 'cycle'"):
        Graph.shorthand("cicle")
    with pytest.raises(ConfigurationError, match="an edge list is a file with one pair of ranks a line"):
        Graph.shorthand("edges")


def test_a_file_is_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "# a path, and a pair that counts twice\n\n0 1\n1,2  # the second edge\n 2, 1\n"
    for name in ("path.txt", "path.csv", "PATH.EDGES", "no_ending"):
        Path(name).write_text(text, encoding="utf-8")
        assert from_plain(Graph, name, "graph") == Edges(((0, 1), (1, 2), (2, 1)))
    Path("cycle").write_text(text, encoding="utf-8")
    assert Graph.shorthand("cycle") == Cycle()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"0 1\n1 two\n", "line 2 of the edge list bad.txt is '1 two'; write two ranks, such as 0 1"),
        (b"0 1 2\n", "line 1 of the edge list bad.txt is '0 1 2'; write two ranks"),
        (b"0 1\n\n3 3\n", "line 3 of the edge list bad.txt joins rank 3 to itself"),
        (b"0 -4\n", "line 1 of the edge list bad.txt names rank -4; ranks start at 0"),
        (b"# nothing\n", "the edge list bad.txt has no edge"),
        (b"\xff\xfe", "the edge list bad.txt is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_edge_list_is_answered_with_its_line(
    text: bytes, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.txt").write_bytes(text)
    with pytest.raises(ConfigurationError, match=sentence):
        Graph.shorthand("bad.txt")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"the edge list nowhere\.csv cannot be read: no such file"):
        Graph.shorthand("nowhere.csv")


@pytest.mark.parametrize("graph", [*ALL, SQUARE_AND_DIAGONAL])
def test_a_graph_is_plain_data_and_back(graph: Graph) -> None:
    plain = to_plain(graph)
    assert plain["name"] == graph.name
    assert from_plain(Graph, plain, "graph") == graph
    check_types(graph)
    assert len({graph, from_plain(Graph, plain, "graph")}) == 1


def test_an_edge_list_is_written_as_pairs() -> None:
    assert to_plain(Edges(((0, 1), (1, 2)))) == {"name": "edges", "edges": [[0, 1], [1, 2]]}


# Restricted to members


def test_a_cycle_that_lost_a_peer_is_a_path() -> None:
    left = Topology(Cycle(), 5, members=[4, 0, 1, 3])
    assert left.members == (0, 1, 3, 4)
    assert (left.neighbours(1), left.neighbours(0), left.neighbours(4)) == ((0,), (1, 4), (0, 3))
    assert left.connected
    path = Topology(Edges(((0, 1), (1, 2), (2, 3))), 4)
    assert np.allclose(left.laplacian(1.5)[np.ix_([1, 0, 3, 2], [1, 0, 3, 2])], path.laplacian(1.5))
    assert left.constants(1.0).chi1 == pytest.approx(path.constants(1.0).chi1)


def test_a_disconnected_graph_is_refused() -> None:
    apart = Topology(Cycle(), 6, members=[0, 1, 3, 4])
    assert not apart.connected
    with pytest.raises(ConfigurationError, match="not connected: rank 3 cannot be reached from rank 0"):
        apart.constants(1.0)
    assert not Topology(Star(), 4, members=[1, 2, 3]).connected


def test_a_single_remaining_member_has_no_neighbours() -> None:
    alone = Topology(Cycle(), 8, members=[5])
    assert alone.connected
    assert alone.constants(1.0).eta == 0.0
    assert alone.matchings() == ()


def test_members_are_ranks() -> None:
    with pytest.raises(ConfigurationError, match=r"members are ranks from 0 to 3, but \[4\] were given"):
        Topology(Cycle(), 4, members=[0, 4])
    with pytest.raises(ConfigurationError, match="one member or more"):
        Topology(Cycle(), 4, members=[])
    with pytest.raises(ConfigurationError, match="rank 1 is not a member"):
        Topology(Cycle(), 4, members=[0, 3]).neighbours(1)


# Schedules of pairs


def test_a_cycle_takes_every_other_edge_and_then_the_others() -> None:
    assert Topology(Cycle(), 6).matchings() == (
        {0: 1, 1: 0, 2: 3, 3: 2, 4: 5, 5: 4},
        {0: 5, 1: 2, 2: 1, 3: 4, 4: 3, 5: 0},
    )
    assert Topology(Cycle(), 2).matchings() == ({0: 1, 1: 0},)


def test_in_a_complete_graph_every_pair_is_in_one_matching() -> None:
    rounds = Topology(Complete(), 6).matchings()
    assert len(rounds) == 5
    assert all(sorted(pairs[rank] for pairs in rounds) == [r for r in range(6) if r != rank] for rank in range(6))


@pytest.mark.parametrize("peers", [2, 4, 8, 32])
def test_on_an_exponential_graph_each_sweep_of_matchings_averages_exactly(peers: int) -> None:
    matchings = Topology(ExponentialGraph(), peers).matchings()
    sweep = peers.bit_length() - 1
    assert len(matchings) == 2 * sweep
    for half in (matchings[:sweep], matchings[sweep:]):
        values = np.arange(peers, dtype=float)
        for pairs in half:
            values = (values + values[[pairs[rank] for rank in range(peers)]]) / 2
        assert values.tolist() == [(peers - 1) / 2] * peers


def test_on_an_exponential_graph_edges_are_used_as_often_as_they_count() -> None:
    topology = Topology(ExponentialGraph(), 16)
    matchings = topology.matchings()
    for rank in range(16):
        assert sorted(pairs[rank] for pairs in matchings) == list(topology.neighbours(rank))


@pytest.mark.parametrize(("graph", "peers"), [(Cycle(), 5), (Complete(), 3), (Star(), 7)])
def test_an_odd_number_has_no_perfect_matching(graph: Graph, peers: int) -> None:
    sentence = (
        f"take an even number of them, such as {peers - 1} or {peers + 1}, or choose partners at random: partner=Ra"
    )
    with pytest.raises(ConfigurationError, match=sentence):
        Topology(graph, peers).matchings()


def test_a_star_of_four_has_none_and_one_of_two_has() -> None:
    with pytest.raises(ConfigurationError, match=r"no perfect matching with the edge 0–1.*--partner random"):
        Topology(Star(), 4).matchings()
    assert Topology(Star(), 2).matchings() == ({0: 1, 1: 0},)


def test_an_edge_list_has_matchings_where_every_edge_is_in_one() -> None:
    square = Edges(((0, 1), (1, 2), (2, 3), (3, 0)))
    assert len(Topology(square, 4).matchings()) == 2
    with pytest.raises(ConfigurationError, match="no perfect matching with the edge 0–2"):
        Topology(Edges((*square.edges, (0, 2))), 4).matchings()
    petersen = Edges(tuple((i, (i + 1) % 5) for i in range(5)) + tuple((i, i + 5) for i in range(5))
                     + tuple((5 + i, 5 + (i + 2) % 5) for i in range(5)))  # fmt: skip
    # Three matchings cannot do it: this graph has no edge colouring with three colours.
    assert len(Topology(petersen, 10).matchings()) > 3


def test_the_search_wastes_no_matching_where_edges_split_evenly() -> None:
    """A cube of 16 corners has four directions, and one matching for each."""
    cube = Edges(tuple((i, i | bit) for i in range(16) for bit in (1, 2, 4, 8) if not i & bit))
    assert len(Topology(cube, 16).matchings()) == 4


def test_survivors_without_an_edge_have_no_matching() -> None:
    with pytest.raises(ConfigurationError, match="has no edges"):
        Topology(Cycle(), 6, members=[0, 3]).matchings()
    assert Topology(Complete(), 6, members=[1, 4]).matchings() == ({1: 4, 4: 1},)
    assert Topology(Cycle(), 6, members=[2, 3]).matchings() == ({2: 3, 3: 2},)
