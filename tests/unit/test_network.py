"""The network test over loopback: what is measured, that every kind of damage is detected, and how it ends."""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.cli.worker_process import run_reported
from offbeat.core.events import LossReason, PeerLost
from offbeat.core.messages import Message
from offbeat.errors import ConfigurationError, LinkLost, OffbeatError, RunFailed
from offbeat.lab.network_test import agent, controller, processes, protocol
from offbeat.lab.network_test.agent import Agent, Connections
from offbeat.lab.network_test.controller import Controller
from offbeat.lab.network_test.plan import (
    ALL_TO_ALL,
    BOTH_WAYS,
    CONCURRENT,
    LATENCY,
    PAIR,
    PAIR_ELEMENTS_MAX,
    RING,
    WARM_UP,
    NetworkTest,
    elements_that_fit,
    steps_of,
)
from offbeat.lab.network_test.processes import FreeRanks
from offbeat.lab.network_test.protocol import DataBlock, RankReady, checksum, flaw_of
from offbeat.lab.network_test.result import NetworkResult, read_result, write_result
from offbeat.launch.children import start_command
from offbeat.launch.rank_info import RankInfo
from offbeat.transports.address import Address
from offbeat.transports.loopback import Loopback
from offbeat.transports.rendezvous import Assignment, CallRequest, Program
from offbeat.transports.transport import Transport, TransportEvent

SMALL = NetworkTest(elements=1001, repeats=2)
JOIN_SECONDS = 500.0


# Blocks


FLOW, STEP = (1, 2), 7


def block(elements: int) -> Tensor:
    content = torch.empty(elements, dtype=torch.int32)
    protocol.fill(content, FLOW, STEP)
    return content


def as_defined(data: Tensor) -> int:
    """The checksum by its definition, one pair of elements after the other, in Python's integers."""
    values = [int(value) & 0xFFFFFFFF for value in data]
    pairs = [low | high << 32 for low, high in zip(values[::2], values[1::2], strict=False)]
    if len(values) % 2:
        pairs.append(int(data[-1]))
    return sum(pair * (protocol._ODD + 2 * position) for position, pair in enumerate(pairs)) % 2**64


@pytest.mark.parametrize("elements", [3, 4, 5, 8191, 8192, 8193, 20_001])
def test_the_checksum_equals_its_definition(elements: int) -> None:
    assert checksum(block(elements)) == as_defined(block(elements))
    random = torch.randint(-(2**31), 2**31 - 1, (elements,), generator=torch.Generator().manual_seed(elements))
    assert checksum(random.to(torch.int32)) == as_defined(random.to(torch.int32))


def swap(data: Tensor, one: int, other: int) -> None:
    data[one], data[other] = int(data[other]), int(data[one])


DAMAGE: dict[str, Callable[[Tensor], object]] = {
    "begin marker": lambda data: data[0].add_(1),
    "end marker": lambda data: data[-1].bitwise_xor_(1 << 30),
    "checksum": lambda data: data[500].bitwise_xor_(1),
    "checksum ": lambda data: data[-2].bitwise_xor_(-(1 << 31)),
    "checksum  ": lambda data: swap(data, 10, 700),
    "checksum   ": lambda data: data[1].zero_(),
    "checksum    ": lambda data: data[100:200].copy_(data[300:400].clone()),
}


@pytest.mark.parametrize("elements", [1001, 100_000])
@pytest.mark.parametrize("name", list(DAMAGE))
def test_damage_of_any_kind_is_detected(name: str, elements: int) -> None:
    data = block(elements)
    received = DataBlock(STEP, checksum(data), data)
    assert flaw_of(received, elements, FLOW, STEP) == ""
    DAMAGE[name](data)
    assert flaw_of(received, elements, FLOW, STEP) == f"its {name.strip()} is wrong"


def test_a_change_of_any_single_bit_is_detected() -> None:
    data = block(9)
    intact = checksum(data)
    for position in range(9):
        for bit in range(32):
            data[position] ^= 1 << bit if bit < 31 else -(1 << 31)
            assert checksum(data) != intact, (position, bit)
            data[position] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert checksum(data) == intact


@pytest.mark.parametrize(("flow", "step"), [((2, 1), 7), ((1, 0), 7), ((1, 2), 6)])
def test_an_intact_block_of_another_pair_or_step_is_detected(flow: tuple[int, int], step: int) -> None:
    data = block(100)
    for announced_step in (STEP, step):
        received = DataBlock(announced_step, checksum(data), data)
        assert flaw_of(received, 100, flow, step) == "it is the block of another pair or step"


