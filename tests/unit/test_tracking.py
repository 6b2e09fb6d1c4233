"""Trackers: what they are told of a run, and that no tracker can change, stop or slow one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from made_records import header, run

import offbeat as ob
from offbeat.cli import main
from offbeat.core.actions import Record
from offbeat.engine.experiment import Experiment
from offbeat.errors import ConfigurationError
from offbeat.lab.simulated_runs import record_bytes
from offbeat.records.metrics import summarize
from offbeat.records.schema import (
    Contribution,
    Ended,
    Evaluation,
    Flow,
    Membership,
    Notice,
    Round,
    Traffic,
    Undone,
    Update,
)
from offbeat.tracking.named_trackers import TRACKERS, trackers_of
from offbeat.tracking.run_description import configuration
from offbeat.tracking.run_metrics import POINTS_MAX, RunMetrics, TrackedEvent, TrackedPoint
from offbeat.tracking.sink import TrackingSink, summary_values
from offbeat.tracking.tracker import TrackedRun

RUN = TrackedRun(label="fmb", workload="digits", seed=1)
WAIT_SECONDS = 60.0


class InMemory(ob.Tracker):
    """Keeps everything it is told."""

    def __init__(self) -> None:
        self.run: TrackedRun | None = None
        self.points: list[tuple[int, dict[str, float]]] = []
        self.events: list[tuple[int, str]] = []
        self.summary: dict[str, Any] | None = None

    def start(self, run: TrackedRun) -> None:
        self.run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.points.append((step, dict(values)))

    def event(self, step: int, text: str) -> None:
        self.events.append((step, text))

    def close(self, summary: Mapping[str, Any]) -> None:
        self.summary = dict(summary)

    def values(self, name: str) -> list[float]:
        return [values[name] for _, values in self.points if name in values]


class Failing(InMemory):
    """Fails at the second value."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        super().log(step, values)
        if len(self.points) == 2:
            raise OSError("no space left\non the tracker's disk")


