"""What is computed from records: summaries, the time to target, paired speed-ups, and the curves of figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
from made_records import a_round, a_small_run, accuracies, an_update, losses, run, timed

from offbeat.core.workload import Target
from offbeat.errors import ConfigurationError
from offbeat.records.comparison import Comparison, cost_ratio, interval
from offbeat.records.curves import band, evaluation_curve, hub_updates, samples_curve, segments, stalenesses
from offbeat.records.metrics import samples_to_target, seconds_to_target, summarize
from offbeat.records.schema import AnyRecord, Ended, Evaluation, Membership

KEYS = [
    "strategy",
    "workload",
    "workers",
    "seed",
    "seconds",
    "updates",
    "samples",
    "loss",
    "accuracy",
    "seconds_to_target",
    "staleness_mean",
    "staleness_max",
    "idle_share",
    "dropped",
    "lost_peers",
    "rejoined_peers",
    "bytes_sent",
    "directory",
    "samples_per_second",
    "bytes_per_second",
    "samples_per_update",
    "messages_per_update",
    "compute_seconds",
    "idle_seconds",
    "induced_seconds",
    "dropped_by_reason",
    "samples_to_target",
    "bytes_to_target",
    "bytes_received",
    "traffic",
    "failure",
    "exchanges",
    "exchanges_per_gradient",
    "exchanges_lost",
    "round_trip_seconds",
    "consensus_distance",
    "consensus_estimated",
    "budget_used",
    "budget_used_mean",
    "undone",
    "accuracy_top5",
    "updates_to_target",
]


def test_a_small_run_is_summarized_as_by_hand() -> None:
    summary = summarize(a_small_run(directory=Path("runs/one")))
    assert (summary.strategy, summary.workload, summary.workers, summary.seed) == ("fmb", "digits", 2, 1)
    assert (summary.seconds, summary.updates, summary.samples) == (8.0, 2, 40)
    assert (summary.loss, summary.accuracy) == (0.0, 1.0)
    assert summary.seconds_to_target == pytest.approx(5.0)
    assert summary.samples_to_target == pytest.approx(250.0)
    assert summary.updates_to_target == 2
    assert (summary.staleness_mean, summary.staleness_max) == (1.5, 5)
    assert (summary.compute_seconds, summary.idle_seconds, summary.induced_seconds) == (6.0, 2.0, 0.5)
    assert summary.idle_share == 0.25
    assert (summary.dropped, summary.dropped_by_reason) == (10, {"stale": 7, "stopped": 3})
    assert (summary.lost_peers, summary.rejoined_peers) == (1, 1)
    assert (summary.bytes_sent, summary.directory, summary.failure) == (1234, "runs/one", None)
    assert (summary.samples_per_second, summary.samples_per_update, summary.messages_per_update) == (5.0, 20.0, 2.0)
    assert summary.bytes_per_second == 1234 / 8.0


def test_what_does_not_apply_to_a_run_is_none() -> None:
    summary = summarize(run([Ended(at=0.0, bytes_sent=0, messages_sent=0, failure="the hub was lost")], target=None))
    absent = ("loss", "accuracy", "seconds_to_target", "staleness_mean", "staleness_max", "idle_share", "directory")
    assert [getattr(summary, name) for name in absent] == [None] * len(absent)
    assert (summary.samples_per_second, summary.samples_per_update, summary.bytes_per_second) == (None, None, None)
    assert summary.failure == "the hub was lost"


def test_a_run_whose_records_stop_early_has_failed() -> None:
    summary = summarize(run(accuracies([0.1, 0.2])))
    assert summary.seconds == 1.0
    assert (summary.bytes_sent, summary.bytes_per_second) == (None, None)
    assert "stop before" in (summary.failure or "")


def an_end(at: float, rank: int, bytes_sent: int, failure: str | None = None) -> Ended:
    return Ended(at=at, rank=rank, bytes_sent=bytes_sent, messages_sent=1, failure=failure)


def test_a_live_run_ends_as_its_rank_0_does_and_sends_what_all_send() -> None:
    ends = [an_end(3.0, 1, 5, "left"), an_end(4.0, 0, 10, "the hub was stopped"), an_end(9.0, 0, 100)]
    later = [an_end(9.5, 2, 1000, "the hub is gone"), an_end(10.0, 1, 10_000)]
    summary = summarize(run([*accuracies([0.1, 0.2]), *ends, *later], engine="live"))
    assert (summary.seconds, summary.failure) == (9.0, None)
    assert summary.bytes_sent == 11_115
    assert summary.bytes_per_second == 11_115 / 9.0


def test_a_live_run_fails_where_rank_0_was_killed_and_only_there() -> None:
    assert summarize(run([a_round(2, 0.0, 1.0), an_end(2.0, 0, 1)], engine="live")).failure is None
    killed = summarize(run([a_round(2, 0.0, 1.0), an_end(2.0, 2, 1)], engine="live"))
    assert "stop before" in (killed.failure or "")
    assert (killed.seconds, killed.bytes_sent) == (2.0, None)


def among_equals(*ends: Ended) -> list[AnyRecord]:
    """Rank 1 knows of 30 samples when it makes its update; both together have made 40."""
    update = an_update(1.0, 30, (1, 0, 20, 0))
    return [*(msgspec.structs.replace(update, rank=rank) for rank in (0, 1)), *ends]


def test_a_decentralized_run_ends_as_the_lowest_rank_without_failure() -> None:
    without_rank_0 = summarize(run(among_equals(an_end(8.0, 2, 1), an_end(9.0, 1, 10)), engine="live"))
    assert (without_rank_0.failure, without_rank_0.seconds, without_rank_0.bytes_sent) == (None, 9.0, 11)
    failed = an_end(3.0, 0, 1, "it was interrupted")
    assert summarize(run(among_equals(failed, an_end(9.0, 1, 1)), engine="live")).failure is None
    assert summarize(run(among_equals(failed, an_end(9.0, 1, 1, "other")), engine="live")).failure == failed.failure
    assert "stop before" in (summarize(run(among_equals(), engine="live")).failure or "")


def test_samples_of_a_decentralized_run_are_added_unless_a_rank_knows_of_more() -> None:
    assert summarize(run(among_equals())).samples == 40
    known = [msgspec.structs.replace(record, samples_total=50) for record in among_equals()]
    assert summarize(run(known)).samples == 50
    assert summarize(run([an_update(1.0, 30, (1, 0, 20, 0))])).samples == 30  # a hub that was resumed


def test_a_loss_that_several_peers_see_is_one_loss() -> None:
    seen = [Membership(at=1.0, rank=rank, peer=3, incarnation=0, joined=False) for rank in (1, 2)]
    assert summarize(run(seen)).lost_peers == 1


def test_a_restarted_rank_sees_all_others_join_and_is_the_only_one_that_rejoined() -> None:
    def met(rank: int, peer: int, incarnation: int, joined: bool = True) -> Membership:
        return Membership(at=1.0, rank=rank, peer=peer, incarnation=incarnation, joined=joined)

    ranks = range(4)
    began = [met(rank, peer, 0) for rank in ranks for peer in ranks if rank != peer]
    lost = [met(rank, 2, 0, joined=False) for rank in (0, 1, 3)]
    again = [met(*pair, 1) for rank in (0, 1, 3) for pair in ((rank, 2), (2, rank))]
    summary = summarize(run([*began, *lost, *again]))
    assert (summary.lost_peers, summary.rejoined_peers) == (1, 1)


def test_a_partitioned_rank_loses_all_others_and_each_of_them_loses_one() -> None:
    pairs = [(2, peer) for peer in (0, 1, 3)] + [(rank, 2) for rank in (0, 1, 3)]
    met = [Membership(at=1.0, rank=a, peer=b, incarnation=0, joined=True) for a in range(4) for b in range(4) if a != b]
    lost = [Membership(at=2.0, rank=a, peer=b, incarnation=0, joined=False) for a, b in pairs]
    assert summarize(run([*met, *lost])).lost_peers == 1


def test_the_time_to_target_is_interpolated_between_evaluations() -> None:
    curve = accuracies([0.0, 0.4, 0.8, 1.0], every=10.0)
    assert seconds_to_target(curve, "accuracy", 0.5) == pytest.approx(12.5)
    assert seconds_to_target(curve, "accuracy", 0.9) == pytest.approx(25.0)
    assert samples_to_target(curve, "accuracy", 0.5) == pytest.approx(125.0)
    assert seconds_to_target(losses([4.0, 2.0, 1.0, 0.5]), "loss", 1.5) == pytest.approx(1.5)


def test_evaluations_that_were_written_out_of_order_are_put_in_order() -> None:
    curve = accuracies([0.0, 0.4, 0.8, 1.0])
    assert seconds_to_target(curve[::-1], "accuracy", 0.6) == seconds_to_target(curve, "accuracy", 0.6)


@pytest.mark.parametrize("lucky", [0, 1, 3, 6])
def test_a_single_lucky_evaluation_does_not_reach_the_target(lucky: int) -> None:
    values = [0.5] * 7
    values[lucky] = 0.95
    assert seconds_to_target(accuracies(values), "accuracy", 0.9) is None


def test_a_curve_that_was_rising_may_reach_the_target_with_its_last_evaluation() -> None:
    assert seconds_to_target(accuracies([0.0, 0.5, 1.0]), "accuracy", 0.75) == pytest.approx(1.5)


def test_a_target_that_is_met_at_the_start_takes_no_time() -> None:
    assert seconds_to_target(accuracies([0.95, 0.96, 0.97]), "accuracy", 0.9) == 0.0


def test_a_target_is_not_reached_without_evaluations_or_without_accuracy() -> None:
    assert seconds_to_target([], "accuracy", 0.9) is None
    assert seconds_to_target(losses([1.0, 0.5, 0.2]), "accuracy", 0.9) is None


def test_a_loss_that_is_not_a_number_counts_as_the_worst() -> None:
    assert seconds_to_target(losses([math.nan, math.nan, 0.4, 0.3]), "loss", 0.5) == 2.0
    assert seconds_to_target(losses([1.0, math.nan, math.nan]), "loss", 0.5) is None


def test_speedup_is_paired_by_seed_with_a_student_interval() -> None:
    baseline = [summarize(timed("fmb", seed, 12.0)) for seed in (1, 2, 3)]
    other = [summarize(timed("amb", seed, seconds)) for seed, seconds in ((3, 4.0), (1, 12.0), (2, 6.0))]
    gain = cost_ratio(baseline, other, "seconds_to_target")
    assert gain is not None
    # The ratios are 1, 2 and 3: mean 2, standard deviation 1, and t(0.975, 2) is 4.302653; 4.302653/√3 is 2.484138.
    assert gain.mean == pytest.approx(2.0)
    assert gain.low == pytest.approx(2.0 - 2.484138, abs=1e-6)
    assert gain.high == pytest.approx(2.0 + 2.484138, abs=1e-6)
    assert (gain.pairs, gain.missed) == (3, 0)


def test_pairs_that_miss_the_target_are_skipped_and_counted() -> None:
    baseline = [summarize(timed("fmb", 1, 12.0)), summarize(timed("fmb", 2, None))]
    other = [summarize(timed("amb", 1, 6.0)), summarize(timed("amb", 2, 5.0)), summarize(timed("amb", 9, 5.0))]
    gain = cost_ratio(baseline, other, "seconds_to_target")
    assert gain is not None
    assert (gain.mean, gain.low, gain.high, gain.pairs, gain.missed) == (2.0, None, None, 1, 1)
    assert cost_ratio(baseline[1:], other, "seconds_to_target") is None


def test_an_interval_over_nothing_is_none() -> None:
    assert interval([None, None]) is None


def test_the_keys_of_the_json_are_pinned_in_order() -> None:
    answer = Comparison.of([a_small_run(), a_small_run(label="amb")]).to_json()
    assert list(answer) == ["runs", "target", "baseline", "speedup", "bytes_ratio"]
    assert list(answer["runs"][0]) == KEYS
    assert answer["target"] == {"metric": "accuracy", "value": 0.9}
    assert list(answer["speedup"]) == ["fmb", "amb"]
    assert list(answer["speedup"]["amb"]) == ["mean", "low", "high", "pairs", "missed"]
    assert list(answer["bytes_ratio"]) == ["fmb", "amb"]
    assert list(answer["bytes_ratio"]["amb"]) == ["mean", "low", "high", "pairs", "missed"]


def test_json_never_holds_what_is_not_a_number() -> None:
    diverged = Evaluation(at=1.0, rank=0, version=1, samples_total=10, loss=math.nan, accuracy=math.inf)
    answer = Comparison.of([run([diverged]), timed("amb", 1, None)]).to_json()
    json.dumps(answer, allow_nan=False)
    assert answer["runs"][0]["loss"] is None
    assert answer["speedup"]["amb"] == {"mean": None, "low": None, "high": None, "pairs": 0, "missed": 1}


def test_the_baseline_is_fmb_where_there_is_one_or_the_first_or_the_one_named() -> None:
    runs = [timed("amb", 1, 2.0), timed("fmb", 1, 4.0), timed("apam", 1, 1.0)]
    assert Comparison.of(runs).baseline == "fmb"
    assert Comparison.of([runs[2], runs[0]]).baseline == "apam"
    assert Comparison.of(runs, "apam").baseline == "apam"
    with pytest.raises(ConfigurationError, match="did you mean 'apam'"):
        Comparison.of(runs, "apan")


def test_runs_that_cannot_be_compared_are_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigurationError, match=r"different workloads \(digits, mnist\)"):
        Comparison.of([timed("fmb", 1, 2.0), timed("amb", 1, 2.0, workload="mnist")])
    with pytest.raises(ConfigurationError, match="different targets"):
        Comparison.of([timed("fmb", 1, 2.0), timed("amb", 1, 2.0, target={"metric": "loss", "value": 1})])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Comparison.of([timed("fmb", 1, 2.0, target={"metric": "speed", "value": 1})])
    with pytest.raises(ConfigurationError, match="no run"):
        Comparison.of([])


def test_a_run_without_a_target_is_timed_against_that_of_the_others() -> None:
    comparison = Comparison.of([timed("fmb", 1, 4.0), timed("amb", 1, 2.0, target=None)])
    assert comparison.target == Target("accuracy", 0.9)
    assert comparison.runs_of("amb")[0].seconds_to_target == 2.0


def test_a_band_covers_the_time_that_all_seeds_cover() -> None:
    short = evaluation_curve(run(accuracies([0.0, 1.0])), "accuracy")
    long = evaluation_curve(run(accuracies([0.5, 0.5, 0.5])), "accuracy")
    over = band([short, long], points=3)
    assert over is not None
    assert over.over.tolist() == [0.0, 0.5, 1.0]
    assert over.mean.tolist() == [0.25, 0.5, 0.75]
    assert (over.low.tolist(), over.high.tolist()) == ([0.0, 0.5, 0.5], [0.5, 0.5, 1.0])
    assert band([]) is None


def test_a_timeline_has_the_rounds_of_each_rank() -> None:
    rows = segments(run([a_round(2, 3.0, 2.0, idle=1.0, induced=0.5), a_round(1, 0.0, 1.0), a_round(1, 9.0, 1.0)]), 5.0)
    assert list(rows) == [1, 2]
    (segment,) = rows[2]
    assert (segment.start, segment.compute_seconds, segment.induced_seconds, segment.idle_seconds) == (3.0, 1.5, 0.5, 1)
    assert len(rows[1]) == 1


def test_updates_of_several_ranks_are_not_those_of_a_hub() -> None:
    one, other = an_update(1.0, 10, (1, 0, 10, 0)), an_update(2.0, 5, (2, 0, 10, 3), rank=1)
    assert hub_updates(run([one])).tolist() == [1.0]
    assert hub_updates(run([one, other])).tolist() == []
    assert samples_curve(run([one, other])).values.tolist() == [0.0, 10.0, 10.0]
    assert stalenesses([run([one, other])]).tolist() == [0.0, 3.0]
