"""What records of traffic tell: bytes to target, with how many times fewer, and in what kinds of message."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from made_records import a_small_run, a_toy, a_traffic, accuracies, run, timed
from rich.console import Console

import offbeat as ob
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Message, Stop
from offbeat.core.wire_size import HEAD_BYTES, MessageSize, wire_size
from offbeat.lab.plots.figures import plot
from offbeat.lab.report.formatting import size
from offbeat.lab.report.page import report_page
from offbeat.lab.report.table import columns, comparison_table
from offbeat.records.comparison import Comparison, cost_ratio
from offbeat.records.curves import quality_over_bytes
from offbeat.records.metrics import summarize
from offbeat.records.schema import RECORD_DECODER, RECORD_LINES_KIND, Ended, Flow, RunRecords, Traffic
from offbeat.records.traffic import BytesSent, TrafficCounter
from offbeat.strategies.hub.hub_worker import Gradient
from offbeat.transports import wire
from offbeat.transports.remote_records import RecordLines


@dataclass(frozen=True)
class Bye(Message):
    """A message without fields."""


END = Ended(at=20.0, bytes_sent=0, messages_sent=0, failure=None)


def weighed(label: str, seed: int, nbytes: int | None, seconds: float = 10.0, **changed: Any) -> RunRecords:
    """A run that has sent `nbytes` bytes when it reaches its target; None: not counted."""
    known = timed(label, seed, seconds, **changed)
    sent = [] if nbytes is None else [a_traffic(seconds, Gradient=nbytes), a_traffic(2 * seconds, Gradient=9 * nbytes)]
    return RunRecords(None, known.header, (*sent, *known.records))


# Bytes to target


def test_bytes_to_target_are_interpolated_like_its_seconds() -> None:
    curve = accuracies([0.0, 0.4, 0.8, 1.0], every=10.0)
    traffic = [a_traffic(at, Gradient=sent) for at, sent in ((0.0, 0), (10.0, 100), (20.0, 500), (30.0, 700))]
    summary = summarize(run([*curve, *traffic, END]))
    assert summary.seconds_to_target == pytest.approx(25.0)
    assert summary.bytes_to_target == 600
    assert isinstance(summary.bytes_to_target, int)


def test_without_traffic_or_target_or_success_there_are_no_bytes_to_target() -> None:
    curve = accuracies([0.0, 0.4, 0.8, 1.0], every=10.0)
    old = summarize(run([*curve, END]))
    assert (old.seconds_to_target, old.bytes_to_target, old.bytes_received, old.traffic) == (25.0, None, None, {})
    sent = a_traffic(30.0, Gradient=700)
    assert summarize(run([*curve, sent, END], target=None)).bytes_to_target is None
    missed = summarize(run([*accuracies([0.0, 0.1, 0.1]), sent, END]))
    assert (missed.bytes_to_target, missed.bytes_received) == (None, 630)


def test_a_target_that_is_met_at_the_start_takes_no_bytes_and_has_no_ratio() -> None:
    met = run([*accuracies([0.95, 0.96, 0.97]), a_traffic(0.0), a_traffic(2.0, Gradient=100), END], label="met")
    assert summarize(met).bytes_to_target == 0
    assert cost_ratio([summarize(weighed("fmb", 1, 100))], [summarize(met)], "bytes_to_target") is None


def test_the_first_of_several_records_at_the_same_time_counts() -> None:
    """The last evaluation of a simulation and its end come at the same time, and Stop is sent in between."""
    curve = accuracies([0.0, 0.5, 0.9], every=10.0)
    traffic = [a_traffic(20.0, Gradient=400), a_traffic(20.0, Gradient=400, Stop=1000)]
    summary = summarize(run([*curve, *traffic, END]))
    assert (summary.seconds_to_target, summary.bytes_to_target) == (20.0, 400)


def test_the_counts_of_all_ranks_of_a_live_run_are_added_up() -> None:
    records = [
        *accuracies([0.0, 0.9, 1.0], every=10.0),
        a_traffic(8.0, rank=0, Parameters=800),
        a_traffic(12.0, rank=0, Parameters=1200),
        a_traffic(9.0, rank=1, since=4.0, Gradient=500),
        a_traffic(11.0, rank=1, since=4.0, Gradient=700),
        END,
    ]
    summary = summarize(run(records, engine="live"))
    assert summary.seconds_to_target == 10.0
    assert summary.bytes_to_target == 1000 + 600
    assert summary.traffic == {"Gradient": Flow(7, 700, 1400), "Parameters": Flow(12, 1200, 2400)}
    assert summary.bytes_received == (1200 + 700) * 9 // 10


def test_a_killed_rank_counts_up_to_its_last_record_and_its_successor_from_zero() -> None:
    records = [
        *accuracies([0.0, 0.9, 1.0], every=10.0),
        a_traffic(3.0, rank=2, since=0.5, Gradient=300),
        a_traffic(6.0, rank=2, since=5.0, Gradient=400),  # more than the one before, and not the same count
        END,
    ]
    summary = summarize(run(records, engine="live"))
    assert (summary.bytes_to_target, summary.traffic["Gradient"].bytes) == (700, 700)


def test_series_that_overlap_in_time_after_resuming_are_kept_apart() -> None:
    """A run that was resumed repeats some seconds; a worker's records of the first attempt are still there."""
    first = [a_traffic(at, rank=1, since=0.0, Gradient=int(100 * at)) for at in (4.0, 6.0, 8.0)]
    again = [a_traffic(at, rank=1, since=5.0, Gradient=int(100 * (at - 5))) for at in (7.0, 9.0, 11.0)]
    records = sorted([*first, *again], key=lambda record: record.at)
    sent = BytesSent(run(records, engine="live"))
    assert sent.by(4.0) == 400
    assert sent.by(7.0) == 700 + 200
    assert sent.by(30.0) == 800 + 600


