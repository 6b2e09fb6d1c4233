"""The table of transitions of a gossip peer: complete, forward only, and every change of phase in it happens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch

import offbeat as ob
from offbeat.core.actions import Action, Cancel, Compute, Finish, Report
from offbeat.core.events import Event, GradientReady, Leave, LossReason, MessageArrived, PeerJoined, PeerLost, Started
from offbeat.core.messages import Message
from offbeat.errors import RunFailed
from offbeat.lab.simulated_runs import one_thread
from offbeat.records.files import MemoryWriter
from offbeat.records.schema import Membership
from offbeat.simulation.simulator import Simulation
from offbeat.strategies.gossip.gossip_messages import Average, CopyReply, Offer, Paired, PartialSum, ReduceStart, Status
from offbeat.strategies.gossip.peer import Peer
from offbeat.strategies.gossip.phases import Phase, Signal, Transition, Trigger, Unhandled
from offbeat.strategies.gossip.transitions import HANDLER_PARTS, TRANSITIONS
from offbeat.testing import draw_case

CASES = (150, 85, 243, 293, 202, *range(1000))
"""Seeds of random cases; the first five contain every change, unless the cases have changed."""

Change = tuple[Phase, Trigger]


def peer(rank: int = 1, peers: int = 3) -> Peer:
    experiment = ob.Experiment(
        strategy=ob.Gossip(batch=8, optimizer=ob.SGD(lr=0.1)),
        workload=ob.workloads.Quadratic(dimension=4).build(),
        cluster=ob.Cluster(),
        workers=peers,
        until=ob.Samples(1000),
        seed=0,
        evaluate=None,
    )
    node = Simulation(experiment, MemoryWriter()).processes[rank].node
    assert isinstance(node, Peer)
    return node


def changes() -> set[Change]:
    """Entries of the table that change the phase."""
    return {
        (phase, trigger)
        for trigger, row in TRANSITIONS.items()
        for phase, entry in row.items()
        if isinstance(entry, Transition) and entry.phase is not phase
    }


# The table


def test_every_trigger_has_an_entry_in_every_phase() -> None:
    assert TRANSITIONS.keys() == set(Trigger)
    for trigger, row in TRANSITIONS.items():
        assert row.keys() == set(Phase), trigger
        assert all(isinstance(entry, Transition | Unhandled) for entry in row.values()), trigger
        for entry in row.values():
            if isinstance(entry, Transition):
                assert entry.handlers, trigger
                assert set(entry.handlers) <= HANDLER_PARTS.keys(), trigger


def test_phases_only_follow_each_other_forward_and_a_finished_peer_does_nothing() -> None:
    order = list(Phase)
    for trigger, row in TRANSITIONS.items():
        assert not isinstance(row[Phase.FINISHED], Transition), trigger
        for phase, entry in row.items():
            if isinstance(entry, Transition):
                assert order.index(entry.phase) >= order.index(phase), trigger


def test_a_trigger_without_a_transition_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "internal error: peer 1 met END in phase gathering, for which it has no transition; please report it"
    with pytest.raises(RunFailed, match=sentence):
        list(peer()._perform(Trigger.END, Signal(Trigger.END, 0.0)))
    monkeypatch.delitem(TRANSITIONS, Trigger.GOAL)
    with pytest.raises(RunFailed, match="internal error: peer 1 met GOAL in phase gathering"):
        list(peer()._perform(Trigger.GOAL, Signal(Trigger.GOAL, 0.0)))


# Every change of phase happens


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[Change]:
    """The changes of phase of all peers, as they happen."""
    happened: set[Change] = set()
    perform = Peer._perform

    def observed(self: Peer, trigger: Trigger, occurrence: Event | Signal) -> Iterator[Action]:
        entry = TRANSITIONS[trigger][self._phase]
        if isinstance(entry, Transition) and entry.phase is not self._phase:
            happened.add((self._phase, trigger))
        yield from perform(self, trigger, occurrence)

    monkeypatch.setattr(Peer, "_perform", observed)
    return happened


def arrive(node: Peer, message: Message, source: int = 0) -> list[Action]:
    return list(node.handle(MessageArrived(1.0, source, message, lambda: message)))


def gathering(node: Peer) -> Peer:
    list(node.handle(Started(0.0)))
    for rank in range(node._view.size):
        if rank != node._view.rank:
            list(node.handle(PeerJoined(0.0, rank, 0)))
    return node


def training(node: Peer) -> Peer:
    gathering(node)
    arrive(node, Status(training=True))
    actions = arrive(node, CopyReply(torch.zeros(4), (), (0, 0, 0), 1.0))
    assert any(isinstance(action, Compute) for action in actions)
    return node


def computed(node: Peer, samples: int = 8) -> list[Action]:
    return list(node.handle(GradientReady(2.0, torch.zeros(4), samples, 1.0, (), 0, (0, samples), 1.0, 0.0, True)))


def average(final: bool) -> Average:
    return Average(torch.ones(4), (), 0, 1, final, (0, 1, 2), True, 5, (0, 0, 0))


def leaves_while_gathering() -> None:
    (finish,) = gathering(peer()).handle(Leave(1.0))
    assert isinstance(finish, Finish)


def leaves_while_training() -> None:
    node = training(peer())
    assert list(node.handle(Leave(1.5))) == [Cancel()]
    assert isinstance(computed(node)[-1], Finish)


def leaves_while_ending() -> None:
    node = training(peer())
    list(node.handle(Leave(1.5)))
    arrive(node, ReduceStart(1, final=True, members=(0, 1, 2), direct=True))
    assert node._phase is Phase.ENDING
    assert isinstance(computed(node)[-1], Finish)


def leaves_while_complete() -> None:
    node = training(peer())
    list(node.handle(Leave(1.5)))
    arrive(node, average(final=True))
    assert node._phase is Phase.COMPLETE
    assert isinstance(computed(node)[-1], Finish)


def joins_when_all_have_the_result() -> None:
    node = gathering(peer())
    arrive(node, average(final=True))
    assert node._phase is Phase.COMPLETE


def ends_without_finite_parameters() -> None:
    node = peer(0, peers=1)
    list(node.handle(Started(0.0)))
    node._replica.parameters.fill_(math.inf)
    finish = computed(node, samples=1000)[-1]
    assert isinstance(finish, Finish)
    assert finish.failure is not None
    assert "no peer has finite parameters" in finish.failure


@pytest.mark.slow
def test_every_change_of_phase_in_the_table_happens(seen: set[Change]) -> None:
    """By hand what no simulation contains, such as a rank that leaves; all others in random cases."""
    leaves_while_gathering()
    leaves_while_training()
    leaves_while_ending()
    leaves_while_complete()
    joins_when_all_have_the_result()
    ends_without_finite_parameters()
    with one_thread():
        for seed in CASES:
            if seen == changes():
                break
            case = draw_case(ob.Gossip(), seed)
            settings = {"events_max": 100_000, "notice_seconds": case.notice_seconds}
            Simulation(case.experiment, MemoryWriter(), **settings).run()
    assert seen == changes()


# Memory


def partial_sum(reduce_round: int, root: int = 0) -> PartialSum:
    return PartialSum(torch.ones(4), (), root, reduce_round, 1, 1, (0,) * 24, False)


def test_partial_sums_that_come_before_their_round_are_kept_and_those_of_rounds_that_are_over_are_not() -> None:
    node = gathering(peer(rank=1, peers=24))
    arrive(node, partial_sum(50), source=3)
    assert len(node._rounds.early_sums) == 1, "the round may begin here later"
    members = tuple(range(24))
    arrive(node, ReduceStart(50, final=False, members=members, direct=False))
    assert node._rounds.early_sums == []
    assert node._rounds.tree_reduce is not None
    assert 3 not in node._rounds.tree_reduce.awaited
    arrive(node, ReduceStart(51, final=False, members=members, direct=True))
    first = Average(torch.ones(4), (), 0, 51, False, members, True, 1, (0,) * 24)
    arrive(node, first)
    assert node._phase is Phase.TRAINING
    for late in (50, 51):
        arrive(node, partial_sum(late), source=4)
    arrive(node, partial_sum(9, root=1), source=4)
    assert node._rounds.early_sums == []
    arrive(node, partial_sum(52), source=4)
    assert [part.round for _, part in node._rounds.early_sums] == [52]


def test_pairings_of_offers_are_kept_only_until_they_are_announced_or_training_ends() -> None:
    offer = Offer(torch.ones(4), (), 1, 7, (0, 0, 0))
    node = gathering(peer())
    arrive(node, offer, source=2)
    assert node._averaging.early_pairings == set(), "declined: this peer does not train yet"
    node = training(peer())
    arrive(node, offer, source=2)
    assert node._averaging.early_pairings == {7}
    arrive(node, Paired(7, partner=2, begins=False))
    assert node._averaging.early_pairings == set()
    arrive(node, dataclasses.replace(offer, pairing=8), source=2)
    arrive(node, ReduceStart(1, final=True, members=(0, 1, 2), direct=True))
    assert node._phase is Phase.ENDING
    assert node._averaging.early_pairings == set()
    arrive(node, dataclasses.replace(offer, pairing=9), source=2)
    assert node._averaging.early_pairings == set()


@pytest.mark.parametrize(
    ("phase", "reason", "is_recorded"),
    [
        (Phase.TRAINING, LossReason.CLOSED, True),
        (Phase.COMPLETE, LossReason.BROKEN, True),
        (Phase.COMPLETE, LossReason.CLOSED, False),
    ],
)
def test_a_peer_that_closes_its_link_when_all_hold_the_result_is_not_lost(
    phase: Phase, reason: LossReason, is_recorded: bool
) -> None:
    node = peer()
    list(node.handle(Started(0.0)))
    for rank in (0, 2):
        list(node.handle(PeerJoined(0.0, rank, 0)))
    node._phase = phase
    actions = list(node.handle(PeerLost(1.0, 2, 0, reason)))
    recorded = [action for action in actions if isinstance(action, Report) and isinstance(action.record, Membership)]
    assert bool(recorded) == is_recorded
    assert 2 not in node._view.live
