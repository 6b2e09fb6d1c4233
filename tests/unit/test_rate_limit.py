"""The rate limit of a link: when a token bucket admits a message, and the queue of a live rank in front of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import offbeat as ob
from offbeat.core.actions import Send
from offbeat.core.bandwidth import RateLimitedOutbox, TokenBucket
from offbeat.core.messages import Message, Stopped
from offbeat.core.wire_size import HEAD_BYTES
from offbeat.lab.experiment_plan import Plan


@dataclass(frozen=True)
class SizedMessage(Message):
    values: Tensor
    number: int = 0


def sized_send(to: int, nbytes: int, number: int = 0, key: str | None = None) -> Send:
    return Send(to, SizedMessage(torch.zeros(nbytes - HEAD_BYTES, dtype=torch.uint8), number), key)


def outbox(rate: float = 10_000.0) -> RateLimitedOutbox:
    limited = RateLimitedOutbox(rate)
    for peer in (1, 2):
        limited.open(peer, 0.0)
    return limited


def take_all(limited: RateLimitedOutbox, peer: int, now: float) -> list[Any]:
    """The numbers of the messages that may be sent now."""
    sends = iter(lambda: limited.take(peer, now), None)
    return [send.message.number for send in sends if isinstance(send.message, SizedMessage)]


def test_a_bucket_starts_empty_and_admits_messages_as_it_fills() -> None:
    bucket = TokenBucket(100.0)
    assert bucket.ready_at(50, now=0.0) == 0.5
    bucket.consume(50)
    assert bucket.ready_at(50, now=0.5) == 1.0


def test_a_bucket_holds_one_second_at_the_most() -> None:
    bucket = TokenBucket(100.0)
    assert bucket.ready_at(100, now=60.0) == 60.0
    bucket.consume(100)
    assert bucket.ready_at(100, now=60.0) == 61.0


def test_a_message_larger_than_the_bucket_waits_for_the_rest_and_no_longer() -> None:
    bucket = TokenBucket(100.0)
    assert bucket.ready_at(1000, now=5.0) == 14.0, "the bucket holds one second"
    assert bucket.ready_at(1000, now=9.0) == 14.0, "a second call changes nothing"
    assert bucket.ready_at(200, now=9.0) == 6.0, "a smaller one could be sent instead"
    bucket.consume(1000)
    assert bucket.ready_at(10, now=14.0) == 14.1, "the bucket is empty"


def test_a_bucket_stops_filling_when_its_message_is_cancelled() -> None:
    bucket = TokenBucket(100.0)
    assert bucket.ready_at(5000, now=0.0) == 50.0
    bucket.cancel()
    assert bucket.ready_at(300, now=40.0) == 42.0


@pytest.mark.parametrize("seed", range(5))
def test_the_limit_holds_from_the_beginning_to_any_moment(seed: int) -> None:
    random = np.random.default_rng(seed)
    bucket, now, sent, busy = TokenBucket(1000.0), 0.0, 0, 0.0
    for number in itertools.count():
        nbytes = int(random.integers(1, 3000))
        now = max(now, bucket.ready_at(nbytes, now))
        bucket.consume(nbytes)
        sent += nbytes
        assert sent <= 1000.0 * now * (1 + 1e-9)
        if number > 500:
            break
        idle = float(random.exponential(2.0)) if number % 50 == 0 else 0.0
        now, busy = now + idle, busy + idle
    assert sent >= 1000.0 * (now - busy) * (1 - 1e-9), "a sender that is never idle uses all of it"


def test_queued_messages_are_sent_in_order_with_a_limit_per_peer() -> None:
    limited = outbox()
    for number in range(3):
        limited.put(sized_send(1, 5000, number))
    limited.put(sized_send(2, 2500, 7))
    assert (take_all(limited, 1, 0.0), limited.ready_at(1, 0.0), limited.ready_at(2, 0.0)) == ([], 0.5, 0.25)
    assert (take_all(limited, 1, 1.0), take_all(limited, 2, 1.0)) == ([0, 1], [7])
    assert (len(limited), limited.ready_at(2, 1.0), limited.empty_at(1.0)) == (1, None, 1.5)
    assert take_all(limited, 1, 1.5) == [2]
    assert len(limited) == 0


def test_a_queued_message_is_superseded_in_its_place() -> None:
    limited = outbox()
    for number, key in enumerate(["newest", None, "newest"]):
        limited.put(sized_send(1, 5000, number, key))
    assert take_all(limited, 1, 0.5) == [2]
    assert take_all(limited, 1, 1.0) == [1]


def test_messages_to_a_lost_peer_are_discarded_and_its_bucket_is_not_filled_twice() -> None:
    limited = outbox()
    limited.put(sized_send(1, 5000))
    assert take_all(limited, 1, 0.5) == [0]
    limited.put(sized_send(1, 100_000))
    limited.lose(1)
    assert (len(limited), limited.ready_at(1, 0.5), take_all(limited, 1, 99.0)) == (0, None, [])
    limited.open(1, 0.6)
    limited.put(sized_send(1, 5000, 3))
    assert take_all(limited, 1, 0.9) == []
    assert take_all(limited, 1, 1.0) == [3]


MAKERS: list[Callable[[Any], Any]] = [
    lambda wrong: ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(), bytes_per_second=wrong),
    lambda wrong: ob.train(ob.workloads.Quadratic(), ob.FixedMinibatch(), bytes_per_second=wrong),
    lambda wrong: ob.join(torch.nn.Linear(2, 2), ob.FixedMinibatch(), ob.Samples(9), bytes_per_second=wrong),
    lambda wrong: Plan(workload=ob.workloads.Quadratic(), strategies=(ob.FixedMinibatch(),), bytes_per_second=wrong),
]


@pytest.mark.parametrize("make", MAKERS, ids=["simulate", "train", "join", "plan"])
@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_an_invalid_rate_limit_is_rejected_with_one_sentence(make: Callable[[Any], Any], wrong: Any) -> None:
    with pytest.raises(ob.ConfigurationError, match=r"bytes_per_second, must be a number of 1 or more, such as 1e6"):
        make(wrong)


def test_text_is_no_rate_limit() -> None:
    with pytest.raises(ob.ConfigurationError, match=r"of 1 or more, such as 1e6, but is '1 MB'"):
        ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(), bytes_per_second="1 MB")  # type: ignore[arg-type]


def test_without_the_limit_all_messages_are_sent_at_once_in_order() -> None:
    outbox = RateLimitedOutbox(1.0)
    outbox.open(1, now=0.0)
    first, second = Send(1, Stopped(1, 1)), Send(1, Stopped(2, 2))
    outbox.put(first)
    outbox.put(second)
    assert outbox.take(1, now=5.0) is None
    outbox.is_lifted = True
    assert [outbox.take(1, now=5.0), outbox.take(1, now=5.0), outbox.take(1, now=5.0)] == [first, second, None]
