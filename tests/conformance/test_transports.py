"""All transports pass one suite; some that are broken on purpose fail it, so the checks can fail."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from mpi_cases import FAULT_TOLERANT, MpiCase, MpiRanks, Proxy
from transport_cases import IDENTITY, LoopbackCase, TcpCase

from offbeat.core.events import LossReason, MessageArrived, PeerJoined, PeerLost, Sent
from offbeat.core.messages import Message
from offbeat.core.run_identity import RunIdentity
from offbeat.errors import ConfigurationError, ContractViolation, RunFailed
from offbeat.testing import TransportCase, Violation, check_transport, transport_checks
from offbeat.testing import transport_conformance as suite
from offbeat.testing.transport_conformance import NumberedMessage
from offbeat.transports.loopback import Loopback
from offbeat.transports.transport import Transport, TransportEvent


@pytest.mark.parametrize("check", transport_checks(LoopbackCase()))
def test_loopback(check: str) -> None:
    assert check_transport(LoopbackCase(), only=check) == [check]


@pytest.mark.parametrize("check", transport_checks(TcpCase()))
def test_tcp(check: str) -> None:
    assert check_transport(TcpCase(), only=check) == [check]


TLS_CHECKS = ("concurrent_bidirectional_messages_arrive", "garbage_closes_only_its_own_link", "wake_unblocks_receive")
"""Run with the other tests; the rest is slow."""


@pytest.mark.parametrize(
    "check",
    [
        check if check in TLS_CHECKS else pytest.param(check, marks=pytest.mark.slow)
        for check in transport_checks(TcpCase())
    ],
)
def test_tls(check: str) -> None:
    assert check_transport(TcpCase(tls="on", shared_memory=False), only=check) == [check]


def test_tcp_with_checksums() -> None:
    case = TcpCase(checksum=True)
    for check in ("messages_keep_their_order", "every_dtype_arrives", "kept_tensors_are_not_overwritten"):
        check_transport(case, only=check)


DEADLY = "a_crash_in_mid_message_loses_only_that_peer"


@pytest.fixture(scope="session")
def mpi_ranks() -> Iterator[MpiRanks]:
    """Three ranks for many tests: each opens one transport after the other."""
    ranks = MpiRanks(3)
    yield ranks
    ranks.end()


@pytest.mark.parametrize("check", [check for check in transport_checks(MpiCase()) if check != DEADLY])
def test_mpi(check: str, mpi_ranks: MpiRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LARGE_BYTES", 40_000_000)  # several chunks, and all of it also goes through proxies
    assert check_transport(MpiCase(mpi_ranks), only=check) == [check]


@pytest.mark.integration
def test_mpi_ranks_that_survive_a_death_exit_without_an_error_message(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = MpiRanks(3, *FAULT_TOLERANT)
    try:
        assert ranks.tolerant
        assert check_transport(MpiCase(ranks), only=DEADLY) == [DEADLY]
        ranks.finish()
    finally:
        ranks.end()
    assert capfd.readouterr() == ("", "")


@pytest.mark.integration
def test_mpi_ranks_that_end_in_order_exit_without_an_error_message(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = MpiRanks(2)
    try:
        assert not ranks.tolerant
        check_transport(MpiCase(ranks), only="every_dtype_arrives")
        assert ranks.finish() == 0
    finally:
        ranks.end()
    assert capfd.readouterr() == ("", "")


def test_mpi_with_checksums(mpi_ranks: MpiRanks) -> None:
    for check in ("messages_keep_their_order", "every_dtype_arrives", "kept_tensors_are_not_overwritten"):
        check_transport(MpiCase(mpi_ranks, checksum=True), only=check)


@pytest.mark.parametrize(
    ("identity", "sentence"),
    [
        (
            RunIdentity("another", IDENTITY.strategy),
            "rank 1 has a different model: its fingerprint is another, that of rank 0 is the same everywhere; every "
            "rank must build the same model",
        ),
        (
            RunIdentity(IDENTITY.model, "AnytimeMinibatch(seconds=2)"),
            "rank 1 has a different strategy: AnytimeMinibatch(seconds=2), and rank 0 has FixedMinibatch(batch=256); "
            "give every rank the same strategy",
        ),
    ],
    ids=["model", "strategy"],
)
def test_mpi_ranks_of_different_runs_reject_each_other(
    mpi_ranks: MpiRanks, identity: RunIdentity, sentence: str
) -> None:
    case = MpiCase(mpi_ranks)
    try:
        hub, worker, _ = case.open(3, identities={1: identity})
        with pytest.raises(RunFailed, match=re.escape(sentence)):
            worker.receive(30)
        joined, rejections = [], []
        for _ in range(2):  # in either order
            try:
                joined.append(hub.receive(30))
            except RunFailed as error:
                rejections.append(str(error))
        assert rejections == [sentence]
        assert joined == [PeerJoined(ANY, 2, 0)]
    finally:
        case.close()


def test_mpi_reports_the_elapsed_time_and_messages_that_cannot_be_sent(mpi_ranks: MpiRanks) -> None:
    case = MpiCase(mpi_ranks)
    try:
        hub, worker = case.open(2)
        assert isinstance(hub, Proxy)
        assert isinstance(worker, Proxy)
        assert worker.receive(30) == PeerJoined(ANY, 0, 0)
        assert worker.ask("elapsed")[0] == 12.5
        assert hub.ask("elapsed") is None
        assert hub.receive(30) == PeerJoined(ANY, 1, 0)
        hub.ask("send_too_much", 1)
        with pytest.raises(ContractViolation, match="put large data into a Tensor"):
            hub.receive(30)
        hub.send(1, 0, NumberedMessage(1, torch.ones(1)))
        assert isinstance(worker.receive(30), MessageArrived)
    finally:
        case.close()


def test_a_check_that_does_not_exist_or_does_not_apply_is_an_error() -> None:
    with pytest.raises(Violation, match="has no check 'garbage_closes"):
        check_transport(LoopbackCase(), only="garbage_closes_only_its_own_link")


def test_links_of_a_loopback_go_both_ways() -> None:
    with pytest.raises(ConfigurationError, match="not the other way round"):
        Loopback({0: [1], 1: []})
    with pytest.raises(ConfigurationError, match="no rank 7"):
        Loopback({0: [1], 1: [0]}).transport(7)


def test_a_loopback_rank_that_connects_twice_replaces_the_first() -> None:
    loopback = Loopback({0: [1], 1: [0]})
    hub, first = loopback.transport(0), loopback.transport(1)
    second = loopback.transport(1)
    hub.clock = itertools.count(1.0).__next__
    assert [hub.receive(0), hub.receive(0), hub.receive(0)] == [
        PeerJoined(1.0, 1, 0),
        PeerLost(2.0, 1, 0, LossReason.REPLACED, "connected again"),
        PeerJoined(3.0, 1, 1),
    ]
    assert first.receive() is None
    first.close()
    assert second.receive(0) == PeerJoined(ANY, 0, 1)
    assert hub.receive(0) is None


# Transports that are broken on purpose


class Tampered(Transport):
    """A correct transport behind a wrapper that can break it."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        self.inner.send(to, incarnation, message, key)

    def receive(self, timeout: float | None = None) -> TransportEvent | None:
        return self.inner.receive(timeout)

    def wake(self) -> None:
        self.inner.wake()

    def disconnect(self, peer: int, incarnation: int, why: str, final: bool = False) -> None:
        self.inner.disconnect(peer, incarnation, why, final)

    def close(self, linger_seconds: float = 5.0) -> None:
        self.inner.close(linger_seconds)


