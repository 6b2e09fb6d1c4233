"""Strategies with compressed messages keep all invariants, also under faults."""

from __future__ import annotations

from typing import Any

import pytest

import offbeat as ob
from offbeat.strategies.compressed_node import CompressedNode
from offbeat.testing import Violation, check_strategy

WIDE = ob.workloads.Quadratic(dimension=40, examples=64)
"""Long enough vectors that their codes are shorter."""
CASES = [
    ob.FixedMinibatch(compression=ob.compression.TopK(0.05)),
    ob.FixedMinibatch(compression=ob.compression.BFloat16()),
    ob.AnytimeMinibatch(compression=ob.compression.Int8(chunk=16)),
    ob.AsyncFixed(compression=ob.compression.TopK(0.05)),
    ob.AsyncTimed(compression=ob.compression.Int8()),
    ob.AsyncAdaptive(compression=ob.compression.TopK(0.1, feedback=False)),
    ob.BackupWorkers(compression=ob.compression.Int8(feedback=False)),
    ob.Gossip(compression=ob.compression.Int8(chunk=16)),
    ob.Gossip(compression=ob.compression.TopK(0.1)),
    ob.GossipAcid(compression=ob.compression.BFloat16()),
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CASES, ids=lambda strategy: f"{strategy.name} {strategy.compression}")
def test_every_invariant_holds_for_compressed_messages(strategy: ob.Strategy) -> None:
    assert check_strategy(strategy, seeds=range(12), workload=WIDE.build()) == 12


def test_residuals_that_are_missing_from_the_state_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    complete_state = CompressedNode.state

    def without_residuals(node: CompressedNode) -> dict[str, Any]:
        return {**complete_state(node), "residuals": []}

    monkeypatch.setattr(CompressedNode, "state", without_residuals)
    with pytest.raises(Violation, match=r"ended with other parameters|behaved differently"):
        check_strategy(ob.FixedMinibatch(compression=ob.compression.TopK(0.05)), seeds=range(12), workload=WIDE.build())
