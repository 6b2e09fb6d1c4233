"""The rate limit of a link: when a token bucket lets a message leave, and the queue of a live rank in front of it."""

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
from offbeat.lab.experiment import Plan


@dataclass(frozen=True)
class Parcel(Message):
    values: Tensor
    number: int = 0


def parcel(to: int, nbytes: int, number: int = 0, key: str | None = None) -> Send:
    return Send(to, Parcel(torch.zeros(nbytes, dtype=torch.uint8), number), key)


def payload(message: Message) -> int:
    return sum(tensor.nbytes for tensor in message.tensors())


def outbox(rate: float = 100.0) -> RateLimitedOutbox:
    opened = RateLimitedOutbox(rate, payload)
    for peer in (1, 2):
        opened.open(peer, 0.0)
    return opened


def leave(limited: RateLimitedOutbox, peer: int, now: float) -> list[Any]:
    """The numbers of the messages that may leave now."""
    sends = iter(lambda: limited.take(peer, now), None)
    return [send.message.number for send in sends if isinstance(send.message, Parcel)]


def test_a_bucket_starts_empty_and_lets_messages_leave_as_it_fills() -> None:
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
    assert bucket.ready_at(1000, now=5.0) == 14.0, "one second's worth is there"
    assert bucket.ready_at(1000, now=9.0) == 14.0, "asking again costs nothing"
    assert bucket.ready_at(200, now=9.0) == 6.0, "a smaller one in its place could leave"
    bucket.consume(1000)
    assert bucket.ready_at(10, now=14.0) == 14.1, "the bucket is empty"


def test_a_bucket_whose_message_is_gone_does_not_go_on_filling() -> None:
    bucket = TokenBucket(100.0)
    assert bucket.ready_at(5000, now=0.0) == 50.0
    bucket.cancel()
    assert bucket.ready_at(300, now=40.0) == 42.0


@pytest.mark.parametrize("seed", range(5))
def test_never_more_than_the_limit_from_the_beginning_to_any_moment(seed: int) -> None:
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
    assert sent >= 1000.0 * (now - busy) * (1 - 1e-9), "whoever always has something to send gets all of it"


def test_what_waits_leaves_in_order_when_the_limit_allows_each_peer_on_its_own() -> None:
    paced = outbox()
    for number in range(3):
        paced.put(parcel(1, 50, number))
    paced.put(parcel(2, 25, 7))
    assert (leave(paced, 1, 0.0), paced.ready_at(1, 0.0), paced.ready_at(2, 0.0)) == ([], 0.5, 0.25)
    assert (leave(paced, 1, 1.0), leave(paced, 2, 1.0)) == ([0, 1], [7])
    assert (len(paced), paced.ready_at(2, 1.0), paced.empty_at(1.0)) == (1, None, 1.5)
    assert leave(paced, 1, 1.5) == [2]
    assert len(paced) == 0


def test_a_message_that_waits_is_superseded_in_its_place() -> None:
    paced = outbox()
    for number, key in enumerate(["newest", None, "newest"]):
        paced.put(parcel(1, 50, number, key))
    assert leave(paced, 1, 0.5) == [2]
    assert leave(paced, 1, 1.0) == [1]


def test_what_waits_for_a_peer_that_is_lost_is_gone_and_its_bucket_is_not_filled_twice() -> None:
    paced = outbox()
    paced.put(parcel(1, 50))
    assert leave(paced, 1, 0.5) == [0]
    paced.put(parcel(1, 1000))
    paced.lose(1)
    assert (len(paced), paced.ready_at(1, 0.5), leave(paced, 1, 99.0)) == (0, None, [])
    paced.open(1, 0.6)
    paced.put(parcel(1, 50, 3))
    assert leave(paced, 1, 0.9) == []
    assert leave(paced, 1, 1.0) == [3]


MAKERS: list[Callable[[Any], Any]] = [
    lambda wrong: ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(), bytes_per_second=wrong),
    lambda wrong: ob.train(ob.workloads.Quadratic(), ob.FixedMinibatch(), bytes_per_second=wrong),
    lambda wrong: ob.join(torch.nn.Linear(2, 2), ob.FixedMinibatch(), ob.Samples(9), bytes_per_second=wrong),
    lambda wrong: Plan(workload=ob.workloads.Quadratic(), strategies=(ob.FixedMinibatch(),), bytes_per_second=wrong),
]


@pytest.mark.parametrize("make", MAKERS, ids=["simulate", "train", "join", "plan"])
@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_limit_that_cannot_be_is_refused_with_one_sentence(make: Callable[[Any], Any], wrong: Any) -> None:
    with pytest.raises(ob.ConfigurationError, match=r"bytes_per_second, must be a number of 1 or more, such as 1e6"):
        make(wrong)


def test_a_word_is_no_rate_limit() -> None:
    with pytest.raises(ob.ConfigurationError, match=r"of 1 or more, such as 1e6, but is '1 MB'"):
        ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(), bytes_per_second="1 MB")  # type: ignore[arg-type]


def test_without_the_limit_everything_leaves_at_once_in_its_order() -> None:
    outbox = RateLimitedOutbox(1.0, lambda message: 1000)
    outbox.open(1, now=0.0)
    first, second = Send(1, Stopped(1, 1)), Send(1, Stopped(2, 2))
    outbox.put(first)
    outbox.put(second)
    assert outbox.take(1, now=5.0) is None
    outbox.is_lifted = True
    assert [outbox.take(1, now=5.0), outbox.take(1, now=5.0), outbox.take(1, now=5.0)] == [first, second, None]
