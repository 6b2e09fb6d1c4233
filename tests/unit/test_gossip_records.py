"""What is computed and drawn from the records of peers that average with each other."""

from __future__ import annotations

import itertools
import json
import random
import re
from functools import partial
from xml.etree import ElementTree

import pytest
from made_records import a_gossip, a_round, a_small_run, a_toy, an_exchange, an_update, run
from rich.console import Console

from offbeat.lab.plots.figures import plot
from offbeat.lab.plots.looks import NAMED, looks
from offbeat.lab.plots.rank_pairs import NUMBERS_RANKS_MAX, exchange_maps
from offbeat.lab.plots.style import svg_text
from offbeat.lab.plots.timeline import timeline
from offbeat.lab.report.page import report_page
from offbeat.lab.report.table import comparison_table
from offbeat.records.comparison import Comparison
from offbeat.records.curves import consensus_curve
from offbeat.records.exchanges import PER_BIN, consensus_series, exchange_counts
from offbeat.records.metrics import summarize
from offbeat.records.schema import AnyRecord, Consensus, Ended, RunRecords

END = Ended(at=10.0, bytes_sent=0, messages_sent=0, failure=None)


def peers(records: list[AnyRecord], workers: int = 3) -> RunRecords:
    """A run of ten seconds."""
    return run([*records, END], label="gossip", workers=workers)


def three_peers() -> list[AnyRecord]:
    """Three gradients of three peers, three averagings, one that was lost and one that was declined."""
    return [
        *(a_round(rank, 0.0, 2.0) for rank in range(3)),
        *(an_update(2.0, 30, (rank, 0, 10, 0), rank=rank) for rank in range(3)),
        an_exchange(3.0, 0, 1, 8.0, seconds=0.1),
        an_exchange(6.0, 0, 1, 2.0, seconds=0.2),
        an_exchange(7.0, 2, 1, 4.0, seconds=0.6),
        an_exchange(8.0, 2, 0, None, seconds=5.0, outcome="lost"),
        an_exchange(9.0, 2, 0, None, seconds=5.0, outcome="declined"),
    ]


def consensus(*points: tuple[float, float]) -> list[AnyRecord]:
    return [Consensus(at=at, peers=3, distance=distance) for at, distance in points]


def test_exchanges_are_counted_as_by_hand() -> None:
    summary = summarize(peers(three_peers()))
    assert (summary.exchanges, summary.exchanges_lost) == (3, 1)
    assert summary.exchanges_per_gradient == pytest.approx(2 * 3 / 3)
    assert summary.round_trip_seconds == pytest.approx(0.3)


def test_each_pair_is_counted_from_both_ends() -> None:
    assert exchange_counts(peers(three_peers())) == [[0, 2, 0], [2, 0, 1], [0, 1, 0]]
    assert len(exchange_counts(peers(three_peers(), workers=5))) == 5, "a peer without exchanges has a row too"
    assert exchange_counts(a_small_run()) == []


def test_a_run_of_a_hub_has_no_exchanges_and_no_distance() -> None:
    summary = summarize(a_small_run())
    assert (summary.exchanges, summary.exchanges_lost) == (0, 0)
    absent = ("exchanges_per_gradient", "round_trip_seconds", "consensus_distance", "consensus_estimated")
    assert [getattr(summary, name) for name in absent] == [None] * len(absent)
    assert "exchange" not in str(summary)


def test_without_a_measurement_the_distance_is_estimated_from_exchanges_of_the_second_half() -> None:
    summary = summarize(peers(three_peers()))
    assert summary.consensus_distance == pytest.approx((3 - 1) / (2 * 3) * (2.0 + 4.0) / 2)
    assert summary.consensus_estimated is True
    early = summarize(peers([an_exchange(1.0, 0, 1)]))
    assert (early.consensus_distance, early.consensus_estimated) == (None, None)


def test_a_measured_distance_is_averaged_over_the_time_of_the_second_half() -> None:
    measured = consensus((0.0, 100.0), (4.0, 6.0), (7.0, 1.0), (10.0, 0.0))
    summary = summarize(peers([*three_peers(), *measured]))
    # 6 holds from 5 to 7 seconds and 1 from 7 to 10; the average of all peers at the end, and the beginning, do not.
    assert summary.consensus_distance == pytest.approx((2 * 6.0 + 3 * 1.0) / 5)
    assert summary.consensus_estimated is False
    assert summarize(peers(consensus((10.0, 2.5)))).consensus_distance == 2.5