class Stuck(InMemory):
    """Does not return from its first value until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck, self.released = threading.Event(), threading.Event()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.is_stuck.set()
        assert self.released.wait(WAIT_SECONDS)
        super().log(step, values)


def a_round(at: float, loss: float, idle: float = 0.0) -> Round:
    return Round(
        at=at, rank=1, start=at - 1.0, seconds=1.0, induced_seconds=0.0, samples=10, loss=loss, version=0,
        draws=(0, 10), idle_seconds=idle, send_seconds=0.0, finite=True,
    )  # fmt: skip


def an_update(at: float, version: int, staleness: Sequence[int] = (0,), rank: int = 0, samples: int = 10) -> Update:
    parts = tuple(Contribution(1, 0, samples, each) for each in staleness)
    return Update(
        at=at, rank=rank, version=version, messages=len(parts), samples=samples, samples_total=samples * version,
        learning_rate=0.1, contributions=parts,
    )  # fmt: skip


def told(records: Sequence[Record], metrics: RunMetrics) -> list[TrackedPoint | TrackedEvent]:
    return [item for record in records for item in metrics.add(record)] + list(metrics.end())


def points_of(items: Sequence[TrackedPoint | TrackedEvent]) -> list[TrackedPoint]:
    return [item for item in items if isinstance(item, TrackedPoint)]


# What trackers are told


def test_an_update_becomes_a_point_with_what_happened_since_the_last_one() -> None:
    traffic = Traffic(
        at=1.5, rank=1, since=0.0, sent={"Gradient": Flow(2, 700, 900), "RecordLines": Flow(1, 50, 50)}, received={}
    )
    records = [
        a_round(1.0, 20.0),
        a_round(1.5, 10.0, idle=2.0),
        traffic,
        an_update(2.0, 1, (0, 3)),
        an_update(4.0, 2, (1,)),
    ]
    first, second = points_of(told(records, RunMetrics(ob.Samples(1000))))
    assert first.step == 10
    assert first.values == {
        "train/loss": 1.5,
        "train/learning_rate": 0.1,
        "run/staleness_mean": 1.5,
        "run/staleness_max": 3.0,
        "run/idle_share": 0.5,
        "run/bytes_sent": 700.0,
        "run/samples_per_second": 5.0,
        "run/updates": 1.0,
        "run/dropped": 0.0,
        "run/ranks": 1.0,
        "run/samples": 10.0,
        "run/seconds": 2.0,
    }
    assert second.step == 20
    assert second.values["run/staleness_max"] == 1.0
    assert "train/loss" not in second.values


def test_traffic_after_the_last_update_is_shown_at_the_end() -> None:
    traffic = Traffic(at=2.0, rank=1, since=0.0, sent={"Gradient": Flow(2, 700, 900)}, received={})
    *_, last = points_of(told([an_update(1.0, 1), traffic], RunMetrics(ob.Samples(1000))))
    assert last.values["run/bytes_sent"] == 700.0


def test_an_evaluation_is_a_point_at_its_own_time_and_samples() -> None:
    evaluation = Evaluation(at=1.0, rank=0, version=3, samples_total=300, loss=2.5, accuracy=0.75)
    (point,) = points_of(told([evaluation], RunMetrics(ob.Samples(1000))))
    assert point == TrackedPoint(
        300, {"test/loss": 2.5, "test/accuracy": 0.75, "run/samples": 300.0, "run/seconds": 1.0}
    )


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    evaluation = Evaluation(at=1.0, rank=0, version=3, samples_total=300, loss=float("nan"), accuracy=None)
    (point,) = points_of(told([evaluation], RunMetrics()))
    assert sorted(point.values) == ["run/samples", "run/seconds"]


def test_losses_of_texts_are_bits_per_byte_too() -> None:
    evaluation = Evaluation(at=1.0, rank=0, version=0, samples_total=0, loss=2.5, accuracy=None)
    metrics = RunMetrics(loss_names=("loss", "bits_per_byte"))
    held_out, training = points_of(told([evaluation, a_round(1.0, 40.0), an_update(1.0, 1)], metrics))
    assert held_out.values["test/loss"] == held_out.values["test/bits_per_byte"] == 2.5
    assert training.values["train/loss"] == training.values["train/bits_per_byte"] == 4.0


def test_ranks_that_join_and_are_lost_and_notices_are_events() -> None:
    records = [
        Membership(at=0.0, rank=0, peer=1, incarnation=0, joined=True),
        Membership(at=0.0, rank=1, peer=0, incarnation=0, joined=True),
        an_update(1.0, 1),
        Membership(at=2.0, rank=0, peer=1, incarnation=0, joined=False),
        Membership(at=2.1, rank=2, peer=1, incarnation=0, joined=False),
        Notice(at=2.5, rank=0, text="gradients are stale"),
        Undone(at=3.0, rank=0, version=2, to_version=0, samples=10, samples_total=0),
        Ended(at=4.0, bytes_sent=0, messages_sent=0, failure="no worker is left"),
    ]
    events = [item for item in told(records, RunMetrics()) if isinstance(item, TrackedEvent)]
    assert events == [
        (0, "rank 1 joined"),
        (10, "rank 1 was lost"),
        (10, "gradients are stale"),
        (0, "10 samples were undone, back to the state of version 0"),
        (0, "rank 0 failed: no worker is left"),
    ]


def test_long_runs_have_a_limited_number_of_points_and_short_ones_all() -> None:
    updates = [an_update(0.1 * version, version) for version in range(1, 5001)]
    assert len(points_of(told(updates, RunMetrics(ob.Samples(50_000))))) in range(POINTS_MAX, POINTS_MAX + 2)
    assert len(points_of(told(updates, RunMetrics(ob.Seconds(500))))) in range(POINTS_MAX - 2, POINTS_MAX + 2)
    assert len(points_of(told(updates[:50], RunMetrics(ob.Samples(500))))) == 50


def test_a_resumed_run_is_told_of_what_is_new() -> None:
    records = [an_update(1.0, 1), Notice(at=1.5, rank=0, text="old"), an_update(2.0, 2), an_update(3.0, 3)]
    assert [item.step for item in told(records, RunMetrics(ob.Samples(1000), since=2.0))] == [30]


def test_a_hub_that_resumed_from_its_checkpoint_is_followed_from_there() -> None:
    records = [an_update(float(at), version) for at, version in enumerate((1, 2, 3, 2, 3, 4), 1)]
    items = points_of(told(records, RunMetrics(ob.Samples(1000))))
    assert [point.step for point in items] == [10, 20, 30, 20, 30, 40]
    assert all(point.values.get("run/samples_per_second", 0.0) >= 0 for point in items)


def test_peers_without_a_hub_are_counted_together() -> None:
    updates = [an_update(1.0, 1, rank=0), an_update(1.1, 1, rank=1), an_update(1.2, 1, rank=2)]
    assert points_of(told(updates, RunMetrics(ob.Samples(1000))))[-1].step == 30


def test_the_summary_has_single_values_and_no_paths() -> None:
    values = summary_values(
        summarize(run([an_update(2.0, 1), Ended(at=4.0, bytes_sent=9, messages_sent=1, failure=None)]))
    )
    assert values["samples"] == 10
    assert values["bytes_sent"] == 9
    assert {"directory", "traffic", "failure", "accuracy"}.isdisjoint(values)


def test_settings_are_flat_and_those_without_a_name_are_described() -> None:
    data = torch.ones(8, 2), torch.zeros(8, dtype=torch.long)
    workload = ob.Workload(lambda: torch.nn.Linear(2, 2), F.cross_entropy, data)
    experiment = Experiment(workload, ob.AsyncFixed(batch=16, optimizer=ob.SGD(lr=0.5)), workers=2, seed=7)
    settings = configuration(header(seed=7), experiment)
    assert settings["strategy.name"] == "async-fmb"
    assert settings["strategy.optimizer.lr"] == 0.5
    assert settings["strategy.batch"] == 16
    assert settings["seed"] == 7
    assert settings["workload.model"] == "function"
    assert all(isinstance(value, bool | int | float | str) for value in settings.values())


# No tracker stops, slows or changes a run


@pytest.fixture
def said() -> list[str]:
    return []


def sink_of(trackers: Sequence[ob.Tracker], said: list[str], **settings: Any) -> TrackingSink:
    return TrackingSink(trackers, RUN, RunMetrics(ob.Samples(1000)), said.append, **settings)


def test_every_tracker_is_told_everything_in_order(said: list[str]) -> None:
    both = InMemory(), InMemory()
    sink = sink_of(both, said)
    sink.start()
    sink.records([an_update(float(version), version) for version in range(1, 6)])
    sink.close(None)
    for tracker in both:
        assert tracker.run == RUN
        assert [step for step, _ in tracker.points] == [10, 20, 30, 40, 50]
        assert tracker.summary == {}
    assert said == []


def test_a_failing_tracker_gives_one_sentence_and_the_others_go_on(said: list[str]) -> None:
    failing, other = Failing(), InMemory()
    sink = sink_of([failing, other], said)
    sink.start()
    for version in range(1, 6):
        sink.records([an_update(float(version), version)])
    sink.close(None)
    assert len(failing.points) == 2
    assert failing.summary is None
    assert len(other.points) == 5
    assert said == [
        "the tracker Failing has failed and is no longer told of the run (OSError: no space left on the tracker's disk)"
    ]


def test_a_slow_tracker_loses_values_and_the_run_does_not_wait(said: list[str]) -> None:
    slow = Stuck()
    sink = sink_of([slow], said, queue_max=3)
    sink.start()
    sink.records([an_update(1.0, 1)])
    assert slow.is_stuck.wait(WAIT_SECONDS)
    sink.records(
        [an_update(float(version), version) for version in range(2, 11)]
    )  # returns, though the tracker does not
    sink.close(None, seconds=0.0)
    slow.released.set()
    sink.close(None)
    assert [step for step, _ in slow.points] == [10, 20, 30, 40]
    assert slow.events == [(40, "6 values are missing, since the tracker was slower than the run")]
    assert len(said) == 2
    assert said[0].startswith("the tracker Stuck is slower than the run, so values are dropped while 3 wait for it")
    assert said[1].startswith("the tracker Stuck has not finished in time after the run")


def test_a_record_that_cannot_be_tracked_ends_tracking_alone(said: list[str]) -> None:
    class Broken(RunMetrics):
        def add(self, record: Record) -> Iterator[TrackedPoint | TrackedEvent]:
            raise ZeroDivisionError

    tracker = InMemory()
    sink = TrackingSink([tracker], RUN, Broken(), said.append)
    sink.start()
    sink.records([an_update(1.0, 1)])
    sink.records([an_update(2.0, 2)])
    sink.close(None)
    assert tracker.points == []
    assert tracker.summary == {}
    assert len(said) == 1
    assert said[0].startswith("internal error: a record cannot be tracked (ZeroDivisionError")


def test_a_simulated_run_has_the_same_records_with_and_without_trackers(tmp_path: Path) -> None:
    def simulated(**settings: Any) -> Any:
        cluster = ob.Cluster(straggle=ob.stragglers.Lognormal(0.5), faults=(ob.faults.Crash(1, 20, 20),))
        return ob.simulate(
            ob.workloads.Quadratic(), ob.AsyncFixed(batch=64), cluster, ob.Samples(5_000), workers=3, **settings
        )

    tracker = InMemory()
    tracked, untracked = (
        simulated(out=tmp_path / "tracked", track=[tracker, Failing()]),
        simulated(out=tmp_path / "bare"),
    )
    assert record_bytes(tracked.records.records) == record_bytes(untracked.records.records)
    files = [tmp_path / name / "records.jsonl" for name in ("tracked", "bare")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert tracker.run is not None
    assert tracker.run.name == "async-fmb-quadratic-seed0"
    assert tracker.run.config["strategy.batch"] == 64
    assert tracker.values("test/loss")[-1] == tracked.summary.loss
    assert max(tracker.values("run/seconds")) == pytest.approx(tracked.summary.seconds, rel=0.05)
    assert tracker.summary is not None
    assert tracker.summary["samples"] == tracked.summary.samples
    assert {"rank 1 was lost", "rank 1 joined"} <= {text for _, text in tracker.events}


DATA = torch.arange(256.0).reshape(64, 4) / 256, torch.arange(64) % 2


def held_out(model: torch.nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(DATA[0]), DATA[1])


@pytest.mark.parametrize("has_directory", [False, True])
def test_a_loop_of_the_users_own_is_followed(has_directory: bool, tmp_path: Path) -> None:
    out = tmp_path / "run" if has_directory else None
    tracker, model = InMemory(), torch.nn.Linear(4, 2)
    strategy = ob.AsyncFixed(batch=16, optimizer=ob.SGD(lr=0.1))
    with ob.join(model, strategy, until=ob.Samples(320), evaluate=held_out, out=out, track=tracker) as run:
        for x, y in run.batches(DATA):
            run.backward(F.cross_entropy(model(x), y))
    assert tracker.run is not None
    assert (tracker.run.workload, tracker.run.directory) == ("Linear", out)
    assert tracker.run.config["strategy.optimizer.lr"] == 0.1
    assert max(step for step, _ in tracker.points) == run.summary.samples
    assert tracker.values("test/loss")
    assert tracker.values("train/loss")
    assert tracker.summary is not None
    assert tracker.summary["samples"] == run.summary.samples
    assert "failure" not in tracker.summary


def test_a_loop_that_fails_is_closed_with_the_reason() -> None:
    tracker, model = InMemory(), torch.nn.Linear(4, 2)
    strategy = ob.AsyncFixed(batch=16, optimizer=ob.SGD(lr=0.1))

    def loop() -> None:
        with ob.join(model, strategy, until=ob.Samples(320), track=tracker) as run:
            for _ in run.batches(DATA):
                raise ZeroDivisionError("in the loop")

    with pytest.raises(ZeroDivisionError):
        loop()
    assert tracker.summary is not None
    assert tracker.summary["failure"] == "ZeroDivisionError: in the loop"


# Names, and what a resumed run remembers


def test_what_a_tracker_remembers_is_recalled_on_resuming_alone(tmp_path: Path) -> None:
    new = TrackedRun(label="fmb", workload="digits", seed=1, directory=tmp_path)
    resumed = TrackedRun(label="fmb", workload="digits", seed=1, directory=tmp_path, is_resumed=True)
    assert resumed.recall("wandb") is None
    new.remember("wandb", "a1")
    new.remember("mlflow", "b2")
    assert (new.recall("wandb"), resumed.recall("wandb"), resumed.recall("mlflow")) == (None, "a1", "b2")
    (tmp_path / "tracked.json").write_text("damaged")
    assert resumed.recall("wandb") is None
    assert TrackedRun(label="fmb", workload="digits", seed=1, is_resumed=True).recall("wandb") is None


def test_several_trackers_are_named_in_a_list_or_with_commas() -> None:
    own = InMemory()
    labels = [tracker.label for tracker in trackers_of(["tensorboard, wandb", "mlflow", "wandb", own])]
    assert labels == ["tensorboard", "wandb", "mlflow", "InMemory"]
    assert trackers_of(None) == []
    assert trackers_of(own) == [own]


@pytest.mark.parametrize("wrong", [3, [None], {"wandb": True}.values()])
def test_what_is_no_tracker_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"track takes names \(tensorboard, wandb, mlflow\) and objects"):
        trackers_of(wrong)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    sentence = rf"tracking with {name} needs {name}, which is not installed; type: pip install 'offbeat\[{name}\]'"
    with pytest.raises(ob.MissingDependency, match=sentence):
        ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(), track=name)


def test_a_tracker_that_does_not_exist_is_one_sentence_and_nothing_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "quadratic", "fmb", "--track", "tensorbord"]) == 2
    assert capsys.readouterr().err == "offbeat: unknown tracker 'tensorbord'; did you mean 'tensorboard'?\n"
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_may_refuse_a_run_before_it_begins() -> None:
    class Refusing(InMemory):
        def start(self, run: TrackedRun) -> None:
            raise ConfigurationError("this run cannot be tracked; type something else")

    with pytest.raises(ConfigurationError, match="type something else"):
        ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(), until=ob.Samples(5_000), track=Refusing())
