"""The options of live runs: their file, and what a worker on another machine receives."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import offbeat as ob
from offbeat.engine.experiment import Experiment
from offbeat.lab.experiment_plan import decode_experiment
from offbeat.live.session_options import RunDescription, SessionOptions, read_live_options, write_live_options
from offbeat.records.files import LIVE

LIVE_OPTIONS = ob.LiveOptions(restarts=7, checksum=True, checkpoint_seconds=None)


def test_the_options_of_a_run_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_live_options(tmp_path, LIVE_OPTIONS)
    assert read_live_options(tmp_path) == LIVE_OPTIONS


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"threads": "many"}'])
def test_options_that_cannot_be_read_are_one_sentence(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / LIVE).write_bytes(content)
    with pytest.raises(ob.ConfigurationError, match="name the directory of a live run"):
        read_live_options(tmp_path)


def test_a_worker_on_another_machine_receives_the_experiment_and_the_options() -> None:
    experiment, workload = Experiment(
        ob.workloads.Quadratic(), ob.FixedMinibatch(batch=48), workers=3, seed=5, bytes_per_second=1e6
    ).resolved()
    header = experiment.header("live", workload.label, 100)
    encoded = SessionOptions(experiment=experiment, live=LIVE_OPTIONS, header=header).description()
    assert encoded is not None
    received = msgspec.json.decode(encoded, type=RunDescription)
    assert (received.header, received.live) == (header, LIVE_OPTIONS)
    assert decode_experiment(received.header.experiment).to_plain() == experiment.to_plain()


def test_a_run_without_a_name_is_not_described() -> None:
    loop = Experiment(None, ob.FixedMinibatch(optimizer=ob.SGD(lr=0.1)), until=100)
    assert SessionOptions(experiment=loop).description() is None
    header = loop.header("live", "Linear", 10)
    assert SessionOptions(experiment=loop, header=header).description() is None