class Shuffles(Tampered):
    """Every tenth message overtakes the one that was sent before it."""

    count = 0
    held: tuple[Any, ...] | None = None

    def send(self, *arguments: Any) -> None:
        self.count += 1
        if self.count % 10 == 3:
            self.held = arguments
            return
        super().send(*arguments)
        if self.held is not None:
            super().send(*self.held)
            self.held = None


class Overwrites(Tampered):
    """Receives into the same memory every time."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.memory = torch.empty(20_000_000)

    def receive(self, timeout: float | None = None) -> TransportEvent | None:
        item = super().receive(timeout)
        if (
            isinstance(item, MessageArrived)
            and isinstance(item.message, NumberedMessage)
            and item.message.body.dtype is torch.float32
        ):
            place = self.memory[: item.message.body.numel()].view(item.message.body.shape)
            place.copy_(item.message.body)
            return dataclasses.replace(item, message=dataclasses.replace(item.message, body=place))
        return item


class Repeats(Tampered):
    """Every message arrives twice."""

    def send(self, *arguments: Any) -> None:
        super().send(*arguments)
        super().send(*arguments)


class Changes(Tampered):
    """Everything becomes a float32."""

    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        super().send(to, incarnation, message.with_tensors(tensor.real.float() for tensor in message.tensors()), key)


class ForgetsLosses(Tampered):
    def receive(self, timeout: float | None = None) -> TransportEvent | None:
        item = super().receive(timeout)
        return self.receive(timeout) if isinstance(item, PeerLost) else item


class ForgetsIncarnations(Tampered):
    """Sends to the newest incarnation, whichever was named."""

    newest = 0

    def receive(self, timeout: float | None = None) -> TransportEvent | None:
        item = super().receive(timeout)
        if isinstance(item, PeerJoined):
            self.newest = item.incarnation
        return item

    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        super().send(to, self.newest, message, key)


class NeverReportsSent(Tampered):
    def receive(self, timeout: float | None = None) -> TransportEvent | None:
        item = super().receive(timeout)
        return self.receive(timeout) if isinstance(item, Sent) else item


class Sleeps(Tampered):
    """Ignores `wake`."""

    def wake(self) -> None:
        pass


class LosesEarly(Tampered):
    """The loss of a peer is reported before the last message it sent."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.held: TransportEvent | None = None

    def receive(self, timeout: float | None = None) -> TransportEvent | None:
        item, self.held = self.held, None
        item = item or super().receive(timeout)
        if isinstance(item, MessageArrived):
            self.held = super().receive(0)
            if isinstance(self.held, PeerLost):
                item, self.held = self.held, item
        return item