def test_messages_that_carry_records_are_not_training_traffic() -> None:
    assert RecordLines.__name__ == RECORD_LINES_KIND
    records = [*accuracies([0.0, 0.9, 1.0], every=10.0), a_traffic(10.0, rank=1, Gradient=100, RecordLines=900), END]
    summary = summarize(run(records, engine="live"))
    assert summary.bytes_to_target == 100
    assert list(summary.traffic) == ["Gradient", "RecordLines"]
    assert summary.bytes_received == 900


# Comparison


def test_fewer_bytes_are_paired_by_seed_with_a_student_interval() -> None:
    baseline = [summarize(weighed("fmb", seed, 1200)) for seed in (1, 2, 3)]
    other = [summarize(weighed("amb", seed, nbytes)) for seed, nbytes in ((3, 400), (1, 1200), (2, 600))]
    ratio = cost_ratio(baseline, other, "bytes_to_target")
    assert ratio is not None
    # The ratios are 1, 2 and 3: mean 2, standard deviation 1, and t(0.975, 2) is 4.302653; 4.302653/√3 is 2.484138.
    assert ratio.mean == pytest.approx(2.0)
    assert ratio.low == pytest.approx(2.0 - 2.484138, abs=1e-6)
    assert ratio.high == pytest.approx(2.0 + 2.484138, abs=1e-6)
    assert (ratio.pairs, ratio.missed) == (3, 0)


def test_seeds_without_counted_bytes_are_skipped_and_reported() -> None:
    comparison = Comparison.of(
        [weighed("fmb", 1, 1000), weighed("fmb", 2, None), weighed("amb", 1, 250), weighed("amb", 2, 10)]
    )
    answer = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert answer["bytes_ratio"]["amb"] == {"mean": 4.0, "low": None, "high": None, "pairs": 1, "missed": 1}
    assert answer["speedup"]["amb"]["pairs"] == 2
    first, second = answer["runs"][:2]
    assert (first["bytes_to_target"], first["bytes_received"]) == (1000, 8100)
    assert first["traffic"] == {"Gradient": {"messages": 90, "bytes": 9000, "bytes_uncompressed": 18000}}
    assert (second["bytes_to_target"], second["bytes_received"], second["traffic"]) == (None, None, {})


def printed(comparison: Comparison, width: int) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(comparison_table(comparison, width))
    return capture.get()


def heads(text: str) -> str:
    return " ".join(text.split("─")[0].split())


def test_the_table_has_bytes_to_target_and_the_factor_where_there_is_room() -> None:
    both = Comparison.of([weighed("fmb", 1, 1_234_567), weighed("amb", 1, 123_456)])
    wide = printed(both, 160)
    assert "1.23 MB" in wide
    assert "123 kB" in wide
    assert "10.00×" in wide
    old = Comparison.of([weighed("fmb", 1, None)])
    assert not any("bytes" in column.head for column in columns(old))


@pytest.mark.parametrize("width", [80, 100])
def test_columns_are_removed_in_order_until_the_table_fits(width: int) -> None:
    labels = ("fmb", "amb", "async-fmb", "async-timed", "apam", "sync-amsgrad", "k-of-n")
    comparison = Comparison.of([a_toy(label, seed, 4, 120.0) for label in labels for seed in (1, 2)])
    text = printed(comparison, width)
    lines = text.rstrip().splitlines()
    assert max(len(line) for line in lines) <= width
    assert len(lines) == 3 + len(labels), f"a cell was folded:\n{text}"
    assert "speed-up" in text
    assert "to target speed-up to target" in heads(text)
    assert "updates" not in text
    assert ("dropped" in text) == (width == 100)
    assert "updates" in printed(comparison, 160)


def test_the_loss_column_is_removed_only_if_there_is_an_accuracy() -> None:
    without = [msgspec.structs.replace(one, accuracy=None) for one in accuracies([0.1, 0.5])]
    narrow = comparison_table(Comparison.of([run([*without, END])]), 10)
    assert [column.header for column in narrow.columns][-1] == "loss"
    narrow = comparison_table(Comparison.of([run([*accuracies([0.1, 0.5]), END])]), 10)
    assert [column.header for column in narrow.columns][-1] == "accuracy"


