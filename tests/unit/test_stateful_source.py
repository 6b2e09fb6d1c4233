"""Loaders with a state as sources of micro-batches: any lost sample is drawn again, at the same position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import offbeat as ob
from offbeat.core.loader_states import STATE_BYTES_MAX, STATES_MAX, LoaderState, add_state, state_at
from offbeat.core.splits import Shared
from offbeat.live.batch_sources import BatchSource, IterableSource
from offbeat.live.stateful_source import StatefulSource, loader_source
from stateful_loaders import BufferedLoader, ShuffledLoader

HUB = ob.AsyncFixed(optimizer=ob.SGD(lr=0.1))


def source_of(loader: Any, refuses: bool = True) -> StatefulSource:
    return StatefulSource(loader, refuses, lambda text: pytest.fail(text))


def draw_round(
    source: BatchSource, draw: int, samples: int, microbatch: int, loader: LoaderState | None = None
) -> tuple[list[int], LoaderState | None]:
    """The samples of one round, and the state that is reported with it."""
    source.begin_round(draw, loader)
    drawn: list[int] = []
    while len(drawn) < samples:
        taken = source.take(draw + len(drawn), min(microbatch, samples - len(drawn)))
        assert taken is not None
        drawn += taken[0].tolist()
    return drawn, source.end_round()


def samples_of_rounds(source: BatchSource, rounds: int, samples: int) -> tuple[list[int], list[LoaderState]]:
    """The samples of several rounds in turn, and the states that a hub keeps of them."""
    drawn: list[int] = []
    states: list[LoaderState] = []
    for _ in range(rounds):
        more, state = draw_round(source, len(drawn), samples, 3)
        drawn += more
        if state is not None:
            add_state(states, state)
    return drawn, states


@given(
    size=st.integers(3, 30),
    batch=st.integers(1, 8),
    samples=st.integers(1, 12),
    data=st.data(),
)
def test_a_new_process_continues_at_any_position_with_the_samples_that_the_lost_one_had(
    size: int, batch: int, samples: int, data: st.DataObject
) -> None:
    drawn, states = samples_of_rounds(source_of(ShuffledLoader(size, batch)), 12, samples)
    rounds_back = data.draw(st.integers(0, 11))
    draw = rounds_back * samples + data.draw(st.integers(0, samples - 1))
    state = state_at(states, draw)
    if state is None:  # nothing has arrived at the hub: the new process begins anew
        assert draw < samples
        return
    again, _ = draw_round(source_of(ShuffledLoader(size, batch, seed=1)), draw, samples, 2, state)
    limit = state.draw // size * size + size  # the order of the next pass is drawn anew
    expected = drawn[draw : min(draw + samples, limit)]
    assert again[: len(expected)] == expected


@given(size=st.integers(3, 20), batch=st.integers(1, 6), samples=st.integers(1, 9))
def test_every_pass_has_every_sample_once(size: int, batch: int, samples: int) -> None:
    drawn, _ = samples_of_rounds(source_of(ShuffledLoader(size, batch)), 15, samples)
    for first in range(0, len(drawn) - size + 1, size):
        assert sorted(drawn[first : first + size]) == list(range(size))


def test_a_worker_whose_hub_goes_back_draws_again_what_it_has_drawn() -> None:
    source = source_of(ShuffledLoader(50, 8))
    drawn, states = samples_of_rounds(source, 4, 10)
    again, _ = draw_round(source, 15, 10, 4, state_at(states, 15))
    assert again == drawn[15:25]
    from_the_start, _ = draw_round(source, 0, 20, 4)  # nothing has arrived: its own initial state
    assert from_the_start == drawn[:20]


def test_samples_that_the_hub_has_already_are_skipped() -> None:
    source = source_of(ShuffledLoader(50, 8))
    drawn, _ = samples_of_rounds(source_of(ShuffledLoader(50, 8)), 5, 10)
    draw_round(source, 0, 5, 5)
    later, _ = draw_round(source, 17, 10, 5)
    assert later == drawn[17:27]


def test_a_state_is_reported_at_or_before_the_end_of_each_round() -> None:
    source = source_of(ShuffledLoader(40, 8))
    for draw in range(0, 96, 12):
        _, state = draw_round(source, draw, 12, 6)
        assert state is not None
        assert draw <= state.draw <= draw + 12


def test_a_round_within_one_batch_of_the_loader_needs_no_state() -> None:
    source = source_of(ShuffledLoader(40, 40))
    states = [draw_round(source, draw, 8, 8)[1] for draw in (0, 8, 16)]
    assert [state is None for state in states] == [False, True, True]


def test_a_shuffle_buffer_is_refused_where_each_sample_must_be_applied_exactly_once() -> None:
    source = source_of(BufferedLoader(40, 4))
    with pytest.raises(ob.ConfigurationError, match="exactly once: from its state it continued with another batch"):
        source.begin_round(0, None)


def test_a_shuffle_buffer_is_counted_otherwise_and_a_notice_says_so() -> None:
    notices: list[str] = []
    source = StatefulSource(BufferedLoader(40, 4), False, notices.append)
    drawn, states = samples_of_rounds(source, 10, 8)
    assert states == []
    assert len(drawn) == 80
    assert [text.split(":")[0] for text in notices] == [
        "samples of the BufferedLoader are counted, but lost ones are not repeated"
    ]


def test_a_loader_is_tried_without_a_change_of_random_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    source_of(ShuffledLoader(40, 4)).begin_round(0, None)
    assert torch.equal(torch.rand(4), expected)


class Odd(ShuffledLoader):
    def state_dict(self) -> dict[str, Any]:
        return {"order": {1, 2}}


class Large(ShuffledLoader):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "memory": bytes(STATE_BYTES_MAX)}


class Picky(ShuffledLoader):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("num_workers is 2, but was 1")


class Unready(ShuffledLoader):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not yet")


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (Unready(9, 3), "its state cannot be saved, RuntimeError: not yet"),
        (Picky(9, 3), "it does not take its own state, AssertionError: num_workers is 2, but was 1"),
    ],
    ids=["unready", "picky"],
)
def test_a_loader_whose_state_fails_is_counted_with_a_notice_and_refused_where_exactness_is_asked_for(
    loader: ShuffledLoader, reason: str
) -> None:
    notices: list[str] = []
    drawn, states = samples_of_rounds(StatefulSource(loader, False, notices.append), 3, 6)
    assert (len(drawn), states) == (18, [])
    assert reason in notices[0]
    with pytest.raises(ob.ConfigurationError, match=reason):
        source_of(loader).begin_round(0, None)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [(Odd(9, 3), "its state cannot be saved, .* is a set"), (Large(9, 3), "bytes, and 1,048,576 are the most")],
    ids=["odd", "large"],
)
def test_a_state_that_cannot_be_kept_is_refused_with_the_reason(loader: ShuffledLoader, reason: str) -> None:
    with pytest.raises(ob.ConfigurationError, match=reason):
        source_of(loader).begin_round(0, None)


def test_a_loader_that_was_changed_since_does_not_take_its_state_and_one_sentence_says_so() -> None:
    _, states = samples_of_rounds(source_of(ShuffledLoader(20, 4)), 2, 8)
    with pytest.raises(ob.ConfigurationError, match=r"does not take the state it had at sample 16 .*num_workers is 2"):
        source_of(Picky(20, 4)).begin_round(16, states[-1])


def test_a_new_process_for_which_the_hub_has_no_state_counts_samples_alone() -> None:
    notices: list[str] = []
    source = StatefulSource(ShuffledLoader(20, 4), False, notices.append)
    source.begin_round(8, None)
    assert "its hub has no state of it" in notices[0]
    with pytest.raises(ob.ConfigurationError, match="its hub has no state of it"):
        source_of(ShuffledLoader(20, 4)).begin_round(8, None)


def source_for(data: Any, exactly_once: bool | None, strategy: ob.Strategy = HUB) -> BatchSource:
    return loader_source(data, Shared(), exactly_once=exactly_once, strategy=strategy, notice=pytest.fail)


@pytest.mark.parametrize(
    ("data", "strategy", "sentence"),
    [
        (DataLoader(TensorDataset(torch.ones(4))), HUB, "DataLoader has no state_dict; take torchdata's"),
        (iter([torch.ones(4)]), HUB, "has no state_dict"),
        (ShuffledLoader(4, 2), ob.Gossip(), "a hub that keeps the states of loaders, and gossip has none"),
    ],
    ids=["DataLoader", "iterator", "no hub"],
)
def test_exactly_once_is_refused_where_it_cannot_be_kept(data: Any, strategy: ob.Strategy, sentence: str) -> None:
    with pytest.raises(ob.ConfigurationError, match=sentence):
        source_for(data, True, strategy)
    assert type(source_for(data, None, strategy)) is IterableSource


def test_a_state_is_not_saved_where_samples_are_only_counted() -> None:
    assert type(source_for(ShuffledLoader(4, 2), False)) is IterableSource
    assert type(source_for(ShuffledLoader(4, 2), None)) is StatefulSource


def test_each_pass_tells_a_distributed_sampler_its_number() -> None:
    data = TensorDataset(torch.arange(24))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, 0, seed=1))
    source = IterableSource(loader)
    passes = [[index for _ in range(3) for index in source.take(0, 4)[0][0].tolist()] for _ in range(2)]
    assert passes[0] != passes[1]
    expected = []
    for epoch in range(2):
        sampler = DistributedSampler(data, 2, 0, seed=1)
        sampler.set_epoch(epoch)
        expected.append(list(sampler))
    assert passes == expected


def test_of_many_states_the_first_and_the_newest_are_kept() -> None:
    states: list[LoaderState] = []
    for draw in range(1000):
        add_state(states, LoaderState(draw, torch.zeros(1, dtype=torch.uint8)))
        assert len(states) <= STATES_MAX
        assert states[0].draw == 0
        assert states[-1].draw == draw
    assert [state.draw for state in states] == sorted({state.draw for state in states})
    assert state_at(states, 990) is not None
    assert state_at(states[1:], 0) is None
