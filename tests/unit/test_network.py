"""The probe of a network, over loopback: what is measured, that every kind of damage is found, and how it ends."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.core.messages import Message
from offbeat.errors import ConfigurationError, OffbeatError, RunFailed
from offbeat.lab.network_test import blocks, coordinator
from offbeat.lab.network_test.coordinator import Coordinator
from offbeat.lab.network_test.mail import Mail
from offbeat.lab.network_test.member import Member
from offbeat.lab.network_test.messages import ProbeBlock, ProbePresent
from offbeat.lab.network_test.plan import (
    ALL_TO_ALL,
    AT_ONCE,
    BOTH_WAYS,
    LATENCY,
    PAIR,
    PAIR_ELEMENTS_MAX,
    RING,
    WARM_UP,
    Probe,
    elements_that_fit,
    steps_of,
)
from offbeat.lab.network_test.probe_ranks import GUEST, RankAllocator
from offbeat.lab.network_test.result import Network, read_result, write_result
from offbeat.transports.loopback import Loopback
from offbeat.transports.rendezvous import Assignment, CallRequest
from offbeat.transports.transport import Incoming, Transport

SMALL = Probe(elements=1001, repeats=2)
JOIN_SECONDS = 500.0


# Blocks


def block(elements: int) -> Tensor:
    made = torch.empty(elements, dtype=torch.int32)
    blocks.fill(made, 1, 2, 7)
    return made


def as_defined(data: Tensor) -> int:
    """The checksum by its definition, one pair of elements after the other, in numbers without an end."""
    values = [int(value) & 0xFFFFFFFF for value in data]
    pairs = [low | high << 32 for low, high in zip(values[::2], values[1::2], strict=False)]
    if len(values) % 2:
        pairs.append(int(data[-1]))
    return sum(pair * (blocks._ODD + 2 * place) for place, pair in enumerate(pairs)) % 2**64


@pytest.mark.parametrize("elements", [3, 4, 5, 8191, 8192, 8193, 20_001])
def test_the_checksum_is_what_it_is_defined_to_be(elements: int) -> None:
    assert blocks.checksum(block(elements)) == as_defined(block(elements))
    random = torch.randint(-(2**31), 2**31 - 1, (elements,), generator=torch.Generator().manual_seed(elements))
    assert blocks.checksum(random.to(torch.int32)) == as_defined(random.to(torch.int32))


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
def test_damage_of_any_kind_is_found(name: str, elements: int) -> None:
    data = block(elements)
    announced = blocks.checksum(data)
    assert blocks.flaw(data, announced, elements, 1, 2, 7) is None
    DAMAGE[name](data)
    assert blocks.flaw(data, announced, elements, 1, 2, 7) == f"its {name.strip()} is wrong"


def test_a_change_of_any_single_bit_is_found() -> None:
    data = block(9)
    announced = blocks.checksum(data)
    for place in range(9):
        for bit in range(32):
            data[place] ^= 1 << bit if bit < 31 else -(1 << 31)
            assert blocks.checksum(data) != announced, (place, bit)
            data[place] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert blocks.checksum(data) == announced


@pytest.mark.parametrize("meant", [(2, 1, 7), (1, 0, 7), (1, 2, 6)])
def test_a_good_block_of_another_pair_or_another_step_is_not_taken_for_the_right_one(
    meant: tuple[int, int, int],
) -> None:
    data = block(100)
    assert blocks.flaw(data, blocks.checksum(data), 100, *meant) == "it is another block than was asked for"
    assert blocks.flaw(data, blocks.checksum(data), 101, 1, 2, 7) == "100 elements came, of 101"


# The plan


def test_the_steps_in_order() -> None:
    steps = steps_of(SMALL, 3)
    kinds = [step.kind for step in steps]
    assert kinds[0] == WARM_UP
    assert [kinds.count(kind) for kind in (WARM_UP, LATENCY, PAIR, *AT_ONCE)] == [1, 6, 12, 2, 2, 2, 2, 2]
    assert sorted(kinds, key=[WARM_UP, LATENCY, PAIR, *AT_ONCE].index) == kinds
    flows = {step.kind: step.flows for step in steps}
    assert flows[RING] == ((0, 1), (1, 2), (2, 0))
    assert len(flows[ALL_TO_ALL]) == 6
    assert set(flows[BOTH_WAYS]) == {(1, 0), (2, 0), (0, 1), (0, 2)}


def test_large_blocks_go_at_once_once_and_alone_in_part() -> None:
    large = steps_of(Probe(), 3)
    assert [step.kind for step in large].count(RING) == 1
    assert [step.kind for step in large].count(PAIR) == 18
    assert {step.elements for step in large if step.kind == PAIR} == {PAIR_ELEMENTS_MAX}
    assert {step.elements for step in large if step.kind in AT_ONCE} == {100_000_000}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"elements": 2}, "--elements must be from 3 to"),
        ({"elements": 1 << 31}, "--elements must be from 3 to"),
        ({"repeats": 0}, "--repeats must be 1 or more"),
        ({"message_bytes": 0}, "--message-bytes must be 1 or more"),
    ],
)
def test_a_probe_that_cannot_be(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        Probe(**wrong)


@pytest.mark.parametrize("pair", ["3:0", "1:1", "1", "a:b", "1:-1", "0:1:2"])
def test_a_pair_that_is_not_there_cannot_be_corrupted(pair: str) -> None:
    with pytest.raises(ConfigurationError, match="--corrupt"):
        Probe(corrupt=pair).corrupt_flow(3)


# A whole probe, with a thread for each rank


class Damaging(Transport):
    """A transport that damages what it carries, when `damage` says so."""

    def __init__(self, inner: Transport, damage: Callable[[int, Message], Message | None]) -> None:
        self._inner, self._damage = inner, damage

    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        changed = self._damage(to, message)
        if changed is not None:
            self._inner.send(to, incarnation, changed, key)

    def receive(self, timeout: float | None = None) -> Incoming | None:
        return self._inner.receive(timeout)

    def wake(self) -> None:
        self._inner.wake()

    def close(self, linger_seconds: float = 5.0) -> None:
        self._inner.close(linger_seconds)


class Run:
    """A probe among threads; `wrap` may put something around the transport of a rank."""

    def __init__(
        self, ranks: int, probe: Probe = SMALL, wrap: Callable[[int, Transport], Transport] | None = None
    ) -> None:
        self.ranks, self.probe = ranks, probe
        loopback = Loopback({rank: [peer for peer in range(ranks) if peer != rank] for rank in range(ranks)})
        bare = {rank: loopback.transport(rank) for rank in range(ranks)}
        self.transports = {rank: wrap(rank, bare[rank]) if wrap else bare[rank] for rank in bare}
        self.outcome: dict[int, Network | OffbeatError | None] = {}
        self.told: list[tuple[float, str]] = []

    def __call__(self) -> Run:
        threads = [threading.Thread(target=self._be, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        return self

    def _be(self, rank: int) -> None:
        transport = self.transports[rank]
        try:
            mail = Mail(transport, rank, self.ranks)
            mail.connect(JOIN_SECONDS)
            if rank == 0:
                tell = lambda share, what: self.told.append((share, what))  # noqa: E731
                self.outcome[rank] = Coordinator(mail, self.probe, tell).run("loopback")
            else:
                Member(mail).serve()
                self.outcome[rank] = None
        except OffbeatError as error:
            self.outcome[rank] = error
        finally:
            transport.close()

    @property
    def network(self) -> Network:
        found = self.outcome[0]
        assert isinstance(found, Network), found
        return found


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_pair_is_measured_and_every_block_verified(ranks: int) -> None:
    run = Run(ranks)()
    network = run.network
    flows = [flow for step in steps_of(SMALL, ranks) if step.kind != LATENCY for flow in step.flows]
    assert (network.blocks, network.corrupted, network.flaws) == (len(flows), 0, [])
    for pair in network.pairs:
        assert pair.blocks == flows.count((pair.source, pair.destination))
        assert pair.bytes_per_second > 0
        assert pair.latency_seconds > 0
    assert len(network.pairs) == ranks * (ranks - 1)
    assert network.all_to_all.bytes == ranks * (ranks - 1) * 1001 * 4
    assert (network.ring.flows, network.star.into.flows, network.star.both.flows) == (ranks, ranks - 1, 2 * ranks - 2)
    star = network.star
    assert star.updates_per_second == pytest.approx((ranks - 1) * 4004 / star.both.seconds / star.message_bytes)
    assert [run.outcome[rank] for rank in range(1, ranks)] == [None] * (ranks - 1)
    shares = [share for share, _ in run.told]
    assert shares == sorted(shares)
    assert shares[-1] < 1


def test_one_corrupted_block_is_found_counted_and_named() -> None:
    network = Run(3, replace(SMALL, corrupt="2:1"))().network
    assert network.corrupted == 1
    assert [(pair.source, pair.destination) for pair in network.pairs if pair.corrupted] == [(2, 1)]
    (sentence,) = network.flaws
    assert "from rank 2 to rank 1 came corrupted" in sentence


def test_a_network_that_damages_blocks_is_found_out() -> None:
    """Not the switch, but what the switch stands for: values that change places between the two ends."""

    def damage(to: int, message: Message) -> Message | None:
        if isinstance(message, ProbeBlock) and to == 0:
            data = message.block.clone()
            swap(data, 3, 30)
            return replace(message, block=data)
        return message

    network = Run(3, SMALL, lambda rank, inner: Damaging(inner, damage) if rank == 1 else inner)().network
    bad = {(pair.source, pair.destination): pair for pair in network.pairs if pair.corrupted}
    assert list(bad) == [(1, 0)]
    assert network.corrupted == bad[1, 0].blocks == bad[1, 0].corrupted


def dying(step: int) -> Callable[[int, Message], Message | None]:
    """What a rank does that dies in a step."""

    def die(to: int, message: Message) -> Message | None:
        if isinstance(message, ProbeBlock) and message.step >= step:
            raise RunFailed("it died")
        return message

    return die


@pytest.mark.parametrize("step", [0, 9, 20])
def test_a_rank_that_dies_on_the_way_ends_the_probe_with_its_name(step: int) -> None:
    run = Run(3, SMALL, lambda rank, inner: Damaging(inner, dying(step)) if rank == 2 else inner)()
    assert isinstance(run.outcome[0], RunFailed)
    assert isinstance(run.outcome[1], RunFailed)
    assert re.match(r"rank 2 was lost \(|rank 1 lost its link to rank 2 \(", str(run.outcome[0]))


def test_the_others_end_when_rank_0_dies() -> None:
    run = Run(3, SMALL, lambda rank, inner: Damaging(inner, dying(8)) if rank == 0 else inner)()
    assert [str(run.outcome[rank]) for rank in range(3)] == ["it died"] * 3


def test_an_answer_that_never_comes_ends_the_patience_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "PATIENCE_SECONDS", 0.1)

    def swallow(to: int, message: Message) -> Message | None:
        return None if isinstance(message, ProbeBlock) and message.step > 8 else message

    run = Run(2, SMALL, lambda rank, inner: Damaging(inner, swallow) if rank == 1 else inner)()
    assert str(run.outcome[0]) == str(run.outcome[1])
    assert "has not heard from anybody for" in str(run.outcome[0])


def test_nobody_comes() -> None:
    loopback = Loopback({0: [1], 1: [0]})
    with pytest.raises(RunFailed, match=r"rank 0 waited 0\.05 s for a link to rank 1; .*--wait"):
        Mail(loopback.transport(0), 0, 2).connect(0.05)


def test_what_comes_before_everybody_is_connected_is_not_lost() -> None:
    """A rank that is quick says that it is there while rank 0 still waits for another."""
    loopback = Loopback({0: [1, 2], 1: [0, 2], 2: [0, 1]})
    first, quick = loopback.transport(0), loopback.transport(1)
    early = Mail(quick, 1, 2)  # it takes nobody but rank 0 for a rank, and so need not wait for rank 2
    early.connect(JOIN_SECONDS)
    early.send(0, ProbePresent("early", 1))
    mail = Mail(first, 0, 3)
    with pytest.raises(RunFailed, match="a link to rank 2"):
        mail.connect(0.1)
    loopback.transport(2)
    mail.connect(JOIN_SECONDS)
    assert mail.next(JOIN_SECONDS) == (1, ProbePresent("early", 1))


def test_blocks_that_do_not_fit_into_a_machine_are_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ProbePresent("a-machine", memory_bytes=300_000)
    for module in ("coordinator", "member"):
        monkeypatch.setattr(f"offbeat.lab.network_test.{module}.present", lambda: here)
    fits = elements_that_fit(300_000, 3, 3)
    assert fits == 5000
    sentence = f"do not fit into the memory of a-machine, where 3 of 3 ranks are; type --elements {fits} or less"
    run = Run(3, replace(SMALL, elements=fits + 1))()
    assert isinstance(run.outcome[0], ConfigurationError)
    assert sentence in str(run.outcome[0])
    assert sentence in str(run.outcome[1])
    assert Run(3, replace(SMALL, elements=fits))().network.corrupted == 0


# Who may come


def test_the_desk_hands_out_the_ranks_that_are_not_started_here() -> None:
    rank_allocator = RankAllocator(4, [0, 2])

    def come(member: str, rank: int | None = None) -> int | str:
        answer = rank_allocator(CallRequest("assignment", rank, member))
        return answer.rank if isinstance(answer, Assignment) else answer

    assert [come(f"{GUEST}a"), come(f"{GUEST}b"), come(f"{GUEST}a")] == [1, 3, 1]
    assert "all 4 ranks are taken" in str(come(f"{GUEST}c"))
    assert come("", rank=2) == 2
    assert "trains nothing" in str(come("a worker"))


# Files


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    network = Run(2)().network
    assert read_result(write_result(network, tmp_path / "new" / "network.json")) == network
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="--out"):
        write_result(network, tmp_path / "file" / "network.json")