def test_the_estimate_is_right_where_pairs_are_drawn_at_random() -> None:
    dice = random.Random(1)
    places = [dice.gauss(0, 3) for _ in range(6)]
    centre = sum(places) / 6
    pairs = list(itertools.combinations(range(6), 2))
    apart = [an_exchange(6.0, a, b, (places[a] - places[b]) ** 2) for a, b in pairs]
    exact = sum((place - centre) ** 2 for place in places) / 6
    assert summarize(peers(apart, workers=6)).consensus_distance == pytest.approx(exact)


def test_a_measured_series_is_unchanged_and_an_estimated_one_is_marked() -> None:
    measured = consensus_series(peers([*three_peers(), *consensus((1.0, 4.0), (2.0, 0.0))]))
    assert (measured.points, measured.estimated) == (((1.0, 4.0), (2.0, 0.0)), False)
    assert consensus_curve(peers(consensus((1.0, 4.0), (2.0, 0.0)))).values.tolist() == [4.0]
    rounded = consensus((0.0, 1e-15), (1.0, 4.0), (2.0, 1e-15))
    assert consensus_curve(peers(rounded)).over.tolist() == [1.0, 2.0], "what shrinks to nothing may be seen to"
    estimated = consensus_series(peers(three_peers()))
    assert estimated.estimated
    ((at, distance),) = estimated.points
    assert (at, distance) == (pytest.approx(16 / 3), pytest.approx(14 / 9))
    assert consensus_series(a_small_run()).points == ()


def test_an_estimated_series_has_means_over_equal_intervals_of_time() -> None:
    early = [an_exchange(0.0 + index / 100, 0, 1, 6.0) for index in range(PER_BIN)]
    late = [an_exchange(9.0 - index / 100, 1, 2, 3.0) for index in range(PER_BIN)]
    series = consensus_series(peers([*late, *early, an_exchange(5.0, 0, 2, None)]))
    assert [distance for _, distance in series.points] == pytest.approx([2.0, 1.0])
    assert [at for at, _ in series.points] == pytest.approx([0.045, 8.955])


def test_one_exchange_or_many_at_once_make_one_point() -> None:
    assert len(consensus_series(peers([an_exchange(1.0, 0, 1)])).points) == 1
    assert len(consensus_series(peers([an_exchange(1.0, 0, 1)] * (5 * PER_BIN))).points) == 1


# What is printed


def printed(comparison: Comparison, width: int = 100) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(comparison_table(comparison))
    return capture.get()


def test_the_table_shows_exchanges_only_where_there_are_some() -> None:
    hub = printed(Comparison.of([a_toy("fmb", 1), a_toy("apam", 1)]))
    assert "exchanges" not in hub
    assert "consensus" not in hub
    both = printed(Comparison.of([a_toy("fmb", 1), a_gossip()]))
    assert re.search(r"exchanges\s+consensus", both)
    assert re.search(r"per step\s+distance", both)


def test_the_table_with_gossip_fits_in_a_hundred_columns() -> None:
    hubs = [
        a_toy(label, seed, workers=4, seconds=120.0) for label in ("fmb", "sync-amsgrad", "apam") for seed in (1, 2)
    ]
    text = printed(Comparison.of([*hubs, *(a_gossip("gossip-acid", seed) for seed in (1, 2))]))
    lines = text.rstrip().splitlines()
    assert max(len(line) for line in lines) <= 100
    assert "…" not in text


def test_the_table_marks_what_is_estimated() -> None:
    assert "≈" in printed(Comparison.of([a_gossip(live=True)]))
    assert "≈" not in printed(Comparison.of([a_gossip()]))


def test_a_summary_has_the_number_of_exchanges() -> None:
    assert str(summarize(peers(three_peers()))).splitlines()[-1] == (
        "  3 exchanges, 2 for each gradient of a peer, 1 lost, a round trip of 0.3 s, "
        "consensus distance 1, estimated from exchanges"
    )


