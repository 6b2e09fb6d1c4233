"""Rate limits in live runs: they are kept and used up, and nothing is lost at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accounts import check_traffic
from torch import Tensor, nn

import offbeat as ob
from offbeat.core.actions import Action, Finish, Send
from offbeat.core.events import Event, MessageArrived, PeerJoined, PeerLost, Sent
from offbeat.core.messages import Message
from offbeat.core.strategy import Node
from offbeat.live.clock import Clock
from offbeat.live.node_runner import NodeRunner
from offbeat.live.runner_options import RunnerOptions
from offbeat.records.files import MemoryWriter
from offbeat.records.schema import Ended, LinkUse, Round, RunRecords, Traffic, of_kind
from offbeat.transports.loopback import Loopback

LIMIT = 1e6
JOIN_SECONDS = 500.0


def wide() -> ob.Workload:
    """A model whose gradients are 40 kB and cheap to compute: without a limit, far more would be sent."""
    random = torch.Generator().manual_seed(5)
    inputs = torch.randn(256, 10_000, generator=random)
    return ob.Workload(
        model=lambda: nn.Linear(10_000, 1, bias=False),
        loss=lambda outputs, wanted: (outputs - wanted).square().sum(1),
        train=(inputs, inputs[:, :1]),
        optimizer=ob.SGD(lr=1e-5),
    )


QUICK = ob.AsyncFixed(batch=4, microbatch=4, messages=1)


def check_within_limit(run: RunRecords) -> None:
    """By the counters and the clock of the run: on every link, in both directions."""
    uses = list(of_kind(run, LinkUse))
    assert uses
    for use in uses:
        assert use.bytes_per_second == LIMIT
        for nbytes in use.used.values():
            assert nbytes <= LIMIT * use.at * 1.05
    ends = {end.rank: end for end in of_kind(run, Ended)}
    for use in uses:
        assert sum(use.used.values()) == ends[use.rank].bytes_sent


def shares(run: RunRecords) -> dict[tuple[int, str], float]:
    """What each rank used of its rate limits since it began to compute; the hub, since the first did."""
    began: dict[int, float] = {}
    for record in of_kind(run, Round):
        began.setdefault(record.rank, record.start)
    return {
        (use.rank, peer): nbytes / (LIMIT * (use.at - began.get(use.rank, min(began.values()))))
        for use in of_kind(run, LinkUse)
        for peer, nbytes in use.used.items()
    }


def options(rank: int, **settings: Any) -> RunnerOptions:
    return RunnerOptions(rank=rank, clock=Clock(), is_peer=(1 - rank).__eq__, **settings)


def test_processes_keep_to_a_rate_limit_and_use_it() -> None:
    free = ob.train(wide(), QUICK, ob.Seconds(1.0), workers=2, evaluate=None)
    assert free.summary.bytes_per_second is not None
    assert free.summary.bytes_per_second > 4 * 1.2 * LIMIT, "two links with two directions, far above the limit"
    assert free.summary.budget_used is None
    run = ob.train(wide(), QUICK, ob.Seconds(4.0), workers=2, evaluate=None, bytes_per_second=LIMIT)
    assert run.summary.failure is None
    check_within_limit(run.records)
    check_traffic(run.records)
    used = shares(run.records)
    assert used[1, "0"] >= 0.8
    assert used[2, "0"] >= 0.8
    assert run.summary.budget_used is not None
    assert f"{run.summary.budget_used:.0%} of the bandwidth limit used" in str(run.summary)


def test_the_limit_holds_from_the_beginning_to_any_moment() -> None:
    """The counters of every second, against the clock at that moment."""
    run = ob.train(wide(), QUICK, ob.Seconds(3.0), workers=1, evaluate=None, bytes_per_second=LIMIT)
    counted = [record for record in of_kind(run.records, Traffic) if record.rank == 1]
    assert len(counted) >= 2
    for record in counted:
        assert sum(flow.bytes for flow in record.sent.values()) <= LIMIT * record.at * 1.05


def test_a_training_loop_of_the_user_keeps_to_a_rate_limit(tmp_path: Path) -> None:
    workload = wide()
    model = workload.initial_model(0)
    strategy = QUICK.with_default_optimizer(workload.optimizer)
    with ob.join(model, strategy, ob.Seconds(2.0), bytes_per_second=LIMIT, out=tmp_path / "run") as run:
        for x, y in run.batches((workload.train.inputs, workload.train.targets)):
            run.backward((model(x) - y).square().sum(1))
    assert run.summary.failure is None
    check_within_limit(run.records)
    assert shares(run.records)[1, "0"] >= 0.8


def test_peers_with_a_rate_limit_finish() -> None:
    gossip = ob.Gossip(batch=4, rate=2.0)
    run = ob.train(wide(), gossip, ob.Seconds(3.0), workers=3, evaluate=None, bytes_per_second=LIMIT)
    assert run.summary.failure is None
    check_within_limit(run.records)
    assert len(list(of_kind(run.records, Ended))) == 3


# One node runner


@dataclass(frozen=True)
class Payload(Message):
    values: Tensor
    number: int = 0


class SenderNode(Node):
    """Sends some messages and finishes at once."""

    def __init__(self, count: int) -> None:
        self._count = count

    def handle(self, event: Event) -> Iterator[Action]:
        if isinstance(event, PeerJoined):
            for number in range(self._count):
                yield Send(1, Payload(torch.zeros(1000), number))
            yield Finish(torch.zeros(1), (), 0)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


class ReceiverNode(Node):
    """Receives messages until their sender is lost."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def handle(self, event: Event) -> Iterator[Action]:
        if isinstance(event, MessageArrived) and isinstance(event.message, Payload):
            self.numbers.append(event.message.number)
        elif isinstance(event, PeerLost):
            yield Finish(torch.zeros(1), (), 0)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def test_messages_sent_right_before_the_end_are_sent_before_the_process_ends() -> None:
    loopback = Loopback({0: [1], 1: [0]})
    first, second = loopback.transport(0), loopback.transport(1)
    receiver, record = ReceiverNode(), MemoryWriter()
    limit = 20_000.0  # four messages a second
    sending = NodeRunner(SenderNode(4), first, options(0, writer=record, bytes_per_second=limit))
    receiving = NodeRunner(receiver, second, options(1, writer=MemoryWriter()))
    receiving.start()
    sending.start()
    try:
        assert sending.wait(JOIN_SECONDS)
        sending.close(linger_seconds=0.1)  # far less than sending takes
        assert receiving.wait(JOIN_SECONDS)
        assert receiver.numbers == [0, 1, 2, 3]
        sending.write_last(sending.ended_record())
        (use,) = [each for each in record.records if isinstance(each, LinkUse)]
        assert 0 < use.used["1"] <= limit * use.at
    finally:
        sending.close()
        receiving.close()


