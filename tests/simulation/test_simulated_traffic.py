"""Traffic of simulated runs: totals are consistent, and equal a count by hand."""

from __future__ import annotations

import itertools

import pytest
from scenes import NAMES, Scene, play

import offbeat as ob
from offbeat.core.strategy import EverySeconds
from offbeat.core.wire_size import HEAD_BYTES
from offbeat.records.metrics import summarize
from offbeat.records.schema import Ended, Evaluation, Flow, Traffic, Update

DIMENSION = 8
TENSOR_BYTES = 4 * DIMENSION
CRASH = ob.Cluster(
    link=ob.Link(latency_seconds=0.01, bytes_per_second=2000.0),
    faults=(ob.faults.Crash(1, 5.0, back_after_seconds=4.0),),
    straggle=ob.stragglers.NIAGARA,
)


def last(scene: Scene) -> Traffic:
    return scene.of(Traffic)[-1]


@pytest.mark.parametrize("name", NAMES)
def test_the_last_traffic_record_equals_the_ended_record_and_only_sent_messages_are_received(name: str) -> None:
    scene = play(ob.Strategy.members[name](), cluster=CRASH, evaluate=EverySeconds(5.0))
    (ended,), traffic = scene.of(Ended), last(scene)
    assert scene.records[-2:] == [traffic, ended]
    assert sum(flow.bytes for flow in traffic.sent.values()) == ended.bytes_sent > 0
    assert sum(flow.messages for flow in traffic.sent.values()) == ended.messages_sent
    for kind, flow in traffic.received.items():
        assert flow.messages <= traffic.sent[kind].messages
        assert flow.bytes <= traffic.sent[kind].bytes
    for flow in (*traffic.sent.values(), *traffic.received.values()):
        assert flow.bytes_uncompressed == flow.bytes
        assert flow.bytes >= HEAD_BYTES * flow.messages


def test_the_traffic_of_fmb_equals_a_count_by_hand() -> None:
    """Every update takes a gradient of each worker, and all but the last are answered with parameters."""
    workers = 3
    scene = play(ob.FixedMinibatch(batch=32), workers=workers, until=ob.Samples(960))
    updates = len(scene.of(Update))
    assert updates == 960 // (32 * workers)

    def flow(messages: int, nbytes: int) -> Flow:
        return Flow(messages, messages * nbytes, messages * nbytes)

    whole = HEAD_BYTES + TENSOR_BYTES
    expected = {
        "Gradient": flow(workers * updates, whole),
        "Parameters": flow(workers * (updates - 1), whole),
        "Stop": flow(workers, whole),
        "Stopped": flow(workers, HEAD_BYTES),
        "Welcome": flow(workers, whole),
    }
    assert last(scene).sent == expected
    assert last(scene).received == expected


def test_a_compressed_run_counts_what_it_would_have_sent_uncompressed() -> None:
    """The messages are those of the run without compression, and their bytes differ where they may be compressed."""
    plain, coded = (
        ob.simulate(
            ob.workloads.Digits(), ob.FixedMinibatch(compression=how), until=ob.Samples(5000), workers=2
        ).summary.traffic
        for how in (None, ob.compression.Int8())
    )
    assert plain.keys() == coded.keys()
    for kind, flow in coded.items():
        assert (flow.messages, flow.bytes_uncompressed) == (plain[kind].messages, plain[kind].bytes)
        assert (flow.bytes < plain[kind].bytes / 3) == (kind in ("Gradient", "Parameters"))


def test_each_evaluation_follows_a_traffic_record_of_the_same_time() -> None:
    scene = play(ob.AsyncFixed(), evaluate=EverySeconds(5.0))
    measured = [record for record in scene.records if isinstance(record, Traffic | Evaluation)]
    for before, after in itertools.pairwise(measured):
        if isinstance(after, Evaluation):
            assert isinstance(before, Traffic)
            assert before.at == after.at
    counted = [sum(flow.bytes for flow in record.sent.values()) for record in scene.of(Traffic)]
    assert counted == sorted(counted)
    assert counted[0] < counted[-1]


def test_messages_lost_in_a_crash_are_sent_and_not_received() -> None:
    slow = ob.Link(latency_seconds=2.0)
    scene = play(ob.AsyncFixed(), cluster=ob.Cluster(link=slow, faults=(ob.faults.Crash(1, 15.0),)))
    traffic = last(scene)
    sent, received = (sum(flow.messages for flow in flows.values()) for flows in (traffic.sent, traffic.received))
    assert received < sent


def test_bytes_to_target_lie_between_the_neighbouring_traffic_records() -> None:
    run = ob.simulate(ob.workloads.Digits(), ob.FixedMinibatch(), until=ob.Samples(60_000), workers=3)
    summary = summarize(run.records)
    assert summary.seconds_to_target is not None
    assert summary.bytes_to_target is not None
    counts = [record for record in run.records.records if isinstance(record, Traffic)]
    before = [count for count in counts if count.at <= summary.seconds_to_target][-1]
    after = next(count for count in counts if count.at >= summary.seconds_to_target)
    low, high = (sum(flow.bytes for flow in count.sent.values()) for count in (before, after))
    assert low <= summary.bytes_to_target <= high <= (summary.bytes_sent or 0)
