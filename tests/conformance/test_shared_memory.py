"""Links over TCP keep the contract of transports with shared memory for everything, and without it."""

from __future__ import annotations

import pytest
import torch
from transport_cases import TcpCase

from offbeat.testing import check_transport, transport_checks
from offbeat.testing.transport_conformance import NumberedMessage, TransportMonitor
from offbeat.transports import shared_memory, wire


@pytest.mark.slow
@pytest.mark.parametrize("check", transport_checks(TcpCase()))
def test_without_shared_memory(check: str) -> None:
    assert check_transport(TcpCase(shared_memory=False), only=check) == [check]


@pytest.mark.slow
@pytest.mark.parametrize("check", transport_checks(TcpCase()))
def test_with_shared_memory_for_the_smallest_payload(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_BYTES_MIN", 1)
    assert check_transport(TcpCase(checksum=True), only=check) == [check]


@pytest.mark.parametrize("number", [0, shared_memory.SLOTS_MAX, 255])
def test_a_message_in_a_missing_slot_costs_its_own_link(number: int) -> None:
    case = TcpCase()
    try:
        hub, worker, other = (TransportMonitor(transport, rank) for rank, transport in enumerate(case.open(3)))
        for watch, peer in ((hub, 1), (hub, 2), (worker, 0), (other, 0)):
            watch.wait_linked(peer)
        head = wire.encode(NumberedMessage(0, torch.ones(100_000))).head
        wire.set_slot(head, number)
        case.send_raw(1, 0, head)
        assert f"slot {number}, which is missing" in hub.wait_lost(1, 0).detail
        assert hub.wait_linked(1, above=0) == 1
        assert set(hub.links) == {1, 2}
        assert not hub.lost[1:]
        assert not hub.arrived[1]
    finally:
        case.close()
