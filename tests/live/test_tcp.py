"""Links over TCP when things go wrong. What every transport must do is in `conformance/test_transports.py`.

Run as a script, this file is a rank in a process of its own.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from offbeat.core.events import LossReason, MessageArrived, PeerJoined, PeerLost
from offbeat.core.messages import Message
from offbeat.core.run_identity import RunIdentity
from offbeat.errors import ContractViolation, RunFailed
from offbeat.testing.transport_conformance import NumberedMessage, TransportMonitor
from offbeat.transports import shared_memory, tcp
from offbeat.transports.address import Address
from offbeat.transports.link import LinkLoss, LinkOptions
from offbeat.transports.listener import Listener
from offbeat.transports.rendezvous import (
    Assignment,
    CallRequest,
    ControlConnection,
    LinkAccepted,
    LinkRequest,
    Unreachable,
    connect,
    request_assignment,
)
from offbeat.transports.shared_memory import SLOTS_MAX
from offbeat.transports.tcp import Admission, TcpTransport
from offbeat.transports.tls import Credentials, Tls
from offbeat.transports.transport import TransportEvent

CREDENTIALS = Credentials(b"a token only for these tests")
IDENTITY = RunIdentity("m", "s")
SMALL = torch.ones(3)


class Ranks:
    """Ranks in this process, and some in others; all are ended by `close`."""

    def __init__(self) -> None:
        self.listener = Listener(Address("127.0.0.1", 0), CREDENTIALS)
        self.transports: list[TcpTransport] = []
        self.children: list[subprocess.Popen[str]] = []

    def open(self, rank: int, peers: list[int], **options: Any) -> TcpTransport:
        """`options` are arguments of `TcpTransport`, or fields of `Admission` or `LinkOptions`."""
        settings = {"processes": 4, "credentials": CREDENTIALS, "identity": IDENTITY, **options}
        for name, kind in (("admission", Admission), ("options", LinkOptions)):
            names = {item.name for item in dataclasses.fields(kind)} & settings.keys()
            settings[name] = kind(**{field: settings.pop(field) for field in names})
        rendezvous = self.listener if rank == 0 else self.listener.address
        self.transports.append(TcpTransport(rank=rank, peers=peers, **{"rendezvous": rendezvous, **settings}))
        return self.transports[-1]

    def watch(self, rank: int, peers: list[int], **options: Any) -> TransportMonitor:
        return TransportMonitor(self.open(rank, peers, **options), rank)

    def spawn(self, role: str, rank: int) -> subprocess.Popen[str]:
        self.children.append(start(role, rank, self.listener.address))
        return self.children[-1]

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.communicate()
        for transport in reversed(self.transports):
            transport.close()
        self.listener.close()


def start(role: str, rank: int, rendezvous: Address, **options: Any) -> subprocess.Popen[str]:
    """This file as a process, which also ends when its standard input is closed."""
    line = [sys.executable, __file__, role, str(rank), str(rendezvous)]
    return subprocess.Popen(line, stdin=subprocess.PIPE, text=True, **options)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    opened = Ranks()
    yield opened
    opened.close()


def exchange(one: TransportMonitor, other: TransportMonitor, number: int = 0) -> None:
    one.send(other.rank, NumberedMessage(number, SMALL))
    other.send(one.rank, NumberedMessage(number, SMALL))
    one.expect(other.rank, number)
    other.expect(one.rank, number)


def rejection(transport: TcpTransport) -> str:
    try:
        while transport.receive(60) is not None:
            pass
    except RunFailed as error:
        return str(error)
    pytest.fail("it was not rejected")


def stop(child: subprocess.Popen[str]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)


def vanish(transport: TcpTransport) -> None:
    """End without a goodbye, as a killed process does."""
    listener = transport._listener
    assert listener is not None
    listener.close()
    for link in list(transport._links.values()):
        link.drop(LinkLoss(LossReason.LOCAL, "killed by a test"))
        assert link.ended.wait(60)
    transport.close(0)


# Connecting


def test_peers_find_each_other_through_rank_0(ranks: Ranks) -> None:
    watches = [ranks.watch(rank, [peer for peer in range(4) if peer != rank]) for rank in range(4)]
    for one in watches:
        for other in watches:
            if one.rank < other.rank:
                assert one.wait_linked(other.rank) == other.wait_linked(one.rank) == 0
                exchange(one, other)


def test_a_rank_need_not_be_a_peer_of_rank_0(ranks: Ranks) -> None:
    last, middle, first = ranks.watch(2, [1]), ranks.watch(1, [0, 2]), ranks.watch(0, [1])
    for one, other in ((last, middle), (middle, first)):
        one.wait_linked(other.rank)
        other.wait_linked(one.rank)
        exchange(one, other)


def test_a_peer_that_left_and_comes_back_is_found_again(ranks: Ranks) -> None:
    ranks.open(0, [])
    higher, lower = ranks.watch(2, [1]), ranks.watch(1, [2])
    lower.wait_linked(2)
    before = higher.wait_linked(1)
    lower.transport.close()
    assert higher.wait_lost(1, before).reason is LossReason.CLOSED
    lower = ranks.watch(1, [2])
    assert higher.wait_linked(1, above=before) == lower.wait_linked(2)
    exchange(lower, higher)


def test_a_restarted_rank_0_learns_again_where_all_ranks_listen(ranks: Ranks) -> None:
    first = ranks.watch(0, [1])
    middle, last = ranks.watch(1, [0, 2]), ranks.watch(2, [1])
    for one, other in ((first, 1), (middle, 0), (middle, 2), (last, 1)):
        one.wait_linked(other)
    vanish(ranks.transports[0])
    middle.wait_lost(0, 0)
    ranks.listener = Listener(ranks.listener.address, CREDENTIALS)
    again = ranks.watch(0, [1])
    assert again.wait_linked(1) == middle.wait_linked(0, above=0) == 1  # rank 0 has restarted, the dialer has not
    ranks.transports[2].close()
    middle.wait_lost(2, 0)
    last = ranks.watch(2, [1])
    assert last.wait_linked(1) == middle.wait_linked(2, above=0)
    exchange(last, middle)


def test_incarnations_start_with_the_first_one_that_was_given(ranks: Ranks) -> None:
    hub, worker = ranks.watch(0, [1], first_incarnation=7), ranks.watch(1, [0])
    assert hub.wait_linked(1) == worker.wait_linked(0) == 7


# Relays


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_peers_that_cannot_reach_each_other_are_relayed_by_rank_0(
    ranks: Ranks, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if rank 0 is no peer of theirs."""
    credentials = Credentials(CREDENTIALS.token, Tls(mode=mode))
    ranks.listener.close()
    ranks.listener = Listener(Address("127.0.0.1", 0), credentials)
    tried: list[Address] = []

    def only_rank_0(address: Address, *arguments: Any) -> ControlConnection:
        if address.port != ranks.listener.address.port:
            tried.append(address)
            raise Unreachable("a firewall stands in the way")
        return connect(address, *arguments)

    monkeypatch.setattr(tcp, "connect", only_rank_0)
    ranks.open(0, [], credentials=credentials)
    lower, higher = ranks.watch(1, [2], credentials=credentials), ranks.watch(2, [1], credentials=credentials)
    before = lower.wait_linked(2)
    assert higher.wait_linked(1) == before
    assert tried
    exchange(lower, higher)
    large = torch.arange(2_000_000.0)
    higher.send(1, NumberedMessage(1, large))
    assert torch.equal(lower.expect(2, 1).body, large)
    assert "ranks 1 and 2 cannot reach each other; their messages go through rank 0" in caplog.text
    ranks.transports[2]._links[1].drop(LinkLoss(LossReason.LOCAL, "dropped by a test"))
    assert lower.wait_linked(2, above=before) == higher.wait_linked(1, above=before)
    exchange(lower, higher, 2)
    ranks.transports[2].close()
    assert lower.wait_lost(2, before + 1).reason is LossReason.CLOSED
    assert caplog.text.count("cannot reach each other") == 1


