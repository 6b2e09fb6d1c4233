"""TensorBoard, Weights & Biases and MLflow for real: what a run has left there is read back from there."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offbeat.records.files import find_runs, read_run
from offbeat.records.metrics import evaluations, summarize

pytestmark = pytest.mark.integration

WAIT_SECONDS = 300.0
ALL = ["--track", "tensorboard,wandb", "--track", "mlflow"]
WANDB_HEADER_BYTES = 7
LOG_BLOCK_BYTES = 32768
LOG_HEADER = struct.Struct("<IHB")
"""Checksum, length and kind of a part of a record."""
LAST_PARTS = (1, 4)
"""The kinds of a whole record, and of the last of several parts."""
SIMULATE = ["simulate", "quadratic", "fmb", "async-fmb", "--workers", "3", "--until", "6000", "--no-report"]
TRAIN = ["train", "quadratic", "async-fmb", "--workers", "2", "--until", "20000", "--no-report"]

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
import offbeat as ob

data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2
model = torch.nn.Linear(4, 2)
strategy = ob.AsyncFixed(batch=16, optimizer=ob.SGD(lr=0.1))
evaluate = lambda model: F.cross_entropy(model(data[0]), data[1])
with ob.join(model, strategy, until=ob.Samples(2000), evaluate=evaluate, track=sys.argv[1:]) as run:
    for x, y in run.batches(data):
        run.backward(F.cross_entropy(model(x), y))
"""


def run(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `offbeat` in a directory, without access to any server."""
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OFFBEAT_", "PYTEST_", "WANDB_", "MLFLOW_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    private = {
        "WANDB_MODE": "offline",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "OMP_NUM_THREADS": "1",
        "HOME": str(directory),
    }
    return subprocess.run(
        [sys.executable, "-m", "offbeat", *arguments],
        cwd=directory,
        env={**inherited, **private, **environment},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )


def tensorboard_values(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars of the event files in a directory: steps and values by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    found = {}
    for tag in events.Tags()["tensors"]:
        if not tag.endswith("text_summary"):
            found[tag] = [(each.step, float(each.tensor_proto.float_val[0])) for each in events.Tensors(tag)]
    for tag in events.Tags()["scalars"]:
        found[tag] = [(each.step, each.value) for each in events.Scalars(tag)]
    return found


def wandb_records(file: Path) -> list[Any]:
    """The records of an offline run: protocol buffers in the blocks of a LevelDB log, which wandb reads in Go alone."""
    from wandb.proto import wandb_internal_pb2

    content, position, parts, records = file.read_bytes(), WANDB_HEADER_BYTES, [], []
    while position < len(content):
        if LOG_BLOCK_BYTES - position % LOG_BLOCK_BYTES < LOG_HEADER.size:  # the rest of a block is padding
            position += LOG_BLOCK_BYTES - position % LOG_BLOCK_BYTES
            continue
        _, length, kind = LOG_HEADER.unpack_from(content, position)
        position += LOG_HEADER.size
        parts.append(content[position : position + length])
        position += length
        if kind in LAST_PARTS:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            records.append(record)
            parts = []
    return records


def wandb_history(records: list[Any]) -> list[dict[str, Any]]:
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]


def mlflow_runs(directory: Path) -> list[Any]:
    """The runs in the local store of a directory, each with its client."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{directory / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("offbeat")
        assert experiment is not None
        return [(client, each) for each in client.search_runs([experiment.experiment_id])]


def offline_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("wandb/offline-run-*/run-*.wandb"))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("simulated")
    done = run(directory, *SIMULATE, *ALL, "--out", "runs/mine")
    assert done.returncode == 0, done.stderr
    assert "tracker" not in done.stderr, done.stderr
    return directory


def test_tensorboard_has_the_values_of_every_run(simulated: Path) -> None:
    for directory in find_runs([simulated / "runs"]):
        recorded = read_run(directory)
        values = tensorboard_values(directory / "tensorboard")
        curve = [(each.samples_total, pytest.approx(each.loss, rel=1e-5)) for each in evaluations(recorded)]
        assert values["test/loss"] == curve
        assert values["run/samples"][-1][1] == summarize(recorded).samples
        assert values["run/seconds"][-1][1] == pytest.approx(summarize(recorded).seconds, rel=1e-3)
        assert {"train/loss", "run/samples_per_second", "run/staleness_mean", "run/idle_share"} <= values.keys()
        assert values["summary/loss"][0][1] == pytest.approx(summarize(recorded).loss, rel=1e-5)


def test_wandb_has_the_values_the_settings_and_the_summary_of_every_run(simulated: Path) -> None:
    names = set()
    for file in offline_files(simulated):
        records = wandb_records(file)
        (started,) = [record.run for record in records if record.HasField("run")]
        names.add(started.display_name)
        assert started.project == "offbeat"
        settings = {item.key: json.loads(item.value_json) for item in started.config.update}
        assert settings["workload.name"] == "quadratic"
        assert settings["workers"] == 3
        history = wandb_history(records)
        losses = [row["test/loss"] for row in history if "test/loss" in row]
        assert losses[0] > losses[-1]
        assert all("run/samples" in row for row in history)
        assert any(row.get("events") == "rank 1 joined" for row in history)
        summary = {item.key: item.value_json for record in records for item in record.summary.update}
        assert float(summary["summary/samples"]) >= 6000
        (ended,) = [record.exit for record in records if record.HasField("exit")]
        assert ended.exit_code == 0
    assert names == {"fmb-quadratic-seed0", "async-fmb-quadratic-seed0"}