def test_a_missing_block_and_one_of_another_size_are_detected() -> None:
    data = block(100)
    assert flaw_of(DataBlock(STEP, checksum(data), data), 101, FLOW, STEP) == "it has 100 elements instead of 101"
    assert flaw_of(None, 100, FLOW, STEP) == "no block arrived"


# The plan


def test_the_steps_in_order() -> None:
    steps = steps_of(SMALL, 3)
    kinds = [step.kind for step in steps]
    assert kinds[0] == WARM_UP
    assert [kinds.count(kind) for kind in (WARM_UP, LATENCY, PAIR, *CONCURRENT)] == [1, 6, 12, 2, 2, 2, 2, 2]
    assert sorted(kinds, key=[WARM_UP, LATENCY, PAIR, *CONCURRENT].index) == kinds
    flows = {step.kind: step.flows for step in steps}
    assert flows[RING] == ((0, 1), (1, 2), (2, 0))
    assert len(flows[ALL_TO_ALL]) == 6
    assert set(flows[BOTH_WAYS]) == {(1, 0), (2, 0), (0, 1), (0, 2)}


def test_concurrent_flows_of_large_blocks_are_measured_once_and_pairs_with_smaller_blocks() -> None:
    large = steps_of(NetworkTest(), 3)
    assert [step.kind for step in large].count(RING) == 1
    assert [step.kind for step in large].count(PAIR) == 18
    assert {step.elements for step in large if step.kind == PAIR} == {PAIR_ELEMENTS_MAX}
    assert {step.elements for step in large if step.kind in CONCURRENT} == {100_000_000}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"elements": 2}, "--elements must be from 3 to"),
        ({"elements": 1 << 31}, "--elements must be from 3 to"),
        ({"repeats": 0}, "--repeats must be 1 or more"),
        ({"message_bytes": 0}, "--message-bytes must be 1 or more"),
        ({"wait_seconds": -1.0}, "--wait must be 0 or more"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        NetworkTest(**wrong)


# A whole test, with a thread for each rank


class Damaging(Transport):
    """A transport that passes messages through `damage`, which may change, drop or refuse them."""

    def __init__(self, inner: Transport, damage: Callable[[int, Message], Message | None]) -> None:
        self._inner, self._damage = inner, damage

    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        changed = self._damage(to, message)
        if changed is not None:
            self._inner.send(to, incarnation, changed, key)

    def receive(self, timeout: float | None = None) -> TransportEvent | None:
        return self._inner.receive(timeout)

    def wake(self) -> None:
        self._inner.wake()

    def disconnect(self, peer: int, incarnation: int, why: str, final: bool = False) -> None:
        self._inner.disconnect(peer, incarnation, why, final)

    def close(self, linger_seconds: float = 5.0) -> None:
        self._inner.close(linger_seconds)


class Run:
    """A network test among threads; `wrap` may wrap the transport of a rank."""

    def __init__(
        self, ranks: int, test: NetworkTest = SMALL, wrap: Callable[[int, Transport], Transport] | None = None
    ) -> None:
        self.ranks, self.test = ranks, test
        loopback = Loopback({rank: [peer for peer in range(ranks) if peer != rank] for rank in range(ranks)})
        bare = {rank: loopback.transport(rank) for rank in range(ranks)}
        self.transports = {rank: wrap(rank, bare[rank]) if wrap else bare[rank] for rank in bare}
        self.outcome: dict[int, NetworkResult | OffbeatError | None] = {}
        self.shares: list[float] = []

    def __call__(self) -> Run:
        threads = [threading.Thread(target=self._run_rank, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        return self

    def _run_rank(self, rank: int) -> None:
        transport = self.transports[rank]
        try:
            connections = Connections(transport, rank, self.ranks)
            connections.connect(JOIN_SECONDS)
            if rank == 0:
                on_step = lambda kind, share: self.shares.append(share)  # noqa: E731
                self.outcome[rank] = Controller(connections, self.test, on_step).run("loopback")
            else:
                Agent(connections).serve()
                self.outcome[rank] = None
        except OffbeatError as error:
            self.outcome[rank] = error
        finally:
            transport.close()

    @property
    def result(self) -> NetworkResult:
        outcome = self.outcome[0]
        assert isinstance(outcome, NetworkResult), outcome
        return outcome


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_pair_is_measured_and_every_block_verified(ranks: int) -> None:
    run = Run(ranks)()
    result = run.result
    flows = [flow for step in steps_of(SMALL, ranks) if step.kind != LATENCY for flow in step.flows]
    assert (result.blocks, result.corrupted, result.flaws) == (len(flows), 0, [])
    for pair in result.pairs:
        assert pair.blocks == flows.count((pair.source, pair.destination))
        assert pair.bytes_per_second > 0
        assert pair.latency_seconds > 0
    assert len(result.pairs) == ranks * (ranks - 1)
    assert result.all_to_all.bytes == ranks * (ranks - 1) * 1001 * 4
    assert (result.ring.flows, result.star.into.flows, result.star.both.flows) == (ranks, ranks - 1, 2 * ranks - 2)
    star = result.star
    assert star.updates_per_second == pytest.approx((ranks - 1) * 4004 / star.both.seconds / star.message_bytes)
    assert [run.outcome[rank] for rank in range(1, ranks)] == [None] * (ranks - 1)
    assert run.shares == sorted(run.shares)
    assert run.shares[-1] < 1


def test_one_corrupted_block_is_detected_counted_and_named() -> None:
    result = Run(3, replace(SMALL, corrupt=(2, 1)))().result
    assert result.corrupted == 1
    assert [(pair.source, pair.destination) for pair in result.pairs if pair.corrupted] == [(2, 1)]
    (sentence,) = result.flaws
    assert "from rank 2 to rank 1 came corrupted" in sentence


def test_a_transport_that_damages_blocks_is_detected() -> None:
    """Without --corrupt: two values change places on the way."""

    def damage(to: int, message: Message) -> Message | None:
        if isinstance(message, DataBlock) and to == 0:
            data = message.block.clone()
            swap(data, 3, 30)
            return replace(message, block=data)
        return message

    result = Run(3, SMALL, lambda rank, inner: Damaging(inner, damage) if rank == 1 else inner)().result
    bad = {(pair.source, pair.destination): pair for pair in result.pairs if pair.corrupted}
    assert list(bad) == [(1, 0)]
    assert result.corrupted == bad[1, 0].blocks == bad[1, 0].corrupted


def dying(step: int) -> Callable[[int, Message], Message | None]:
    """A rank that fails when it sends a block in this step or later."""

    def die(to: int, message: Message) -> Message | None:
        if isinstance(message, DataBlock) and message.step >= step:
            raise RunFailed("it died")
        return message

    return die


@pytest.mark.parametrize("step", [0, 9, 20])
def test_a_rank_that_dies_ends_the_test_with_an_error_that_names_it(step: int) -> None:
    run = Run(3, SMALL, lambda rank, inner: Damaging(inner, dying(step)) if rank == 2 else inner)()
    assert isinstance(run.outcome[0], RunFailed)
    assert isinstance(run.outcome[1], RunFailed)
    assert re.match(r"rank 2 was lost \(|rank 1 lost its link to rank 2 \(", str(run.outcome[0]))


def test_the_others_end_when_rank_0_dies() -> None:
    run = Run(3, SMALL, lambda rank, inner: Damaging(inner, dying(8)) if rank == 0 else inner)()
    assert [str(run.outcome[rank]) for rank in range(3)] == ["it died"] * 3


def test_rank_0_fails_after_a_time_limit_when_a_reply_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "TIMEOUT_SECONDS", 0.1)

    def swallow(to: int, message: Message) -> Message | None:
        return None if isinstance(message, DataBlock) and message.step > 8 else message

    run = Run(2, SMALL, lambda rank, inner: Damaging(inner, swallow) if rank == 1 else inner)()
    assert str(run.outcome[0]) == str(run.outcome[1])
    assert "rank 0 received no message for" in str(run.outcome[0])


def test_a_missing_rank_is_named_when_the_wait_is_over() -> None:
    loopback = Loopback({0: [1], 1: [0]})
    with pytest.raises(RunFailed, match=r"rank 0 waited 0\.05 s for a link to rank 1; .*--wait"):
        Connections(loopback.transport(0), 0, 2).connect(0.05)


def test_messages_that_arrive_before_all_ranks_are_connected_are_kept() -> None:
    """A quick rank reports that it is ready while rank 0 still waits for another."""
    loopback = Loopback({0: [1, 2], 1: [0, 2], 2: [0, 1]})
    first, quick = loopback.transport(0), loopback.transport(1)
    early = Connections(quick, 1, 2)  # of two ranks, so that it does not wait for rank 2
    early.connect(JOIN_SECONDS)
    early.send(0, RankReady("early", 1))
    connections = Connections(first, 0, 3)
    with pytest.raises(RunFailed, match="a link to rank 2"):
        connections.connect(0.1)
    loopback.transport(2)
    connections.connect(JOIN_SECONDS)
    assert connections.receive(JOIN_SECONDS) == (1, RankReady("early", 1))


def test_blocks_that_do_not_fit_into_a_machine_are_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (controller, agent):
        monkeypatch.setattr(module, "describe_machine", lambda: RankReady("a-machine", memory_bytes=300_000))
    fits = elements_that_fit(300_000, 3, 3)
    assert fits == 5000
    sentence = f"do not fit into the memory of a-machine, where 3 of 3 ranks are; type --elements {fits} or less"
    run = Run(3, replace(SMALL, elements=fits + 1))()
    assert isinstance(run.outcome[0], ConfigurationError)
    assert sentence in str(run.outcome[0])
    assert sentence in str(run.outcome[1])
    assert Run(3, replace(SMALL, elements=fits))().result.corrupted == 0


# Ranks that join by hand


def test_ranks_that_are_not_started_here_are_assigned_to_processes_that_join() -> None:
    free_ranks = FreeRanks(4, [0, 2])

    def assign(member: str, rank: int | None = None, program: Program = "network test") -> int | str:
        answer = free_ranks(CallRequest("assignment", rank, member, program=program))
        return answer.rank if isinstance(answer, Assignment) else answer

    assert [assign("a"), assign("b"), assign("a")] == [1, 3, 1]
    assert "all 4 ranks are taken" in str(assign("c"))
    assert assign("", rank=2) == 2
    assert "trains nothing" in str(assign("a worker", program="training"))


# Failures of processes


def test_a_rank_that_has_lost_rank_0_is_explained_by_what_rank_0_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank reports which link was lost; only then is the reason of rank 0 added."""

    def fail(info: RankInfo, test: NetworkTest) -> int:
        raise LinkLost(0, "closed", "rank 1 lost rank 0 (closed)") if info.rank == 1 else RunFailed("no lost rank 0")

    monkeypatch.setattr(processes, "_forked_main", fail)
    info = RankInfo(0, 3, Address("127.0.0.1", 1))
    for rank, sentence in (
        (1, "rank 1: rank 1 lost rank 0 (closed); at rank 0: a message was damaged"),
        (2, "rank 2: no lost rank 0"),
    ):
        with (
            pytest.raises(RunFailed, match=f"^{re.escape(sentence)}$"),
            processes._started(info, NetworkTest(), range(rank, rank + 1)) as check,
        ):
            check(PeerLost(0.0, rank, 0, LossReason.INVALID, "a message was damaged"))


@pytest.mark.parametrize(
    ("reports", "code", "error", "sentence"),
    [
        ([RunFailed("first"), ConfigurationError("too large")], 1, ConfigurationError, "too large"),
        ([RunFailed("rank 2 was lost")], 2, RunFailed, "rank 2 was lost"),
        ([], 2, ConfigurationError, "mpirun: no such host"),
        ([], 1, RunFailed, "mpirun: no such host"),
    ],
)
def test_ranks_of_mpirun_report_to_a_file_and_what_mpirun_prints_comes_second(
    reports: list[OffbeatError],
    code: int,
    error: type[OffbeatError],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    path = tmp_path / "network.json"
    for reported in reports:
        run_reported(functools.partial(_raise, reported), path.with_name(processes.FAILURES))
    argv = [sys.executable, "-I", "-S", "-c", f"import sys; print('mpirun: no such host'); sys.exit({code})"]
    mpirun = start_command(argv, rank=0, incarnation=0, environment={}, on_line=lambda rank, text: None)
    made = processes._mpirun_error(mpirun, mpirun.wait(), path.with_name(processes.FAILURES))
    assert (type(made), str(made)) == (error, sentence)


def _raise(error: OffbeatError) -> int:
    raise error


# Files


def test_a_result_that_is_written_is_read_unchanged(tmp_path: Path) -> None:
    result = Run(2)().result
    assert read_result(write_result(result, tmp_path / "new" / "network.json")) == result
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--out"):
        write_result(result, tmp_path / "file" / "network.json")