# Rejections


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"credentials": Credentials(b"a guess that is long enough")}, "does not accept the token"),
        (
            {"identity": RunIdentity("n", "s")},
            "rank 1 has a different model: its fingerprint is n, that of rank 0 is m; every rank must build the same",
        ),
        (
            {"identity": RunIdentity("m", "t")},
            "rank 1 has a different strategy: t, and rank 0 has s; give every rank the same strategy",
        ),
    ],
    ids=["wrong token", "other model", "other strategy"],
)
def test_a_rejected_rank_reports_why(ranks: Ranks, options: dict[str, Any], sentence: str) -> None:
    hub = ranks.watch(0, [1, 2])
    rejected = ranks.open(1, [0], **options)
    assert sentence in rejection(rejected)
    worker = ranks.watch(2, [0])
    hub.wait_linked(2)
    worker.wait_linked(0)
    exchange(hub, worker)
    assert hub.links == {2: 0}


def test_a_rank_that_is_no_peer_is_rejected(ranks: Ranks) -> None:
    ranks.open(0, [1])
    assert "rank 2 is no peer of rank 0" in rejection(ranks.open(2, [0]))


def test_rank_0_decides_on_assignments(ranks: Ranks) -> None:
    requests: list[CallRequest] = []

    def assignment(request: CallRequest) -> Assignment | str:
        requests.append(request)
        if request.member == "unwanted":
            return "all ranks are in use"
        if request.member == "broken":
            raise ZeroDivisionError("oh")
        return Assignment(2 if request.rank is None else request.rank, 4, 12.5, b"plan")

    hub = ranks.watch(0, [1, 2], assign=assignment)
    address = ranks.listener.address
    assigned = request_assignment(address, CREDENTIALS, member="one", rank=None, wait_seconds=60)
    assert assigned == Assignment(2, 4, 12.5, b"plan")
    worker = ranks.watch(assigned.rank, [0], member="one")
    hub.wait_linked(2)
    worker.wait_linked(0)
    joined = ranks.transports[-1].elapsed_at_join
    assert joined is not None
    assert joined[0] == 12.5
    assert [(request.purpose, request.rank, request.member) for request in requests] == [
        ("assignment", None, "one"),
        ("link", 2, "one"),
    ]
    with pytest.raises(RunFailed, match="all ranks are in use"):
        request_assignment(address, CREDENTIALS, member="unwanted", rank=None, wait_seconds=60)
    assert rejection(ranks.open(1, [0], member="unwanted")) == "all ranks are in use"
    assert "failed to answer: ZeroDivisionError: oh" in rejection(ranks.open(1, [0], member="broken"))


