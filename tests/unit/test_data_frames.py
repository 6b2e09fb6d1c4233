"""Tables of pandas: summaries of a comparison, and records by kind."""

from __future__ import annotations

import sys

import pandas
import pytest
from made_records import a_small_run, a_toy, a_traffic, an_exchange, run

from offbeat.errors import ConfigurationError, MissingDependency
from offbeat.records.comparison import Comparison
from offbeat.records.schema import (
    AnyRecord,
    Ended,
    Exchange,
    LinkUse,
    MergedContributions,
    RunRecords,
    Update,
)

KINDS = [str(kind.__struct_config__.tag) for kind in AnyRecord.__args__]


def test_a_comparison_has_a_row_for_each_run_and_a_column_for_each_metric() -> None:
    frame = Comparison.of([a_small_run(), a_small_run(label="amb", seed=2)]).to_pandas()
    assert list(frame["strategy"]) == ["fmb", "amb"]
    assert list(frame["seed"]) == [1, 2]
    assert list(frame["bytes_sent"]) == [1234, 1234]
    assert list(frame["dropped_by_reason.stale"]) == [7, 7]
    assert list(frame["dropped_by_reason.stopped"]) == [3, 3]
    assert not [column for column in frame.columns if column.startswith("traffic")]


def test_metrics_that_do_not_apply_are_missing_and_columns_stay_numbers() -> None:
    ended = Ended(at=1.0, bytes_sent=5, messages_sent=1, failure=None)
    frame = Comparison.of([run([ended], target=None), a_small_run(label="amb", target=None)]).to_pandas()
    assert frame["accuracy"].dtype == "float64"
    assert list(frame["accuracy"].isna()) == [True, False]
    assert frame["staleness_max"].dtype == "Int64"
    assert list(frame["dropped_by_reason.stale"]) == [0, 7]
    assert list(frame["seconds_to_target"].isna()) == [True, True]
    assert frame["seconds_to_target"].dtype == "float64"


def test_a_table_has_one_kind_of_record_with_strategy_and_seed() -> None:
    frame = a_small_run().to_pandas("round")
    assert list(frame.columns[:4]) == ["strategy", "seed", "at", "rank"]
    assert set(frame["strategy"]) == {"fmb"}
    assert list(frame["seconds"]) == [2.0, 1.0, 2.0, 1.0]
    assert list(frame["first"]) == [0, 0, 0, 0]
    assert list(frame["stop"]) == [10, 10, 10, 10]
    assert "draws" not in frame.columns


def test_messages_of_updates_have_a_table_of_their_own() -> None:
    records = a_small_run()
    assert list(records.to_pandas("update")["samples_total"]) == [20, 40]
    frame = records.to_pandas("contribution")
    assert list(frame["at"]) == [2.0, 2.0, 5.0, 5.0]
    assert list(frame["from_rank"]) == [1, 2, 1, 2]
    assert list(frame["samples"]) == [10, 10, 10, 10]
    assert list(frame["staleness_max"]) == [0, 1, 0, 5]


def test_aggregates_of_updates_have_a_row_for_each_rank() -> None:
    merged = MergedContributions(2, 0, 60, 50, 5, 10, 4)
    update = Update(4.0, 0, 5, 5, 50, 50, 0.1, (), updates=5, since=0.0, merged=(merged,))
    row = run([update]).to_pandas("contribution").iloc[0]
    assert (row["from_rank"], row["samples"], row["contributions"], row["staleness_mean"]) == (2, 50, 5, 2.0)


def test_traffic_has_a_row_for_each_direction_and_kind_of_message() -> None:
    frame = run([a_traffic(1.0, Gradient=200, Stop=100)]).to_pandas("traffic")
    assert list(frame["direction"]) == ["sent", "sent", "received", "received"]
    assert list(frame["kind"]) == ["Gradient", "Stop", "Gradient", "Stop"]
    assert list(frame["bytes"]) == [200, 100, 180, 90]


def test_use_of_links_has_a_row_for_each_peer() -> None:
    frame = run([LinkUse(1.0, 0, 1e6, {"1": 10, "2": 20})]).to_pandas("link_use")
    assert list(zip(frame["peer"], frame["bytes"], strict=True)) == [(1, 10), (2, 20)]


def test_missing_values_of_records_stay_missing() -> None:
    frame = run([an_exchange(1.0, 1, 2, None), an_exchange(2.0, 2, 1, 3.0)]).to_pandas("exchange")
    assert list(frame["distance"].isna()) == [True, False]
    assert frame["distance"].dtype == "float64"


@pytest.mark.parametrize("kind", [*KINDS, "contribution"])
def test_a_kind_without_records_is_an_empty_table_with_the_columns_of_a_full_one(kind: str) -> None:
    empty = run([]).to_pandas(kind)
    full = a_toy("apam", 1, workers=3, seconds=10.0).to_pandas(kind)
    assert len(empty) == 0
    assert list(empty.columns) == list(full.columns)
    numeric = list(full.select_dtypes(include=["number", "bool", "boolean"]).columns) if len(full) else ["at"]
    assert dict(empty[numeric].dtypes) == dict(full[numeric].dtypes)


def test_all_kinds_of_a_run_are_counted_in_their_order() -> None:
    records = a_small_run()
    assert records.counts() == {"membership": 5, "evaluation": 4, "round": 4, "update": 2, "dropped": 2, "ended": 1}
    assert sum(len(records.to_pandas(kind)) for kind in records.counts()) == len(records.records)


def test_tables_of_several_runs_can_be_joined() -> None:
    comparison = Comparison.of([a_small_run(), a_small_run(label="amb")])
    joined = pandas.concat(one.to_pandas("round") for one in comparison.runs)
    assert dict(joined.groupby("strategy")["samples"].sum()) == {"amb": 40, "fmb": 40}


def test_an_unknown_kind_is_refused_with_the_closest_known_one() -> None:
    with pytest.raises(ConfigurationError, match=r"^unknown kind of record 'rounds'; did you mean 'round'\?$"):
        a_small_run().to_pandas("rounds")


def test_without_pandas_the_error_has_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    sentence = r"^to_pandas needs pandas, which is not installed; type: pip install 'offbeat\[pandas\]'$"
    records: RunRecords = run([an_exchange(1.0, 1, 2)])
    for make in (lambda: records.to_pandas("exchange"), Comparison.of([records]).to_pandas):
        with pytest.raises(MissingDependency, match=sentence):
            make()
    assert isinstance(records.records[0], Exchange)
