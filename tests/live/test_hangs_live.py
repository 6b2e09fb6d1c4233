"""A worker whose computation hangs while its process answers: live, over TCP."""

from __future__ import annotations

import pytest
from accounts import check_accounts

import offbeat as ob
from offbeat.records.schema import Membership, Notice, Update, of_kind


@pytest.mark.parametrize(
    "strategy",
    [
        ob.FixedMinibatch(batch=16, hang_seconds=1.0, hang_factor=3.0),
        pytest.param(ob.LocalSGD(every=2, batch=16, hang_seconds=1.0, hang_factor=3.0), marks=pytest.mark.slow),
    ],
    ids=lambda strategy: strategy.name,
)
def test_training_goes_on_without_a_worker_that_hangs_until_it_is_back(strategy: ob.Strategy) -> None:
    cluster = ob.Cluster(faults=(ob.faults.Hang(1, at_seconds=1, seconds=6),), measured=True)
    run = ob.train(ob.workloads.Quadratic(), strategy, cluster=cluster, workers=2, until="9s")
    check_accounts(run.records)
    changes = [(record.joined, record.at) for record in of_kind(run.records, Membership) if record.peer == 1]
    assert [joined for joined, _ in changes] == [True, False, True]
    lost_at, back_at = changes[1][1], changes[2][1]
    assert lost_at < 7 <= back_at
    texts = [notice.text for notice in of_kind(run.records, Notice)]
    assert any("is treated as lost" in text for text in texts)
    updates = [record for record in of_kind(run.records, Update) if lost_at < record.at < back_at]
    assert updates
    assert {part.rank for record in updates for part in record.contributions} == {2}