def test_without_an_allocator_no_rank_is_assigned(ranks: Ranks) -> None:
    ranks.open(0, [1])
    with pytest.raises(RunFailed, match="assigns no ranks"):
        request_assignment(ranks.listener.address, CREDENTIALS, member="", rank=None, wait_seconds=60)


def test_a_silent_client_does_not_delay_others(ranks: Ranks) -> None:
    hub = ranks.watch(0, [1])
    with socket.create_connection((ranks.listener.address.host, ranks.listener.address.port)) as silent:
        worker = ranks.watch(1, [0])
        hub.wait_linked(1)
        worker.wait_linked(0)
        exchange(hub, worker)
        ranks.close()
        while silent.recv(1024):
            pass


# Faults


def test_a_rank_that_connects_again_replaces_its_link_that_seems_alive(ranks: Ranks) -> None:
    hub = ranks.watch(0, [1])
    frozen = ranks.spawn("echo", 1)
    before = hub.wait_linked(1)
    stop(frozen)
    worker = ranks.watch(1, [0])
    lost = hub.wait_lost(1, before)
    assert (lost.reason, lost.detail) == (LossReason.REPLACED, "rank 1 connected again")
    assert hub.wait_linked(1, above=before) == worker.wait_linked(0)
    exchange(hub, worker)
    frozen.kill()
    exchange(hub, worker, 1)


def test_a_peer_that_was_stopped_finds_its_link_closed_and_reconnects(ranks: Ranks) -> None:
    hub = ranks.watch(0, [1], silence_seconds=2.0)
    child = ranks.spawn("echo", 1)
    before = hub.wait_linked(1)
    stop(child)
    hub.send(1, NumberedMessage(0, torch.ones(25_000_000)))
    lost = hub.wait_lost(1, before)
    assert (lost.reason, lost.detail) == (LossReason.SILENT, "silent for 2 seconds")
    os.kill(child.pid, signal.SIGCONT)
    hub.wait_linked(1, above=before)
    hub.send(1, NumberedMessage(1, SMALL))
    hub.expect(1, 1)


@pytest.mark.slow
def test_a_peer_killed_in_the_middle_of_100_mb_is_lost_and_can_join_again(ranks: Ranks) -> None:
    hub = ranks.watch(0, [1, 2])
    other = ranks.watch(2, [0])
    hub.wait_linked(2)
    for life in range(2):
        child = ranks.spawn("flood", 1)
        assert hub.wait_linked(1, above=life - 1) == life
        assert hub.expect(1, 0).body.numel() == 25_000_000
        child.kill()  # the next one is in transit
        hub.arrived[1].clear()
        lost = hub.wait_lost(1, life)
        assert (lost.reason, lost.detail) == (LossReason.BROKEN, "the connection was closed")
        hub.arrived[1].clear()
        other.wait_linked(0)
        exchange(hub, other, life)