def test_messages_queued_for_a_lost_peer_delay_nothing() -> None:
    loopback = Loopback({0: [1], 1: [0]})
    first, second = loopback.transport(0), loopback.transport(1)
    sending = NodeRunner(SenderNode(4), first, options(0, writer=MemoryWriter(), bytes_per_second=1.0))
    sending.start()
    try:
        assert sending.wait(JOIN_SECONDS)
        second.close()
        sending.close()  # hours, if it waited for the rate limit
        assert sending.failure is None
    finally:
        sending.close()


class SupersedingNode(Node):
    """Sends messages under one key, and counts those that were sent."""

    def __init__(self) -> None:
        self.sent = 0

    def handle(self, event: Event) -> Iterator[Action]:
        if isinstance(event, PeerJoined):
            for number in range(5):
                yield Send(1, Payload(torch.zeros(1000), number), supersedes="newest")
        if isinstance(event, Sent):
            self.sent += 1
            yield Finish(torch.zeros(1), (), 0)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def test_a_queued_message_is_superseded_and_reported_as_sent_only_when_it_was() -> None:
    loopback = Loopback({0: [1], 1: [0]})
    first, second = loopback.transport(0), loopback.transport(1)
    node, receiver = SupersedingNode(), ReceiverNode()
    sending = NodeRunner(node, first, options(0, writer=MemoryWriter(), bytes_per_second=16_000.0))
    receiving = NodeRunner(receiver, second, options(1, writer=MemoryWriter()))
    receiving.start()
    sending.start()
    try:
        assert sending.wait(JOIN_SECONDS)
        sending.close()
        assert receiving.wait(JOIN_SECONDS)
        assert (receiver.numbers, node.sent) == ([4], 1)
    finally:
        sending.close()
        receiving.close()