def test_the_json_of_gossip_has_the_expected_keys() -> None:
    answer = Comparison.of([a_small_run(), a_gossip(live=True)]).to_json()
    json.dumps(answer, allow_nan=False)
    hub, gossip = answer["runs"]
    assert (hub["exchanges"], hub["consensus_distance"], hub["consensus_estimated"]) == (0, None, None)
    assert gossip["exchanges"] > 0
    assert gossip["consensus_estimated"] is True


# What is drawn


@pytest.fixture(scope="module")
def mixed() -> list[RunRecords]:
    hubs = [a_toy("fmb", seed, workers=4, seconds=20.0) for seed in (1, 2)]
    return [*hubs, *(a_gossip(label, seed, 4, 20.0) for label in ("gossip", "gossip-acid") for seed in (1, 2))]


@pytest.mark.slow
def test_the_page_of_gossip_has_two_more_figures_and_that_of_hubs_has_not(mixed: list[RunRecords]) -> None:
    page = report_page(mixed)
    assert page.count("<svg ") == page.count("<figcaption>") == 9
    assert "Consensus distance over time" in page
    assert "Exchanges of pairs" in page
    assert "stimated" not in page.split("</footer>")[0].split("Consensus distance over time")[1].split("</figure>")[0]
    hubs = report_page(mixed[:2])
    assert hubs.count("<svg ") == 7
    assert "onsensus" not in hubs


def test_the_page_has_the_columns_for_which_a_terminal_has_no_room(mixed: list[RunRecords]) -> None:
    page = report_page(mixed)
    for head in ("exchanges", "exchanges<br>per step", "exchanges<br>lost", "round trip<br>in s", "updates", "dropped"):
        assert f'<th scope="col">{head}</th>' in page


def test_an_estimated_curve_is_marked_in_its_label_and_caption() -> None:
    live = [a_gossip("live", 1, live=True), a_gossip("gossip", 1)]
    drawn = svg_text(plot(live, "consensus over time"))
    assert ">live, estimated from exchanges<" in drawn
    assert ">gossip<" in drawn
    assert "in a live run no process has all models" in report_page(live)


def test_strategies_look_as_they_do_in_the_other_figures(mixed: list[RunRecords]) -> None:
    (axes,) = plot(mixed, "consensus over time").axes
    assert [line.get_color() for line in axes.lines] == [NAMED[name].colour for name in ("gossip", "gossip-acid")]
    assert axes.get_yscale() == "log"
    titles = [panel.get_title(loc="left") for panel in exchange_maps(mixed).axes]
    assert [title for title in titles if title] == ["gossip", "gossip-acid"]


def test_neighbours_can_be_told_apart_without_colour() -> None:
    drawn = [look.dashes for look in looks(["fmb", "gossip", "gossip-acid", "live"]).values()]
    assert len(set(drawn)) == 4


def test_cells_show_their_counts_if_there_is_room_and_otherwise_have_a_colour_scale() -> None:
    small, large = a_gossip(peers=4), a_gossip(peers=NUMBERS_RANKS_MAX + 1)
    numbers = exchange_maps([small]).axes[0].texts
    counts = [count for row in exchange_counts(small) for count in row if count]
    assert sorted(int(number.get_text()) for number in numbers) == sorted(counts)
    labels = [axes.get_ylabel() for axes in exchange_maps([large]).axes]
    assert "exchanges of two ranks" in labels
    assert not exchange_maps([large]).axes[0].texts


@pytest.mark.parametrize(
    "draw", [partial(plot, name="consensus over time"), exchange_maps], ids=["consensus", "exchanges"]
)
def test_the_figures_can_be_drawn_with_many_few_and_no_exchanges(draw, mixed: list[RunRecords]) -> None:  # type: ignore[no-untyped-def]
    one = peers([an_exchange(1.0, 0, 1)])
    for runs in (mixed, [one], [peers(consensus((1.0, 0.0)))], [a_small_run()], [run([])]):
        text = svg_text(draw(runs))
        ElementTree.fromstring(text)
        assert svg_text(draw(runs)) == text


def test_a_timeline_without_a_hub_does_not_explain_its_marks() -> None:
    assert "update of the hub" not in svg_text(timeline([a_gossip(seconds=5.0)]))
    assert "update of the hub" in svg_text(timeline([a_gossip(seconds=5.0), a_toy("fmb", 1, seconds=5.0)]))
