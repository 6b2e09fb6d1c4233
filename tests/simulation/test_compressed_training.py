"""What compression does to training: fewer bytes, and, with error feedback, the same loss."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from scenes import play

import offbeat as ob
from offbeat.core.wire_size import HEAD_BYTES
from offbeat.records.schema import Traffic

UPDATES = 1000
WORKERS, BATCH = 1, 128


@functools.cache
def digits() -> ob.Workload:
    return ob.workloads.DigitsLogistic().build()


def training_loss(compression: ob.compression.Compression | None) -> float:
    """The mean loss over all training data after a thousand updates of logistic regression."""
    strategy = ob.FixedMinibatch(batch=BATCH, microbatch=BATCH, optimizer=ob.SGD(lr=0.2), compression=compression)
    run = ob.simulate(
        ob.workloads.DigitsLogistic(),
        strategy,
        until=ob.Samples(UPDATES * WORKERS * BATCH),
        workers=WORKERS,
        evaluate=None,
    )
    assert run.summary.updates == UPDATES
    with torch.no_grad():
        inputs, targets = digits().train.take(torch.arange(len(digits().train.targets)))
        return float(digits().loss(run.model()(inputs), targets).mean())


@pytest.mark.slow
def test_top_k_reaches_the_dense_loss_with_error_feedback_and_not_without() -> None:
    dense = training_loss(None)
    with_feedback = training_loss(ob.compression.TopK(0.01))
    without_feedback = training_loss(ob.compression.TopK(0.01, feedback=False))
    assert with_feedback == pytest.approx(dense, rel=0.03)
    assert without_feedback > 2 * dense


@pytest.mark.parametrize(
    "compression", [ob.compression.BFloat16(), ob.compression.Int8(), ob.compression.TopK(0.01)], ids=str
)
@pytest.mark.parametrize("strategy", [ob.FixedMinibatch(batch=32), ob.Gossip(batch=32)], ids=lambda s: str(s.name))
def test_messages_are_smaller_and_records_have_both_sizes(
    strategy: ob.Strategy, compression: ob.compression.Compression
) -> None:
    compressed = dataclasses.replace(strategy, compression=compression)
    scene, plain = (play(chosen, digits(), until=ob.Samples(3000)) for chosen in (compressed, strategy))
    small, large = (one.of(Traffic)[-1].sent for one in (scene, plain))
    halves = {"Gradient": True, "Parameters": False, "Offer": False, "Answer": True}
    sparse = isinstance(compression, ob.compression.TopK)
    for kind, flow in small.items():
        heads = HEAD_BYTES * flow.messages
        sent, uncompressed = flow.bytes - heads, flow.bytes_uncompressed - heads
        coded = kind in halves and (halves[kind] or not sparse)
        assert sent < 0.62 * uncompressed if coded else sent == uncompressed, kind
    for kind in large:
        assert large[kind].bytes == large[kind].bytes_uncompressed


def test_all_ranks_end_with_the_same_bits_and_a_seed_repeats_the_records() -> None:
    strategy = ob.FixedMinibatch(batch=32, compression=ob.compression.Int8())
    first, again = (play(strategy, digits(), until=ob.Samples(3000)) for _ in range(2))
    ends = [finish.parameters for finish in first.outcome.finishes.values()]
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert torch.equal(again.outcome.finishes[0].parameters, ends[0])
    assert first.records == again.records