def test_mlflow_has_the_values_the_settings_and_the_summary_of_every_run(simulated: Path) -> None:
    runs = mlflow_runs(simulated)
    assert {each.info.run_name for _, each in runs} == {"fmb-quadratic-seed0", "async-fmb-quadratic-seed0"}
    for client, each in runs:
        assert each.info.status == "FINISHED"
        assert each.data.params["workload.name"] == "quadratic"
        assert each.data.metrics["summary/samples"] >= 6000
        losses = sorted(client.get_metric_history(each.info.run_id, "test/loss"), key=lambda metric: metric.step)
        assert [losses[0].step, losses[0].value > losses[-1].value] == [0, True]
        assert "rank 1 joined" in each.data.tags["mlflow.note.content"]


def test_a_run_of_processes_is_one_run_to_each_tracker_and_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for more in ([], ["--overwrite"]):
        done = run(tmp_path, *TRAIN, *ALL, "--out", "mine", *more)
        assert done.returncode == 0, done.stderr
    (directory,) = find_runs([tmp_path / "mine"])
    assert len(list(directory.glob("tensorboard/*"))) == 1
    values = tensorboard_values(directory / "tensorboard")
    assert values["run/samples"][-1][1] == summarize(read_run(directory)).samples
    assert values["run/bytes_sent"][-1][1] > 0
    assert len(offline_files(tmp_path)) == len(mlflow_runs(tmp_path)) == 2  # the first remains there


def test_a_run_that_fails_is_marked_and_resuming_continues_it(tmp_path: Path) -> None:
    failing = ["--faults", "crash:0:2", "--checkpoint-seconds", "0.3", "--until", "10000000", "--no-report"]
    done = run(tmp_path, "train", "quadratic", "async-fmb", "--workers", "2", *failing, *ALL, "--out", "mine")
    assert done.returncode == 1, done.stderr
    ((_, each),) = mlflow_runs(tmp_path)
    assert each.info.status == "FAILED"
    assert "killed" in each.data.tags["failure"]
    (directory,) = find_runs([tmp_path / "mine"])
    until = summarize(read_run(directory)).samples + 20_000
    done = run(tmp_path, "train", "--resume", str(directory), "--until", str(until), "--no-report", *ALL)
    assert done.returncode == 0, done.stderr
    assert "tracker" not in done.stderr, done.stderr
    ((client, each),) = mlflow_runs(tmp_path)
    assert each.info.status == "FINISHED"
    history = client.get_metric_history(each.info.run_id, "run/samples")
    assert min(metric.value for metric in history) < 20_000
    assert max(metric.value for metric in history) == summarize(read_run(directory)).samples
    steps = [step for step, _ in tensorboard_values(directory / "tensorboard")["run/samples"]]
    assert min(steps) < 20_000
    assert max(steps) == summarize(read_run(directory)).samples
    first, second = (wandb_records(file) for file in offline_files(tmp_path))
    assert {record.run.run_id for record in (*first, *second) if record.HasField("run")} == {
        json.loads((directory / "tracked.json").read_text())["wandb"]
    }


def test_a_launched_script_is_followed_by_its_rank_0(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    names = ["tensorboard", "wandb", "mlflow"]
    done = run(tmp_path, "launch", "-n", "3", "--out", "mine", "script.py", *names, WANDB_PROJECT="theirs")
    assert done.returncode == 0, done.stderr
    values = tensorboard_values(tmp_path / "mine" / "tensorboard")
    assert values["run/samples"][-1][1] >= 2000
    (file,) = offline_files(tmp_path)
    assert [record.run.project for record in wandb_records(file) if record.HasField("run")] == ["theirs"]
    assert len(mlflow_runs(tmp_path)) == 1


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("no directory")
    program = (
        "import offbeat as ob\n"
        "try:\n"
        "    ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(), until=ob.Samples(5000), track='tensorboard')\n"
        "except ob.ConfigurationError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cannot write runs/tensorboard/fmb-quadratic-seed0-001 (Not a directory)")
    assert done.stdout.count("\n") == 1


def test_wandb_without_a_key_is_one_sentence(tmp_path: Path) -> None:
    done = run(tmp_path, *SIMULATE, "--track", "wandb", WANDB_MODE="online")
    assert done.returncode == 2
    assert "offbeat: wandb has no API key for its server; type: wandb login, or set WANDB_MODE=offline" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_server_that_cannot_be_reached_does_not_stop_the_run(tmp_path: Path) -> None:
    environment = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    done = run(tmp_path, *SIMULATE, "--track", "mlflow", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("offbeat: the tracker mlflow has failed and is no longer told of the run") == 2