# The page


def test_the_page_lists_traffic_by_kind_of_message_with_and_without_compression() -> None:
    page = report_page([weighed("fmb", 1, 1000), weighed("fmb", 2, 2000), weighed("amb", 1, None)])
    section = page[page.index('<h2 id="traffic">') :]
    assert '<th scope="rowgroup" rowspan="1">fmb</th><td class="kind">Gradient</td>' in section
    assert "<td>135</td><td>13.5 kB</td><td>27.0 kB</td><td>2.00×</td>" in section
    assert ">amb<" not in section[: section.index("</table>")]
    assert "Accuracy over bytes sent" in page
    assert "fewer bytes" in page


def test_the_page_of_runs_without_traffic_does_not_mention_it() -> None:
    page = report_page([a_small_run()])
    assert "traffic" not in page
    assert "over bytes" not in page


def test_quality_is_drawn_over_bytes_sent() -> None:
    curve = quality_over_bytes(weighed("fmb", 1, 1000), "accuracy")
    assert curve.over.tolist() == [0.0, 1000.0, 9000.0]
    assert curve.values.tolist() == [0.0, 0.9, 1.0]
    assert len(quality_over_bytes(a_small_run(), "accuracy").over) == 0


def test_bytes_have_a_logarithmic_axis_where_runs_differ_by_much() -> None:
    near = plot([weighed("fmb", 1, 1000), weighed("amb", 1, 400)], "quality over bytes")
    assert (near.axes[0].get_xscale(), near.axes[0].get_xlim()[0]) == ("linear", 0)
    far = plot(
        [weighed("fmb", 1, 1000), weighed("amb", 1, 10), weighed("apam", 1, None), run([])], "quality over bytes"
    )
    assert far.axes[0].get_xscale() == "log"
    assert far.axes[0].get_xlim()[0] == pytest.approx(10)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1_234_567, "1.23 MB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_600, "1.00 MB"),
        (5e18, "5000 PB"),
    ],
)
def test_sizes_have_three_digits_and_a_unit_of_a_thousand(nbytes: float | None, text: str) -> None:
    assert size(nbytes) == text


# Counting


def test_counts_are_cumulative_by_kind_and_not_recorded_twice() -> None:
    count = TrafficCounter(rank=3)
    count.begin(1.5)
    count.sent(MessageSize(Gradient, 100, 400))
    count.sent(MessageSize(Gradient, 50, 60))
    count.sent(MessageSize(Bye, 10, 10))
    count.received(MessageSize(Stop, 7, 7))
    record = count.record(2.0)
    assert record == Traffic(
        at=2.0,
        rank=3,
        since=1.5,
        sent={"Bye": Flow(1, 10, 10), "Gradient": Flow(2, 150, 460)},
        received={"Stop": Flow(1, 7, 7)},
    )
    assert list(record.sent) == ["Bye", "Gradient"]
    assert count.record(2.0) is None
    assert (count.bytes_sent, count.messages_sent) == (160, 3)


def test_the_start_of_a_count_follows_the_clock_until_the_first_record() -> None:
    count = TrafficCounter()
    count.begin(1.0)
    count.shift(100.0)
    first = count.record(102.0)
    count.shift(100.0)
    second = count.record(203.0)
    assert first is not None
    assert second is not None
    assert (first.since, second.since) == (101.0, 101.0)


def test_the_size_of_a_message_is_that_on_the_wire() -> None:
    message = Stop(torch.zeros(10), (), 1)
    assert wire_size(message) == wire.encode(message).size == MessageSize(Stop, HEAD_BYTES + 40, HEAD_BYTES + 40)


def test_a_compressed_message_counts_with_and_without_compression() -> None:
    vector = torch.arange(1000, dtype=torch.float32)
    blob = ob.compression.Int8().encode(vector, Pool())
    whole, coded = (Gradient(tensor, (), 1, 0.0, 0, (0, 1), 1.0, True) for tensor in (vector, blob))
    assert blob.nbytes < vector.nbytes
    assert wire_size(coded) == MessageSize(Gradient, HEAD_BYTES + blob.nbytes, HEAD_BYTES + vector.nbytes)
    encoded, plain = wire.encode(coded), wire.encode(whole)
    assert (encoded.size.kind, encoded.size.nbytes) == (Gradient, HEAD_BYTES + blob.nbytes)
    assert encoded.size.nbytes_uncompressed == plain.size.nbytes_uncompressed == plain.size.nbytes


def test_a_line_of_traffic_can_be_read_again() -> None:
    record = a_traffic(1.0, rank=2, since=0.25, Gradient=300)
    assert RECORD_DECODER.decode(msgspec.json.encode(record)) == record
    plain = msgspec.json.decode(msgspec.json.encode(record))
    assert list(plain) == ["record", "at", "rank", "since", "sent", "received"]
    assert plain["sent"] == {"Gradient": {"messages": 3, "bytes": 300, "bytes_uncompressed": 600}}
