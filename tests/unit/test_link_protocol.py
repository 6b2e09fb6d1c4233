"""The state machine of a link: two of them, and a wire that delays what they send."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.messages import Message
from offbeat.transports.link_protocol import WINDOW, LinkProtocol, Outgoing
from offbeat.transports.wire import GOODBYE, HEARTBEAT, WireError

SILENCE_SECONDS = 8.0


@dataclass(frozen=True)
class Numbered(Message):
    number: int


class End:
    """One end, what is on its way from it, and what its user has received and not yet received."""

    def __init__(self) -> None:
        self.protocol = LinkProtocol(SILENCE_SECONDS, 0.0)
        self.wire: deque[tuple[int | Numbered, int]] = deque()
        self.inbox: deque[Numbered] = deque()
        self.received: list[int] = []
        self.sent = 0

    def post(self, number: int, key: str | None = None) -> None:
        self.protocol.post(Outgoing(key, Numbered(number)))

    def send(self, now: float) -> bool:
        step = self.protocol.next_step(now)
        if step is None:
            return False
        what: int | Numbered
        if isinstance(step, Outgoing):
            assert isinstance(step.message, Numbered)
            what = step.message
            self.protocol.count_message()
            self.sent += 1
        else:
            what = step
        self.wire.append((what, self.protocol.acknowledged_with(now)))
        return True

    def take(self, other: End) -> bool:
        """Receive the next thing that the other end has sent."""
        if not other.wire:
            return False
        assert not self.protocol.goodbye_received, "nothing follows a goodbye"
        what, acknowledged = other.wire.popleft()
        self.protocol.on_acknowledgement(acknowledged)
        if what == GOODBYE:
            self.protocol.on_goodbye()
        elif isinstance(what, Numbered):
            self.inbox.append(what)
        return True

    def deliver(self) -> bool:
        if not self.inbox:
            return False
        self.received.append(self.inbox.popleft().number)
        self.protocol.deliver()
        return True


ACTIONS = st.lists(st.tuples(st.sampled_from("psrd"), st.booleans()), max_size=200)


@given(ACTIONS)
def test_messages_arrive_in_order_within_the_window_and_goodbyes_end_it(actions: list[tuple[str, bool]]) -> None:
    ends = [End(), End()]
    posted = [0, 0]
    for action, second in actions:
        end, other = (ends[1], ends[0]) if second else (ends[0], ends[1])
        if action == "p":
            end.post(posted[second])
            posted[second] += 1
        elif action == "s":
            end.send(0.0)
        elif action == "r":
            end.take(other)
        else:
            end.deliver()
        assert end.sent - len(other.received) <= WINDOW
    ends[0].protocol.finish()
    for _ in range(1000):
        moved = [
            step
            for end, other in zip(ends, ends[::-1], strict=True)
            for step in (end.send(0.0), end.take(other), end.deliver())
        ]
        if not any(moved):
            break
    for end, other, count in zip(ends, ends[::-1], posted, strict=True):
        assert end.protocol.goodbye_sent
        assert end.protocol.goodbye_received
        assert other.received == list(range(len(other.received)))
        if end is ends[0]:
            assert len(other.received) == count, "what was queued before finish() arrives"


def test_a_full_window_is_opened_by_a_heartbeat() -> None:
    one, other = End(), End()
    for number in range(WINDOW + 1):
        one.post(number)
    while one.send(0.0):
        pass
    assert one.sent == WINDOW
    while other.take(one):
        pass
    assert not other.send(0.0), "what was not delivered is not acknowledged"
    while other.deliver():
        pass
    assert other.send(0.0)
    assert other.wire[0][0] == HEARTBEAT
    assert not other.send(0.0)
    one.take(other)
    assert one.send(0.0)
    assert one.sent == WINDOW + 1


def test_a_heartbeat_follows_a_quarter_of_the_silence_limit_without_any_other_head() -> None:
    end = End()
    assert not end.send(1.9)
    assert end.send(2.0)
    assert end.wire[-1][0] == HEARTBEAT
    assert end.protocol.seconds_to_heartbeat(2.5) == 1.5
    end.post(0)
    assert end.send(3.0)
    assert not end.send(4.9)
    assert end.send(5.0)


def test_a_queued_message_is_replaced_by_one_with_the_same_key() -> None:
    end = End()
    for number, key in ((0, None), (1, "a"), (2, "b"), (3, "a"), (4, None)):
        end.post(number, key)
    assert [end.send(0.0) for _ in range(WINDOW)] == [True] * WINDOW
    assert [what.number for what, _ in end.wire if isinstance(what, Numbered)] == [0, 3, 2]


def test_after_a_goodbye_nothing_is_queued_and_what_was_queued_is_discarded() -> None:
    end = End()
    for number in range(10):
        end.post(number)
    end.protocol.on_goodbye()
    end.post(99)
    assert end.send(0.0)
    assert [what for what, _ in end.wire] == [GOODBYE]
    assert not end.send(100.0)


@pytest.mark.parametrize("count", [-1, 2, 1 << 63])
def test_an_acknowledgement_of_messages_that_were_never_sent_is_refused(count: int) -> None:
    end = End()
    end.post(0)
    end.send(0.0)
    with pytest.raises(WireError, match=f"the peer acknowledges {count} messages, but 1 were sent"):
        end.protocol.on_acknowledgement(count)


def test_an_acknowledgement_may_not_be_taken_back() -> None:
    end = End()
    end.post(0)
    end.send(0.0)
    end.protocol.on_acknowledgement(1)
    with pytest.raises(WireError):
        end.protocol.on_acknowledgement(0)
