"""The node of a gossip peer: it owns the parts, and lets the table of transitions decide what each event does.

The phases are in `phases.py`, the table is in `transitions.py`. Training is in `peer_training.py`, exchanges in
`averaging.py`, membership and start in `peer_membership.py`, global averages in `global_averages.py`, and the end of a
run in `termination.py`. The lowest live rank, the root, starts global averages and the end; the next one takes over
when it is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from offbeat.core.actions import Action
from offbeat.core.events import Event, MessageArrived
from offbeat.core.strategy import Node, NodeContext, State
from offbeat.errors import RunFailed
from offbeat.strategies.evaluations import Evaluations
from offbeat.strategies.gossip.averaging import Averaging
from offbeat.strategies.gossip.global_averages import GlobalAverages
from offbeat.strategies.gossip.gossip_parts import GossipBase
from offbeat.strategies.gossip.membership_view import MembershipView
from offbeat.strategies.gossip.peer_checks import check_peer_message
from offbeat.strategies.gossip.peer_membership import PeerMembership
from offbeat.strategies.gossip.peer_training import PeerTraining
from offbeat.strategies.gossip.phases import Phase, Signal, Trigger, Unhandled, trigger_of
from offbeat.strategies.gossip.replica import Replica
from offbeat.strategies.gossip.termination import Termination
from offbeat.strategies.gossip.transitions import HANDLER_PARTS, TRANSITIONS
from offbeat.strategies.message_kinds import unexpected
from offbeat.strategies.node_state import Stateful


class Peer(Stateful, Node):
    """The node of every rank of a gossip run."""

    _phase: Phase = Phase.GATHERING
    _view: MembershipView
    _replica: Replica
    _evaluations: Evaluations
    _averaging: Averaging
    _training: PeerTraining
    _rounds: GlobalAverages
    _termination: Termination
    _membership: PeerMembership

    def __init__(self, config: GossipBase, context: NodeContext) -> None:
        size = max(context.members) + 1
        config.processes(size)  # raises if the graph does not exist at this size
        expected, patience = frozenset(context.members) - {context.rank}, config.patience_seconds
        self._view = view = MembershipView(context.rank, size, config.graph, config.rate)
        self._replica = replica = Replica(
            context.parameters,
            context.buffers,
            accelerated=config.momentum is not None,
            statistics=context.layout.statistics,
            compression=config.compression,
        )
        self._evaluations = evaluations = Evaluations(context.rank, context.evaluate)
        self._averaging = averaging = Averaging(config, view, replica, context.random)
        self._training = training = PeerTraining(config, context, view, replica, averaging, evaluations)
        self._rounds = rounds = GlobalAverages(view, replica, averaging, training, context.random)
        self._termination = Termination(view, expected, patience, training, rounds, evaluations)
        self._membership = PeerMembership(view, expected, patience, rounds, self._termination)
        parts = (averaging, training, rounds, self._termination, self._membership, evaluations)
        self._parts: dict[type[Stateful], Stateful] = {type(part): part for part in parts}

    def replica(self) -> Tensor:
        return self._replica.observed()

    def extra_state(self) -> State:
        offset = self._replica.observed_offset()
        return {} if offset is None else {"acid_offset": offset}

    def load_extra_state(self, state: State) -> None:
        if self._replica.acid_offset is not None and "acid_offset" in state:
            self._replica.acid_offset.copy_(state["acid_offset"])

    def handle(self, event: Event) -> Iterable[Action]:
        if self._phase is Phase.FINISHED:
            return ()
        trigger = trigger_of(event)
        if isinstance(event, MessageArrived):
            if trigger is None:
                raise unexpected(event, self._view.rank)
            check_peer_message(event, self._view, self._replica)
            return self._message_arrived(trigger, event)
        return () if trigger is None else self._perform(trigger, event)

    def _message_arrived(self, trigger: Trigger, event: MessageArrived) -> Iterator[Action]:
        counts = getattr(event.message, "counts", None)
        if counts is not None:
            self._view.merge_counts(counts)
        yield from self._perform(trigger, event)
        if self._phase is Phase.TRAINING and self._training.is_goal_reached():
            yield from self._perform(Trigger.GOAL, Signal(Trigger.GOAL, event.at))

    def _perform(self, trigger: Trigger, occurrence: Event | Signal) -> Iterator[Action]:
        """Make the transition of the table, and those of the signals that its handlers return."""
        entry = TRANSITIONS.get(trigger, {}).get(self._phase, Unhandled.IMPOSSIBLE)
        if entry is Unhandled.IMPOSSIBLE:
            raise RunFailed(
                f"internal error: peer {self._view.rank} met {trigger.name} in phase {self._phase.value}, for which "
                "it has no transition; please report it"
            )
        if entry is Unhandled.IGNORED:
            return
        self._phase = entry.phase
        for handler in entry.handlers:
            for step in handler(self._parts[HANDLER_PARTS[handler]], occurrence):
                if isinstance(step, Signal):
                    yield from self._perform(step.trigger, step)
                else:
                    yield step
