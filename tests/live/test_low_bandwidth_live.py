"""Local-steps strategies and populations on real processes over TCP."""

from __future__ import annotations

from pathlib import Path

import pytest
from accounts import check_accounts, check_traffic

import offbeat as ob
from offbeat.records.schema import Notice, of_kind

SLOW = ("local-sgd", "diloco", "delayed-exchange")


@pytest.mark.parametrize(
    "name", ["decoupled-diloco", "population", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_three_workers_reach_the_target_with_every_strategy(name: str, tmp_path: Path) -> None:
    strategy = ob.Strategy.members[name]()
    run = ob.train(ob.workloads.Digits(), strategy, ob.Samples(50_000), workers=3, out=tmp_path / "run")
    assert run.summary.accuracy is not None
    assert run.summary.accuracy >= 0.9
    assert run.summary.bytes_to_target is not None
    check_accounts(run.records)
    check_traffic(run.records)
    said = [notice.text for notice in of_kind(run.records, Notice) if "the result is worker" in notice.text]
    assert len(said) == (name == "population")
