"""What figures are drawn of: curves over time, samples and steps, and values of rounds and updates."""

from __future__ import annotations

import pytest
from made_records import a_round, a_small_run, a_traffic, accuracies, an_update, run
from msgspec.structs import replace

from offbeat.records import curves
from offbeat.records.schema import Round, RunRecords, Undone, Update


def rounds(*rows: tuple[float, int, float | None]) -> list[Round]:
    """One that ends at each time, with so many samples and this loss in all."""
    return [replace(a_round(1, at - 1.0, 1.0), samples=samples, loss=loss) for at, samples, loss in rows]


def pairs(curve: curves.Curve) -> list[tuple[float, float]]:
    return list(zip(curve.over.tolist(), curve.values.tolist(), strict=True))


def test_the_training_loss_counts_every_sample_once() -> None:
    made = run(rounds((1.0, 10, 20.0), (2.0, 30, 30.0), (3.0, 10, 5.0)))
    assert pairs(curves.training_loss_curve(made, window=1)) == [(1.0, 2.0), (2.0, 1.0), (3.0, 0.5)]
    assert pairs(curves.training_loss_curve(made, window=40)) == [(2.0, 50 / 40), (3.0, 35 / 40)]
    assert pairs(curves.training_loss_curve(made, window=1000)) == [(3.0, 55 / 50)], "all there is"


def test_rounds_are_taken_in_the_order_of_their_ends() -> None:
    made = run(rounds((3.0, 10, 5.0), (1.0, 10, 20.0)))
    assert pairs(curves.training_loss_curve(made, window=10)) == [(1.0, 2.0), (3.0, 0.5)]


def test_a_loss_that_is_missing_or_not_finite_does_not_count() -> None:
    bad = [replace(one, finite=False) for one in rounds((2.0, 10, 99.0))]
    made = run([*rounds((1.0, 10, 20.0), (3.0, 10, None), (4.0, 10, float("nan")), (5.0, 0, 0.0)), *bad])
    assert pairs(curves.training_loss_curve(made, window=10)) == [(1.0, 2.0)]
    assert pairs(curves.training_loss_curve(run([]))) == []


def test_a_loss_over_steps_stands_at_the_updates_that_were_made_by_then() -> None:
    updates = [an_update(at, 10, (1, 0, 10, 0)) for at in (0.5, 1.5, 1.7)]
    made = run([*updates, *rounds((1.0, 10, 20.0), (2.0, 10, 10.0))])
    assert pairs(curves.training_loss_curve(made, "steps", window=10)) == [(1.0, 2.0), (3.0, 1.0)]


def test_steps_are_updates_and_those_that_are_undone_do_not_count() -> None:
    updates = [replace(an_update(float(at), 10 * at, (1, 0, 10, 0)), version=at) for at in (1, 2, 3)]
    undone = Undone(at=4.0, rank=0, version=4, to_version=1, samples=20, samples_total=10)
    assert pairs(curves.steps_curve(run([*updates, undone]))) == [
        (0.0, 0.0),
        (1.0, 1.0),
        (2.0, 2.0),
        (3.0, 3.0),
        (4.0, 1.0),
    ]


def test_where_peers_update_each_its_own_model_a_step_is_one_of_all() -> None:
    updates = [an_update(1.0 + rank, 10, (rank, 0, 10, 0), rank=rank) for rank in (0, 1)]
    assert pairs(curves.steps_curve(run(updates))) == [(0.0, 0.0), (1.0, 0.5), (2.0, 1.0)]


def test_the_learning_rate_is_that_of_each_update() -> None:
    updates = [replace(an_update(at, 10, (1, 0, 10, 0)), learning_rate=rate) for at, rate in ((2.0, 0.1), (4.0, 0.05))]
    assert pairs(curves.learning_rate_curve(run(updates))) == [(2.0, 0.1), (4.0, 0.05)]
    assert pairs(curves.learning_rate_curve(run(updates), "steps")) == [(1.0, 0.1), (2.0, 0.05)]


def test_accuracy_over_samples() -> None:
    curve = curves.evaluation_curve(run(accuracies([0.1, None, 0.5])), "accuracy", "samples")
    assert pairs(curve) == [(0.0, 0.1), (200.0, 0.5)]


def test_top5_accuracy_is_a_curve_where_it_was_measured() -> None:
    measured = [replace(one, accuracy_top5=0.9) for one in accuracies([0.1, 0.2])]
    assert pairs(curves.evaluation_curve(run(measured), "accuracy_top5")) == [(0.0, 0.9), (1.0, 0.9)]
    assert pairs(curves.evaluation_curve(run(accuracies([0.1])), "accuracy_top5")) == []


def test_bytes_over_time_begin_at_nothing() -> None:
    counted = [a_traffic(1.0, Gradient=1000), a_traffic(3.0, Gradient=5000)]
    assert pairs(curves.bytes_curve(run(counted))) == [(0.0, 0.0), (1.0, 1000.0), (3.0, 5000.0)]
    assert pairs(curves.bytes_curve(a_small_run())) == []


@pytest.fixture
def small() -> list[RunRecords]:
    return [a_small_run()]


def test_values_of_rounds_and_updates(small: list[RunRecords]) -> None:
    assert curves.field_values(Round, "seconds", small).tolist() == [2.0, 1.0, 2.0, 1.0]
    assert curves.field_values(Round, "induced_seconds", small).tolist() == [0.0, 0.5, 0.0, 0.0]
    assert curves.field_values(Round, "idle_seconds", small).tolist() == [0.0, 0.0, 0.0, 2.0]
    assert curves.field_values(Round, "send_seconds", small).tolist() == [0.0] * 4
    assert curves.field_values(Update, "samples", small).tolist() == [20.0, 20.0]
    assert curves.field_values(Update, "messages", small).tolist() == [2.0, 2.0]
    assert curves.stalenesses(small).tolist() == [0.0, 0.0, 1.0, 5.0]
