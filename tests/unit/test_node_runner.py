"""The live engine without threads: a runner with a fake clock on the loopback, and its parts on their own."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from made_records import a_round
from torch import Tensor

import offbeat as ob
from offbeat.core.actions import Action, Cancel, ClearTimer, Compute, Finish, Report, Send, SetTimer
from offbeat.core.events import Event, GradientReady, LossReason, MessageArrived, PeerJoined, PeerLost, Sent, Started
from offbeat.core.events import TimerFired as Fired
from offbeat.core.messages import Message
from offbeat.core.strategy import Node
from offbeat.core.wire_size import wire_size
from offbeat.errors import InvalidMessage, RunFailed, UnexpectedMessage
from offbeat.live.clock import Clock
from offbeat.live.due_queue import DueQueue, OutboxDue, TimerDue
from offbeat.live.injected_delay import InjectedDelay
from offbeat.live.node_runner import NodeRunner
from offbeat.live.runner_options import RunnerOptions
from offbeat.records.files import MemoryWriter
from offbeat.records.schema import Notice, Round
from offbeat.testing.fake_clock_run import FakeClock
from offbeat.transports.loopback import Loopback
from offbeat.transports.remote_records import RecordLines, RemoteRecordWriter
from offbeat.transports.transport import QueuedTransport

Script = Callable[[Event], Iterable[Action]]


@dataclass(frozen=True)
class Letter(Message):
    values: Tensor
    number: int = 0


class ScriptedNode(Node):
    """Runs a script and keeps the events."""

    def __init__(self, script: Script = lambda event: ()) -> None:
        self._script = script
        self.events: list[Event] = []

    def handle(self, event: Event) -> Iterable[Action]:
        self.events.append(event)
        return self._script(event)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


class Pair:
    """Two runners on the loopback with one clock."""

    def __init__(self, *scripts: Script, writer: Any = None, **settings: Any) -> None:
        self.clock = FakeClock()
        self.loaded: list[Tensor] = []
        self.loopback = Loopback({0: [1], 1: [0]})
        self.transports = [self.loopback.transport(rank) for rank in (0, 1)]
        self.nodes = [ScriptedNode(script) for script in scripts]
        self.writers = [MemoryWriter(), MemoryWriter() if writer is None else writer]
        self.runners = [
            NodeRunner(
                self.nodes[rank],
                self.transports[rank],
                RunnerOptions(
                    rank=rank,
                    clock=self.clock,
                    writer=self.writers[rank],
                    is_peer=(1 - rank).__eq__,
                    load=lambda parameters, buffers: self.loaded.append(parameters),
                    **settings,
                ),
            )
            for rank in (0, 1)
        ]
        for runner in self.runners:
            runner.start(threaded=False)

    def settle(self, at: float | None = None) -> None:
        """Move the clock, and handle what is received and due until nothing is left."""
        self.clock.time = self.clock.time if at is None else at
        quiet = 0
        while quiet < 2:  # what is handled last may be due at once
            received = [transport.receive_now() for transport in self.transports]
            for runner, event in zip(self.runners, received, strict=True):
                runner.process(event)
            quiet = 0 if any(event is not None for event in received) else quiet + 1


def send_on_join(event: Event) -> Iterable[Action]:
    if isinstance(event, PeerJoined):
        yield Send(event.peer, Letter(torch.ones(4)), supersedes="letter")


def nothing(event: Event) -> Iterable[Action]:
    return ()


def test_events_of_the_transport_reach_the_node_with_the_time_of_the_run() -> None:
    pair = Pair(send_on_join, nothing)
    pair.settle(at=2.5)
    assert pair.nodes[0].kinds() == ["Started", "PeerJoined", "Sent"]
    assert pair.nodes[1].kinds() == ["Started", "PeerJoined", "MessageArrived"]
    arrived, sent = pair.nodes[1].events[-1], pair.nodes[0].events[-1]
    assert isinstance(arrived, MessageArrived)
    assert isinstance(sent, Sent)
    assert (arrived.at, arrived.source, sent.at, sent.key) == (2.5, 0, 2.5, "letter")
    assert sent.size is not None
    assert sent.size.nbytes == arrived.nbytes > 1024


def test_a_delayed_message_is_handled_when_it_is_due_and_before_the_loss_of_its_link() -> None:
    delay = InjectedDelay(links={0: ob.Link(latency_seconds=3.0)})
    pair = Pair(send_on_join, nothing, injected_delay=delay)
    pair.settle(at=1.0)
    pair.transports[0].close()
    pair.settle()
    assert pair.nodes[1].kinds() == ["Started", "PeerJoined"]
    assert pair.runners[1].next_due() == 4.0
    pair.settle(at=4.0)
    assert pair.nodes[1].kinds() == ["Started", "PeerJoined", "MessageArrived", "PeerLost"]
    lost = pair.nodes[1].events[-1]
    assert isinstance(lost, PeerLost)
    assert (lost.at, lost.reason) == (4.0, LossReason.CLOSED)


def test_a_timer_that_was_set_again_fires_once_and_a_cleared_one_never() -> None:
    def script(event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            yield SetTimer("again", 1.0)
            yield SetTimer("again", 2.0)
            yield SetTimer("cleared", 1.0)
            yield ClearTimer("cleared")

    pair = Pair(script, nothing)
    pair.settle(at=1.5)
    assert Fired not in map(type, pair.nodes[0].events)
    pair.settle(at=2.0)
    pair.settle(at=9.0)
    assert [event for event in pair.nodes[0].events if isinstance(event, Fired)] == [Fired(2.0, "again")]


def test_a_rate_limit_holds_messages_back_and_a_newer_one_replaces_a_queued_one() -> None:
    def script(event: Event) -> Iterable[Action]:
        if isinstance(event, PeerJoined):
            for number in range(3):
                yield Send(1, Letter(torch.zeros(256), number), supersedes="newest")

    pair = Pair(script, nothing, bytes_per_second=1024.0)
    pair.settle()
    assert pair.nodes[1].kinds() == ["Started", "PeerJoined"]
    assert pair.runners[0].next_due() == 2.0  # head and payload have 2,048 bytes
    pair.settle(at=2.0)
    arrived = [event.message for event in pair.nodes[1].events if isinstance(event, MessageArrived)]
    assert [letter.number for letter in arrived if isinstance(letter, Letter)] == [2]


def compute(samples: int) -> Compute:
    return Compute(torch.zeros(2), (), 5, 10, ob.Samples(samples), 4)


def test_a_round_carries_its_times_and_draws_and_an_empty_one_is_recorded_too() -> None:
    def script(event: Event) -> Iterable[Action]:
        if isinstance(event, Started | GradientReady):
            yield compute(8)
        if isinstance(event, GradientReady):
            yield Cancel()

    pair = Pair(script, nothing)
    assert len(pair.loaded) == 1
    first = pair.runners[0].round
    assert first is not None
    first.samples = 8
    pair.clock.time = 3.0
    pair.runners[0].complete(torch.ones(2), 4.0, (), True)
    second = pair.runners[0].round
    assert second is not None
    assert second.next_microbatch_size() == 0
    pair.runners[0].complete(torch.zeros(2), 0.0, (), True)
    rounds = [record for record in pair.writers[0].records if isinstance(record, Round)]
    assert [(each.start, each.seconds, each.samples, each.draws) for each in rounds] == [
        (0.0, 3.0, 8, (10, 18)),
        (3.0, 0.0, 0, (10, 10)),
    ]


def test_an_invalid_message_costs_its_link_and_does_not_end_the_rank() -> None:
    def refuse(event: Event) -> Iterable[Action]:
        if isinstance(event, MessageArrived):
            raise UnexpectedMessage(event.source, type(event.message).__name__, 1)
        return ()

    def send_two(event: Event) -> Iterable[Action]:
        if isinstance(event, PeerJoined):
            yield Send(1, Letter(torch.zeros(1)))
            yield Send(1, Letter(torch.zeros(1)))

    pair = Pair(send_two, refuse)
    pair.settle()
    runner = pair.runners[1]
    runner.write_last(runner.ended_record())
    notices = [record for record in pair.writers[1].records if isinstance(record, Notice)]
    assert [notice.text for notice in notices] == [
        "rank 0 sent Letter to rank 1, which does not expect it; give every rank the same strategy; its link is closed"
    ]
    assert not runner.ended
    assert pair.transports[1].linked == {}


def test_a_rank_with_three_invalid_messages_is_refused() -> None:
    def refuse(event: Event) -> Iterable[Action]:
        if isinstance(event, MessageArrived):
            raise InvalidMessage(event.source, type(event.message).__name__, 1, " with nonsense")
        return ()

    def send_two(event: Event) -> Iterable[Action]:
        if isinstance(event, PeerJoined):
            yield Send(1, Letter(torch.zeros(1)))
            yield Send(1, Letter(torch.zeros(1)))  # arrives over a link that is closed already, and does not count

    pair = Pair(send_two, refuse)
    finals: list[bool] = []
    disconnect = pair.transports[1].disconnect

    def watch(peer: int, incarnation: int, why: str, final: bool = False) -> None:
        finals.append(final)
        disconnect(peer, incarnation, why, final)
        if not final:
            pair.loopback._link(0, 1)  # it connects again

    pair.transports[1].disconnect = watch  # type: ignore[method-assign]
    pair.settle()
    assert finals == [False, False, True]
    pair.runners[1].write_last(pair.runners[1].ended_record())
    notices = [record.text for record in pair.writers[1].records if isinstance(record, Notice)]
    assert notices[2] == (
        "rank 0 sent Letter to rank 1 with nonsense; its link is closed, and after 3 such messages it is refused"
    )
    assert not pair.runners[1].ended


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (("{}",), "a line that is not a record"),
        (("nonsense",), "a line that is not a record"),
        (('{"record":"notice","at":1.0,"rank":2,"text":"not mine"}',), "records of another rank"),
        (("x" * (1 << 21),), "1 lines, the longest of 2097152 characters"),
        (("x",) * 1000, "1000 lines"),
        (('{"x":' + "[" * 20_000,), "a line that is not a record"),
    ],
)
def test_records_that_are_none_are_not_written(lines: tuple[str, ...], what: str) -> None:
    written: list[Any] = []
    pair = Pair(nothing, nothing)
    pair.settle()
    pair.runners[0]._records._on_remote_records = lambda rank, records: written.append(records)
    pair.transports[1].send(0, 0, RecordLines(lines))
    pair.settle()
    (notice,) = [record.text for record in pair.writers[0].records if isinstance(record, Notice)]
    assert f"rank 1 sent RecordLines to rank 0 with {what}" in notice
    assert written == []
    assert not pair.runners[0].ended


def test_records_from_before_the_clock_is_set_are_shifted_and_those_of_a_remote_rank_are_sent() -> None:
    def report(event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            yield Report(Notice(at=event.at, rank=1, text="early"))

    own = MemoryWriter()
    pair = Pair(nothing, report, writer=RemoteRecordWriter(own))
    received: list[Any] = []
    pair.runners[0]._records._on_remote_records = lambda rank, records: received.append((rank, records))
    pair.transports[1].elapsed_at_join = (1000.0, 0.0)
    assert own.records == []
    pair.settle(at=7.0)
    assert [record.at for record in own.records if isinstance(record, Notice)] == [993.0]
    ((rank, records),) = received
    assert rank == 1
    assert records[0].text == "early"
    sent = [event for event in pair.nodes[1].events if isinstance(event, Sent)]
    assert sent == [], "the node has sent nothing"


def test_a_checkpoint_is_read_after_the_records_that_wait_to_be_aggregated_are_written() -> None:
    def report(event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            for start in range(3):
                yield Report(a_round(0, float(start), 0.5))

    pair = Pair(report, nothing, records_max_bytes=1.0)
    records = pair.writers[0].records
    before = sum(record.rounds for record in records if isinstance(record, Round))
    seen: list[int] = []
    pair.runners[0].inspect(
        lambda node: seen.append(sum(record.rounds for record in records if isinstance(record, Round)))
    )
    assert before < 3
    assert seen == [3]


def test_a_node_that_fails_ends_its_runner_with_a_sentence() -> None:
    def fail(event: Event) -> Iterable[Action]:
        raise ZeroDivisionError("by zero")

    pair = Pair(fail, nothing)
    assert pair.runners[0].failure == "rank 0 failed: ZeroDivisionError: by zero"
    assert pair.runners[0].round is None


def test_a_finished_node_handles_no_further_event() -> None:
    def finish(event: Event) -> Iterable[Action]:
        yield Finish(torch.zeros(1), (), 0)

    pair = Pair(finish, send_on_join)
    pair.settle(at=1.0)
    assert pair.nodes[0].kinds() == ["Started"]


# The threads of links


class Line(QueuedTransport):
    """A transport whose links are the test."""

    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        self.deliver(functools.partial(Sent, to=to, key=key, incarnation=incarnation, size=wire_size(message)))

    def disconnect(self, peer: int, incarnation: int, why: str, final: bool = False) -> None:
        raise AssertionError(why)

    def close(self, linger_seconds: float = 5.0) -> None:
        self._closed = True
        self.wake()


class Lined:
    """A runner in real time on a `Line`, and a node whose events are numbered letters."""

    def __init__(self, script: Script = nothing) -> None:
        self.line, self.node, self.threads = Line(), ScriptedNode(self._handle), set[str]()
        self._script = script
        options = RunnerOptions(
            rank=0, clock=Clock(), writer=MemoryWriter(), is_peer=lambda rank: True, load=lambda *values: None
        )
        self.runner = NodeRunner(self.node, self.line, options)
        self.runner.start()
        for peer in range(1, LINKS + 1):
            self.line.put(functools.partial(PeerJoined, peer=peer, incarnation=0))
        self.wait_until(lambda: self.node.kinds().count("PeerJoined") == LINKS)

    def _handle(self, event: Event) -> Iterable[Action]:
        self.threads.add(threading.current_thread().name)
        return self._script(event)

    def letter(self, source: int, number: int) -> None:
        message = Letter(torch.zeros(1), number)
        self.line.deliver(
            functools.partial(
                MessageArrived, source=source, message=message, keep=lambda: message, incarnation=0, nbytes=4
            )
        )

    def numbers(self, source: int) -> list[int]:
        """Of the letters of a rank that the node has handled."""
        letters = [event for event in self.node.events if isinstance(event, MessageArrived)]
        return [one.message.number for one in letters if one.source == source and isinstance(one.message, Letter)]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until, self.runner.failure
            time.sleep(0.001)


LINKS = 3


@pytest.fixture
def lined() -> Iterator[Callable[..., Lined]]:
    made: list[Lined] = []

    def make(script: Script = nothing) -> Lined:
        made.append(Lined(script))
        return made[-1]

    yield make
    for one in made:
        one.runner.close()


def test_the_thread_of_a_link_handles_what_it_has_received(lined: Callable[..., Lined]) -> None:
    run = lined()
    run.threads.clear()
    run.letter(1, 0)
    assert run.numbers(1) == [0], "when it has returned"
    assert run.threads == {threading.current_thread().name}


def test_a_link_does_not_wait_for_the_lock_and_its_message_is_handled_when_the_lock_is_free(
    lined: Callable[..., Lined],
) -> None:
    run = lined()
    inspected, may_end = threading.Event(), threading.Event()

    def inspect(node: Node) -> None:
        inspected.set()
        may_end.wait(60)

    holder = threading.Thread(target=run.runner.inspect, args=(inspect,))
    holder.start()
    assert inspected.wait(60)
    run.letter(1, 0)
    assert run.numbers(1) == []
    may_end.set()
    run.wait_until(lambda: run.numbers(1) == [0])
    holder.join()


def test_a_message_is_handled_though_a_thread_that_only_waits_for_the_end_has_the_lock(
    lined: Callable[..., Lined],
) -> None:
    run = lined()
    with run.runner._monitor:  # as a waiting thread that was woken up and waits again
        link = threading.Thread(target=run.letter, args=(1, 0))
        link.start()
        link.join()
    run.wait_until(lambda: run.numbers(1) == [0])


def test_no_message_of_many_links_is_lost_or_overtaken_while_the_loop_computes(lined: Callable[..., Lined]) -> None:
    def answer(event: Event) -> Iterable[Action]:
        if isinstance(event, Started | GradientReady):
            yield compute(1)
        if isinstance(event, GradientReady):
            yield Send(1, Letter(torch.zeros(1)))
        if isinstance(event, MessageArrived):
            yield Send(event.source, Letter(torch.zeros(1)))

    run, count = lined(answer), 2000
    links = [
        threading.Thread(target=lambda peer=peer: [run.letter(peer, number) for number in range(count)])
        for peer in range(1, LINKS + 1)
    ]
    for link in links:
        link.start()
    rounds = 0
    while any(link.is_alive() for link in links) or rounds < 100:
        current = run.runner.next_round()
        assert current is not None, run.runner.failure
        current.samples = 1
        run.runner.complete(torch.zeros(2), 0.0, (), True)
        rounds += 1
    run.wait_until(lambda: run.node.kinds().count("Sent") == LINKS * count + rounds)
    assert [run.numbers(peer) for peer in range(1, LINKS + 1)] == [list(range(count))] * LINKS


def test_a_timer_that_a_message_sets_fires_without_another_event(lined: Callable[..., Lined]) -> None:
    def script(event: Event) -> Iterable[Action]:
        if isinstance(event, MessageArrived):
            yield SetTimer("soon", 0.01)

    run = lined(script)
    run.letter(1, 0)
    run.wait_until(lambda: run.node.kinds()[-1] == "TimerFired")


def test_an_error_that_a_link_reports_ends_the_runner(lined: Callable[..., Lined]) -> None:
    run = lined()
    run.line.deliver(RunFailed("rank 7 is not known"))
    assert run.runner.wait(60)
    assert run.runner.failure == "rank 7 is not known"


# The queue of what is due


def test_the_queue_returns_entries_in_the_order_of_time_and_replaces_unique_ones() -> None:
    queue = DueQueue()
    queue.put(3.0, TimerDue("a"))
    queue.put(1.0, OutboxDue(4))
    queue.put(2.0, TimerDue("a"))
    assert (queue.next_at(), queue.pop(0.5)) == (1.0, None)
    assert queue.pop(5.0) == OutboxDue(4)
    assert queue.pop(5.0) == TimerDue("a")
    assert (queue.pop(5.0), queue.next_at()) == (None, None)


def test_a_removed_entry_is_not_due_and_an_adjusted_clock_moves_all_others() -> None:
    queue = DueQueue()
    queue.put(1.0, TimerDue("a"))
    queue.put(2.0, TimerDue("b"))
    queue.remove(TimerDue("a"))
    queue.shift(10.0)
    assert queue.next_at() == 12.0