class DropsQueue(Tampered):
    """Closing discards what was not sent yet."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.queue: deque[tuple[Any, ...]] = deque()

    def send(self, *arguments: Any) -> None:
        self.queue.append(arguments)

    def receive(self, timeout: float | None = None) -> TransportEvent | None:
        while self.queue:
            super().send(*self.queue.popleft())
        return super().receive(timeout)


class TamperedCase(LoopbackCase):
    def __init__(self, tamper: Callable[[Transport], Transport]) -> None:
        super().__init__()
        self._tamper = tamper

    def _make(self, rank: int) -> Transport:
        return self._tamper(super()._make(rank))


@pytest.mark.parametrize(
    ("tamper", "check"),
    [
        (Shuffles, "messages_keep_their_order"),
        (Shuffles, "concurrent_bidirectional_messages_arrive"),
        (Repeats, "messages_keep_their_order"),
        (Changes, "every_dtype_arrives"),
        (Overwrites, "kept_tensors_are_not_overwritten"),
        (NeverReportsSent, "messages_keep_their_order"),
        (Sleeps, "wake_unblocks_receive"),
        (ForgetsLosses, "close_delivers_queued_messages_then_reports_the_loss"),
        (ForgetsLosses, "a_rejoining_rank_gets_a_higher_incarnation"),
        (ForgetsIncarnations, "a_rejoining_rank_gets_a_higher_incarnation"),
        (LosesEarly, "close_delivers_queued_messages_then_reports_the_loss"),
        (DropsQueue, "close_delivers_queued_messages_then_reports_the_loss"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_broken_transport_fails_its_check(
    tamper: Callable[[Transport], Transport], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "LIMIT_SECONDS", 0.5)
    with pytest.raises(Violation, match=f"TamperedCase, {check}: "):
        check_transport(TamperedCase(tamper), only=check)


def test_the_wrapper_alone_is_no_violation() -> None:
    case: TransportCase = TamperedCase(Tampered)
    assert check_transport(case) == transport_checks(case)
