"""Same seed, same bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

import offbeat as ob
from offbeat.records.files import RECORDS, read_run

CLUSTER = ob.Cluster(
    straggle=ob.stragglers.NIAGARA,
    link=ob.Link(latency_seconds=0.01, delay_std_seconds=0.05),
    faults=(ob.faults.Crash(2, 10.0, back_after_seconds=5.0),),
)


def digest(directory: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(directory.iterdir()))).hexdigest()


@pytest.mark.parametrize("name", sorted(ob.Strategy.members))
def test_the_same_seed_writes_the_same_bytes(name: str, tmp_path: Path) -> None:
    assert written(name, 0, tmp_path / "first") == written(name, 0, tmp_path / "again")


def test_another_seed_writes_other_bytes(tmp_path: Path) -> None:
    assert written("async-fmb", 0, tmp_path / "first") != written("async-fmb", 1, tmp_path / "other")


def written(name: str, seed: int, out: Path) -> str:
    """The digest of the files of a run."""
    ob.simulate(ob.workloads.Digits(), ob.Strategy.members[name](), CLUSTER, ob.Samples(4000), seed, workers=4, out=out)
    return digest(out)


def test_global_random_state_is_neither_used_nor_changed() -> None:
    def run() -> torch.Tensor:
        model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 10))
        digits = ob.workloads.Digits().build()
        flat = (digits.train.inputs.flatten(1), digits.train.targets)
        torch.manual_seed(7)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        workload = ob.Workload(model, digits.loss, flat)
        torch.manual_seed(int(torch.randint(1000, ())))
        before = torch.get_rng_state()
        result = ob.simulate(workload, ob.AsyncFixed(), until=ob.Samples(2000), workers=3)
        assert torch.equal(torch.get_rng_state(), before)
        return torch.cat([parameter.flatten() for parameter in result.model().parameters()])

    assert torch.equal(run(), run())


def test_records_round_trip(tmp_path: Path) -> None:
    run = ob.simulate(ob.workloads.Digits(), ob.AsyncTimed(), CLUSTER, ob.Samples(4000), workers=4, out=tmp_path)
    assert read_run(tmp_path).records == run.records.records
    assert read_run(tmp_path).header == run.records.header


def test_a_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    run = ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(), until=ob.Samples(9000), workers=2, out=tmp_path)
    path = tmp_path / RECORDS
    path.write_bytes(path.read_bytes()[:-20])
    assert read_run(tmp_path).records == run.records.records[:-1]
