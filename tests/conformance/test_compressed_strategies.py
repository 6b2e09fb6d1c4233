"""Strategies whose messages are compressed keep every promise that they keep without, under faults too."""

from __future__ import annotations

from typing import Any

import pytest

import offbeat as ob
from offbeat.strategies.compressed_node import CompressedNode
from offbeat.testing import Violation, check_strategy

WIDE = ob.workloads.Quadratic(dimension=40, examples=64)
"""Wide enough that coded vectors are shorter."""
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


@pytest.mark.parametrize("strategy", CASES, ids=lambda strategy: f"{strategy.name} {strategy.compression}")
def test_every_invariant_holds_for_compressed_messages(strategy: ob.Strategy) -> None:
    assert check_strategy(strategy, seeds=range(12), workload=WIDE.build()) == 12


def test_a_residual_that_is_left_out_of_the_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CompressedNode.state

    def forgetful(node: CompressedNode) -> dict[str, Any]:
        return {**whole(node), "residuals": [], "residual_vectors": []}

    monkeypatch.setattr(CompressedNode, "state", forgetful)
    with pytest.raises(Violation, match=r"ended with other parameters|behaved differently"):
        check_strategy(ob.FixedMinibatch(compression=ob.compression.TopK(0.05)), seeds=range(12), workload=WIDE.build())