def test_both_ends_drop_a_link_at_once_and_reconnect(ranks: Ranks) -> None:
    hub, worker = ranks.watch(0, [1]), ranks.watch(1, [0])
    above = -1
    for _ in range(4):
        above = hub.wait_linked(1, above)
        assert worker.wait_linked(0, above - 1) == above
        hub.send(1, NumberedMessage(0, torch.ones(1_000_000)))
        worker.send(0, NumberedMessage(0, torch.ones(1_000_000)))
        links = [transport._links.get(1 - place) for place, transport in enumerate(ranks.transports)]
        drops = [
            threading.Thread(target=link.drop, args=(LinkLoss(LossReason.LOCAL, "dropped"),))
            for link in links
            if link is not None
        ]
        for thread in drops:
            thread.start()
        for thread in drops:
            thread.join()
        hub.wait_lost(1, above)
        worker.wait_lost(0, above)
    hub.wait_linked(1, above)
    assert not hub.transport._links[1].ended.is_set()  # type: ignore[attr-defined]


def test_links_that_come_and_go_leave_no_file_open() -> None:
    def come_and_go(times: int) -> int:
        """Open files afterwards."""
        ranks = Ranks()
        hub = ranks.watch(0, [1])
        above = -1
        for _ in range(times):
            worker = ranks.watch(1, [0])
            above = hub.wait_linked(1, above)
            worker.wait_linked(0)
            worker.transport.close()
            hub.wait_lost(1, above)
        ranks.close()
        for thread in threading.enumerate():
            if thread.name.startswith("offbeat"):
                thread.join()
        return len(os.listdir("/proc/self/fd"))

    assert come_and_go(10) == come_and_go(1)


def test_every_link_that_was_joined_is_lost_once_even_if_the_hub_closes_while_others_connect() -> None:
    for round_ in range(8):
        ranks = Ranks()
        seen: dict[TcpTransport, list[TransportEvent]] = {}
        threads = []
        for rank in range(4):
            transport = ranks.open(rank, [1, 2, 3] if rank == 0 else [0])
            seen[transport] = []
            threads.append(threading.Thread(target=collect, args=(transport, seen[transport])))
            threads[-1].start()
        hub = ranks.transports[0]
        while round_ >= 4 and sum(isinstance(item, PeerJoined) for item in seen[hub]) < round_ - 4:
            threads[0].join(0.001)
        closing = [threading.Thread(target=transport.close) for transport in ranks.transports]
        for thread in closing if round_ % 2 else closing[:1]:
            thread.start()
        closing[0].join()
        ranks.close()
        for thread in threads:
            thread.join()
        for transport, items in seen.items():
            items.extend(left_over(transport))
            joined = [(item.peer, item.incarnation) for item in items if isinstance(item, PeerJoined)]
            lost = [(item.peer, item.incarnation) for item in items if isinstance(item, PeerLost)]
            assert sorted(joined) == sorted(lost)
            assert len(set(joined)) == len(joined)


def collect(transport: TcpTransport, into: list[TransportEvent]) -> None:
    while (item := transport.receive()) is not None:
        into.append(item)


def left_over(transport: TcpTransport) -> Iterator[TransportEvent]:
    """Events that were not received before it was closed."""
    while transport.has_received:
        item = transport._inbox.get()
        if callable(item):
            yield item(0.0)


@dataclass(frozen=True)
class Unwritable(Message):
    what: int


def test_a_message_that_cannot_be_encoded_raises_at_its_sender(ranks: Ranks) -> None:
    hub, worker = ranks.watch(0, [1]), ranks.watch(1, [0])
    hub.wait_linked(1)
    worker.wait_linked(0)
    hub.send(1, Unwritable(object()))  # type: ignore[arg-type]
    with pytest.raises(ContractViolation, match="Unwritable cannot be sent"):
        hub.transport.receive(60)
    exchange(hub, worker)


