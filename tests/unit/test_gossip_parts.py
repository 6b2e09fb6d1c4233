"""Parts of gossip on small numbers: replica arithmetic, schedule, matchmaker, membership, tree; and refused input."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import offbeat as ob
from offbeat.cli import main
from offbeat.core.randomness import restore, state_of, stream
from offbeat.records.files import read_run
from offbeat.strategies.gossip.exchange_schedule import ExchangeSchedule, Matchmaker
from offbeat.strategies.gossip.gossip_messages import Average, PartialSum, ReduceStart
from offbeat.strategies.gossip.membership_view import MembershipView, linked_ranks
from offbeat.strategies.gossip.replica import Replica
from offbeat.strategies.gossip.tree_reduce import TreeReduce, children, parents
from offbeat.strategies.node_state import Stateful

FLOATS = torch.tensor([1.0, 3.0])
COUNTER = torch.tensor([5])


def replica(*values: float, accelerated: bool = True) -> Replica:
    return Replica(torch.tensor(values), (FLOATS, COUNTER), accelerated=accelerated)


# Arithmetic


def test_mixing_equals_mixing_of_two_copies() -> None:
    mine = replica(1.0, 2.0)
    assert mine.acid_offset is not None
    mine.acid_offset.copy_(torch.tensor([4.0, -2.0]))
    x, other, kept = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 0.0]), 0.3
    mine.mix(kept)
    torch.testing.assert_close(mine.parameters, 0.5 * ((1 + kept) * x + (1 - kept) * other))
    torch.testing.assert_close(mine.parameters + mine.acid_offset, 0.5 * ((1 - kept) * x + (1 + kept) * other))


def test_exchanges_between_mixings_are_those_of_two_copies() -> None:
    """Steps, mixings, offers and answers in random order, against x and x̃ as two vectors in float64."""
    random = stream(0, "test")
    mine = replica(1.0, -2.0, 3.0)
    x = mine.parameters.double()
    other = x.clone()
    for turn in range(400):
        what = int(random.integers(4))
        vector = torch.from_numpy(random.standard_normal(3)).float()
        decay = float(random.choice([1.0, 0.9, 0.3, 1e-5, 0.0], p=[0.1, 0.4, 0.3, 0.1, 0.1]))
        mine.mix(decay)
        mean, half = (x + other) / 2, (other - x) / 2 * decay
        x, other = mean - half, mean + half
        if what == 0:
            mine.parameters.add_(vector)  # an optimizer step
            x, other = x + vector, other + vector
        elif what == 1:
            result = mine.respond(vector, mine.buffers, alpha_tilde=0.9)
            assert result is not None
            difference = vector - x
            torch.testing.assert_close(result.difference.double(), difference, rtol=1e-4, atol=1e-4)
            x, other = x + 0.5 * difference, other + 0.9 * difference
        elif what == 2:
            mine.complete(vector, mine.buffers, alpha_tilde=0.9)
            x, other = x - 0.5 * vector, other - 0.9 * vector
        else:
            torch.testing.assert_close(mine.snapshot()[0].double(), x, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.mean_of_copies()[0].double(), (x + other) / 2, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.observed().double(), x, rtol=1e-4, atol=1e-4)
        offset = mine.observed_offset()
        assert offset is not None
        torch.testing.assert_close(offset.double(), other - x, rtol=1e-4, atol=1e-4)
        if turn % 100 == 99:
            mine.reset(vector, mine.buffers)
            x = other = vector.double()


def test_mixing_alone_changes_no_vector() -> None:
    mine = replica(1.0, 2.0)
    mine.complete(torch.tensor([1.0, 1.0]), mine.buffers, alpha_tilde=0.9)
    before = mine._parameters.clone(), mine._offset.clone() if mine._offset is not None else None
    mine.mix(0.5)
    assert torch.equal(mine._parameters, before[0])
    assert mine._offset is not None
    assert before[1] is not None
    assert torch.equal(mine._offset, before[1])
    assert not torch.equal(mine.observed(), before[0])


def test_both_ends_of_an_exchange_apply_their_share_of_one_difference() -> None:
    mine, theirs = replica(0.0, 10.0), replica(4.0, 2.0)
    offered, buffers = theirs.snapshot()
    result = mine.respond(offered, buffers, alpha_tilde=0.9)
    assert result is not None
    assert result.difference.tolist() == [4.0, -8.0]
    assert result.distance == pytest.approx(80.0)
    theirs.parameters.add_(1.0)  # an optimizer step between offer and answer
    theirs.complete(result.difference, result.buffers, alpha_tilde=0.9)
    assert mine.parameters.tolist() == [2.0, 6.0]
    assert theirs.parameters.tolist() == [3.0, 7.0]
    assert mine.acid_offset is not None
    assert theirs.acid_offset is not None
    torch.testing.assert_close(mine.acid_offset, torch.tensor([1.6, -3.2]))
    torch.testing.assert_close(theirs.acid_offset, -mine.acid_offset)


def test_statistics_are_averaged_and_of_counters_the_maximum_is_taken() -> None:
    mine, theirs = replica(0.0), Replica(torch.zeros(1), (FLOATS + 2, COUNTER + 4), accelerated=False)
    result = mine.respond(*theirs.snapshot(), alpha_tilde=0.5)
    assert result is not None
    theirs.complete(result.difference, result.buffers, alpha_tilde=0.5)
    for one in (mine, theirs):
        assert [buffer.tolist() for buffer in one.buffers] == [[2.0, 4.0], [9]]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_values_that_are_not_finite_are_not_averaged(broken: float) -> None:
    mine = replica(1.0, 2.0)
    assert mine.respond(torch.tensor([0.0, broken]), (FLOATS, COUNTER), 0.7) is None
    assert mine.respond(torch.zeros(2), (torch.tensor([broken, 0.0]), COUNTER), 0.7) is None
    assert mine.parameters.tolist() == [1.0, 2.0]
    assert mine.buffers[0].tolist() == FLOATS.tolist()


def test_variances_stay_positive_however_late_an_answer_arrives() -> None:
    """Running variances fall from 1 to 0.1, on one end before the other."""
    mine, theirs = replica(0.0, 0.0), replica(0.0, 0.0)
    for one, variance in ((mine, 0.1), (theirs, 1.0)):
        one.buffers[0].fill_(variance)
    result = mine.respond(*theirs.snapshot(), alpha_tilde=0.5)
    assert result is not None
    theirs.buffers[0].fill_(0.1)  # a gradient between offer and answer
    theirs.complete(result.difference, result.buffers, alpha_tilde=0.5)
    assert theirs.buffers[0].tolist() == pytest.approx([0.1, 0.1])
    mine.buffers[0].fill_(0.05)
    mine.add_buffer_changes((torch.full((2,), 1.0), COUNTER), (torch.full((2,), 0.9), COUNTER))
    assert mine.buffers[0].tolist() == pytest.approx([0.05, 0.05])


def test_buffer_changes_of_a_computation_are_added_to_the_current_buffers() -> None:
    mine = replica(0.0)
    mine.buffers[0].add_(10.0)  # an exchange during the computation
    mine.add_buffer_changes((FLOATS, COUNTER), (FLOATS + 0.5, COUNTER + 1))
    assert [buffer.tolist() for buffer in mine.buffers] == [[11.5, 13.5], [6]]


# Schedule, matchmaker and membership


def test_a_regular_clock_spreads_exchanges_over_the_gradient() -> None:
    exchange_schedule = ExchangeSchedule(ob.parts.Regular(), 2.0, stream(0, "test"))
    assert exchange_schedule.seconds_to_next(0.0, 10.0) is None, "no gradient has been measured yet"
    due = []
    for gradient in range(1, 6):
        exchange_schedule.gradient_done(at=10.0 * gradient)
        while (seconds := exchange_schedule.seconds_to_next(10.0 * gradient, 10.0)) is not None:
            due.append(10.0 * gradient + seconds)
            exchange_schedule.advance()
    assert len(due) == 10
    assert {round(late - early, 6) for early, late in itertools.pairwise(due)} == {5.0}


def test_exchanges_left_over_from_a_short_gradient_are_due_at_once() -> None:
    exchange_schedule = ExchangeSchedule(ob.parts.Regular(), 1.0, stream(0, "test"))
    exchange_schedule.gradient_done(at=10.0)
    exchange_schedule.gradient_done(at=11.0)
    assert exchange_schedule.seconds_to_next(11.0, 10.0) == 0.0


def test_the_matchmaker_pairs_the_first_waiting_neighbour() -> None:
    matchmaker = Matchmaker()
    edges = {(0, 1), (1, 2), (2, 3), (0, 3)}

    def may_average(a: int, b: int) -> bool:
        return (min(a, b), max(a, b)) in edges

    assert matchmaker.add(0, may_average) is None
    assert matchmaker.add(2, may_average) is None
    assert matchmaker.add(2, may_average) is None, "a second request has no effect"
    assert matchmaker.add(1, may_average) == (1, 0, 1)
    assert matchmaker.add(3, may_average) == (2, 2, 3)
    assert matchmaker.add(0, may_average) is None
    matchmaker.remove(0)
    assert matchmaker.add(1, may_average) is None


def test_the_membership_view_has_the_remaining_graph() -> None:
    members = MembershipView(0, 6, ob.graphs.Cycle(), 1.0)
    for rank in range(1, 6):
        members.add(rank, 0)
    assert sorted(members.neighbours) == [1, 5]
    whole = members.constants
    members.remove(3)
    assert members.constants.chi1 > whole.chi1, "a path mixes more slowly than a cycle"
    members.remove(5)
    assert members.unreachable == [4]
    assert members.neighbours == (1,)
    assert members.root == 0


def test_with_many_peers_only_the_lowest_ranks_are_linked_to_all_others() -> None:
    assert linked_ranks(ob.graphs.Cycle(), 3, 40) == [rank for rank in range(40) if rank != 3]
    assert linked_ranks(ob.graphs.Cycle(), 30, 40) == [*range(16), 29, 31]
    members = MembershipView(30, 40, ob.graphs.Cycle(), 1.0)
    for rank in linked_ranks(ob.graphs.Cycle(), 30, 40):
        members.add(rank, 0)
    assert len(members.topology.members) == 40
    members.set_member_list([rank for rank in range(40) if rank != 35])
    assert 35 not in members.topology.members


# Global averages


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 40])
@pytest.mark.parametrize("direct", [False, True])
def test_every_partial_sum_reaches_the_root_over_existing_links(size: int, direct: bool) -> None:
    members = tuple(range(2, 2 + size))
    up = parents(members, direct)
    assert set(up) == set(members) - {2}
    for rank in up:
        path = [rank]
        while path[-1] != 2:
            assert up[path[-1]] in linked_ranks(ob.graphs.Cycle(), path[-1], 2 + size) or up[path[-1]] < 16
            path.append(up[path[-1]])
            assert len(path) <= size
    assert sum(len(children(rank, members, direct)) for rank in members) == size - 1


def test_a_tree_reduce_gives_the_mean_unless_a_part_is_an_earlier_result() -> None:
    tree_reduce = TreeReduce.create(0, 0, ReduceStart(1, True, (0, 1, 2), False))
    tree_reduce.contribute((torch.tensor([1.0]), (FLOATS, COUNTER)), version=4)
    assert not tree_reduce.complete
    two = PartialSum(torch.tensor([8.0]), (2 * FLOATS, COUNTER + 2), 0, 1, 2, 7, (0, 0, 0), False)
    tree_reduce.add(1, two)
    tree_reduce.add(2, PartialSum(torch.empty(0), (), 0, 1, 0, 0, (0, 0, 0), False))
    mean = tree_reduce.mean()
    assert tree_reduce.complete
    assert mean is not None
    assert mean[0].tolist() == [3.0]
    assert [buffer.tolist() for buffer in mean[1]] == [[1.0, 3.0], [7]]
    assert tree_reduce.version == 7
    earlier = PartialSum(torch.tensor([9.0]), (FLOATS, COUNTER), 0, 1, 1, 5, (0, 0, 0), True)
    tree_reduce.add(2, earlier)
    restored = TreeReduce.create(0, 0, tree_reduce.start)
    restored.restore(tree_reduce.state())
    mean = restored.mean()
    assert mean is not None
    assert (mean[0].tolist(), restored.version, restored.is_earlier_result) == ([9.0], 5, True)


def test_messages_and_generators_survive_a_checkpoint() -> None:
    average = Average(FLOATS, (COUNTER,), 0, 3, True, (0, 2), False, 8, (1, 2, 3))

    class HoldsResult(Stateful):
        result: Average | None = None

    holder, again = HoldsResult(), HoldsResult()
    holder.result = average
    again.restore(holder.state())
    restored = again.result
    assert restored is not None
    assert (restored.members, restored.counts, restored.version) == ((0, 2), (1, 2, 3), 8)
    assert torch.equal(restored.parameters, FLOATS)
    random, other = stream(0, "a"), stream(1, "b")
    random.integers(10)
    restore(other, state_of(random))
    assert random.random() == other.random()


# Refused input


def test_momentum_is_refused_for_a_complete_graph_by_type_and_not_by_shape() -> None:
    with pytest.raises(ob.ConfigurationError, match="nothing to gain on a complete graph"):
        ob.GossipAcid(graph=ob.graphs.Complete())
    assert ob.GossipAcid(graph=ob.graphs.Cycle()).processes(3) == 3


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--momentum", "0.9"], "the optimizer's is --optimizer.momentum 0.9"),
        (["--graph", "complete", "--acid"], "nothing to gain on a complete graph"),
        (["--graph", "exponential", "--workers", "6"], "4 or 8"),
        (["--graph", "cylce"], "cycle"),
        (["--partner", "matchings", "--workers", "5"], "an even number of them, such as 4 or 6"),
        (["--rate", "0"], "must be greater than 0"),
    ],
)
def test_bad_input_gets_one_sentence(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "quadratic", "gossip", *argv]) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(("flag", "momentum"), [("--acid", ob.parts.Acid()), ("--no-acid", None)])
def test_acid_has_a_flag_of_its_own(flag: str, momentum: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "quadratic", "gossip-acid", flag, "--until", "500", "--no-report", "--out", "runs"]) == 0
    experiment = read_run(tmp_path / "runs/gossip-acid-seed0").header.experiment
    assert experiment is not None
    assert (experiment["strategy"].get("momentum", "none") != "none") == (momentum is not None)