def test_an_exception_in_a_thread_becomes_the_loss_of_its_link(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub, worker = ranks.watch(0, [1]), ranks.watch(1, [0])
    hub.wait_linked(1)
    worker.wait_linked(0)
    with monkeypatch.context() as broken:
        broken.setattr(ranks.transports[0].pool, "take", lambda nbytes: 1 / 0)
        worker.send(0, NumberedMessage(0, SMALL))
        lost = hub.wait_lost(1, 0)
        assert (lost.reason, lost.detail) == (LossReason.LOCAL, "ZeroDivisionError: division by zero")
    assert "internal error" in caplog.text
    worker.wait_lost(0, 0)
    assert hub.wait_linked(1, above=0) == worker.wait_linked(0, above=0)
    exchange(hub, worker)


# Shared memory


def shared_slots(transport: TcpTransport, peer: int) -> tuple[int, int]:
    """How many slots a link has to send from, and how many to receive from."""
    shared = transport._links[peer]._shared
    return len(shared._own._slots) if shared._own else 0, len(shared._peer._slots) if shared._peer else 0


def test_processes_of_one_machine_share_memory(ranks: Ranks) -> None:
    hub = ranks.watch(0, [1])
    ranks.spawn("echo", 1)
    hub.wait_linked(1)
    in_place = 0
    for number in range(30):
        hub.send(1, NumberedMessage(number, torch.full((1_000_000,), float(number)), (SMALL,)))
        back = hub.expect(1, number)
        assert back.body.eq(number).all()
        assert torch.equal(back.more[0], SMALL)
        peer_slots = ranks.transports[0]._links[1]._shared._peer
        assert peer_slots is not None
        in_place += back.body.data_ptr() in {memory.ctypes.data for memory in peer_slots._slots.values()}
    assert in_place > 0
    assert shared_slots(ranks.transports[0], 1)[0] > 0


@pytest.mark.slow
def test_tensors_of_a_dead_process_stay_valid(ranks: Ranks) -> None:
    hub = ranks.watch(0, [1])
    child = ranks.spawn("echo", 1)
    hub.wait_linked(1)
    for number in range(5):
        hub.send(1, NumberedMessage(number, torch.full((1_000_000,), float(number))))
        kept = hub.expect(1, number).body
    assert all(shared_slots(ranks.transports[0], 1))
    child.kill()
    hub.wait_lost(1, 0)
    assert kept.eq(4).all()
    ranks.spawn("echo", 1)
    hub.wait_linked(1, above=0)
    hub.send(1, NumberedMessage(9, kept))
    assert hub.expect(1, 9).body.eq(4).all()


def test_a_node_may_keep_more_than_there_are_slots(ranks: Ranks) -> None:
    hub, worker = ranks.watch(0, [1]), ranks.watch(1, [0])
    hub.wait_linked(1)
    worker.wait_linked(0)
    kept = []
    for number in range(40):
        hub.send(1, NumberedMessage(number, torch.full((100_000 + number,), float(number))))
        kept.append(worker.expect(0, number).body)
    assert shared_slots(ranks.transports[0], 1)[0] == SLOTS_MAX
    assert all(bool(body.eq(number).all()) for number, body in enumerate(kept))


@pytest.mark.parametrize("off", [0, 1])
def test_without_shared_memory_at_one_end_none_is_used(
    ranks: Ranks, off: int, caplog: pytest.LogCaptureFixture
) -> None:
    hub, worker = (ranks.watch(rank, [1 - rank], shared_memory=rank != off) for rank in range(2))
    hub.wait_linked(1)
    worker.wait_linked(0)
    for number in range(5):
        hub.send(1, NumberedMessage(number, torch.full((500_000,), float(number))))
        worker.send(0, worker.expect(0, number))
        assert hub.expect(1, number).body.eq(number).all()
    assert shared_slots(ranks.transports[0], 1) == shared_slots(ranks.transports[1], 0) == (0, 0)
    assert not caplog.records


def test_memory_that_cannot_be_shared_is_logged_once_and_costs_only_time(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shared_memory, "_warned", threading.Event())
    monkeypatch.setattr(shared_memory, "_open", refuse)
    hub, worker, other = ranks.watch(0, [1, 2]), ranks.watch(1, [0]), ranks.watch(2, [0])
    for one, peer in ((hub, 1), (hub, 2), (worker, 0), (other, 0)):
        one.wait_linked(peer)
    for number in range(3):
        for one in (worker, other):
            hub.send(one.rank, NumberedMessage(number, torch.full((500_000,), float(number))))
            assert one.expect(0, number).body.eq(number).all()
    (record,) = caplog.records
    assert record.message.startswith("offbeat: tensors between processes of this machine go through sockets")
    assert "Permission denied" in record.message


# Ending


@pytest.mark.parametrize(
    "role",
    [
        "careless",
        *(
            pytest.param(role, marks=pytest.mark.slow)
            for role in ("close-on-stopped", "careless-while-connecting", "close-while-connecting")
        ),
    ],
)
def test_a_process_ends_well(role: str) -> None:
    with start(role, 0, Address("127.0.0.1", 0), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=500)
    assert (process.returncode, out, err) == (0, "done\n", "")


def be_echo(rank: int, rendezvous: Address) -> None:
    """Send back what comes, until the hub is closed."""
    transport = TcpTransport(
        rank=rank,
        processes=4,
        peers=[0],
        rendezvous=rendezvous,
        credentials=CREDENTIALS,
        identity=IDENTITY,
        options=LinkOptions(silence_seconds=2.0),
    )
    while True:
        match transport.receive():
            case MessageArrived(source=source, incarnation=incarnation, message=message):
                transport.send(source, incarnation, message)
            case PeerLost(reason=LossReason.CLOSED):
                return


def be_flood(rank: int, rendezvous: Address) -> None:
    """Send 100 MB after 100 MB."""
    transport = TcpTransport(
        rank=rank, processes=4, peers=[0], rendezvous=rendezvous, credentials=CREDENTIALS, identity=IDENTITY
    )
    large = torch.ones(25_000_000)
    while True:
        match transport.receive():
            case PeerJoined(peer=peer, incarnation=incarnation):
                for number in range(100):
                    transport.send(peer, incarnation, NumberedMessage(number, large))


def hub_with_echo() -> tuple[TcpTransport, subprocess.Popen[str], int]:
    listener = Listener(Address("127.0.0.1", 0), CREDENTIALS)
    hub = TcpTransport(rank=0, processes=4, peers=[1], rendezvous=listener, credentials=CREDENTIALS, identity=IDENTITY)
    child = start("echo", 1, listener.address)
    while not isinstance(item := hub.receive(), PeerJoined):
        pass
    return hub, child, item.incarnation


def be_close_on_stopped(rank: int, rendezvous: Address) -> None:
    """Close while the other end of a link is stopped, with messages in transit in both directions."""
    hub, child, incarnation = hub_with_echo()
    for number in range(20):
        hub.send(1, incarnation, NumberedMessage(number, torch.ones(2_000_000)))
    while not isinstance(hub.receive(), MessageArrived):
        pass
    stop(child)
    hub.close(linger_seconds=0.3)
    child.kill()
    child.communicate()
    print("done")


def be_careless(rank: int, rendezvous: Address) -> None:
    """Exit without closing while messages are in transit."""
    hub, _, incarnation = hub_with_echo()
    for number in range(500):
        hub.send(1, incarnation, NumberedMessage(number, torch.ones(10_000)))
    while not isinstance(hub.receive(), MessageArrived):
        pass
    print("done")


def be_careless_while_connecting(rank: int, rendezvous: Address) -> None:
    """Exit without closing while nothing answers."""
    listener = Listener(Address("127.0.0.1", 0), CREDENTIALS)
    worker = TcpTransport(
        rank=1, processes=4, peers=[0, 2], rendezvous=listener.address, credentials=CREDENTIALS, identity=IDENTITY
    )
    assert worker.receive(0.3) is None
    listener.close()
    print("done")


def be_close_while_connecting(rank: int, rendezvous: Address) -> None:
    """Close and exit while a thread has agreed to a link whose other end does not go on."""
    accepted, over = threading.Event(), threading.Event()

    def handle(connection: ControlConnection) -> bool:
        connection.recv(CallRequest)
        connection.send(Assignment(1, 2, 0.0, None))
        connection.recv(LinkRequest)
        connection.send(LinkAccepted(0))
        accepted.set()
        over.wait()
        return False

    listener = Listener(Address("127.0.0.1", 0), CREDENTIALS)
    listener.serve(handle)
    worker = TcpTransport(
        rank=1, processes=2, peers=[0], rendezvous=listener.address, credentials=CREDENTIALS, identity=IDENTITY
    )
    accepted.wait()
    while not worker._connecting:
        pass
    worker.close(0.5)
    assert not worker._connecting
    print("done")


ROLES: dict[str, Callable[[int, Address], None]] = {
    "echo": be_echo,
    "flood": be_flood,
    "close-on-stopped": be_close_on_stopped,
    "careless": be_careless,
    "careless-while-connecting": be_careless_while_connecting,
    "close-while-connecting": be_close_while_connecting,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] in ("echo", "flood"):
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    ROLES[sys.argv[1]](int(sys.argv[2]), Address.parse(sys.argv[3]))
