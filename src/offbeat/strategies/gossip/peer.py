"""A peer: trains a replica of its own, averages with its neighbours underneath, and starts and ends with the others.

    gathering   until all expected have joined, or patience ends; then a global average, so that all begin alike
    training    a gradient → a step of its own → the next; exchanges go on meanwhile (`averaging.py`)
    ending      somebody has counted enough samples: nothing changes any more, and a global average is made
    holding     it is there; once everybody has it, Stop → Stopped → Finish

Here is the training. How peers begin and who is there is in `together.py`, averages over all and the end in
`agreement.py`. The lowest rank that is alive, the root, calls for these; where it dies, the next goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from offbeat.core.actions import Action, Cancel, Compute, Report, Samples, Send
from offbeat.core.events import (
    Evaluated,
    Event,
    GradientReady,
    Leave,
    MessageArrived,
    PeerJoined,
    PeerLost,
    Started,
    StepReady,
    TimerFired,
)
from offbeat.core.messages import Buffers, packed, unpacked
from offbeat.core.strategy import NodeContext, State
from offbeat.errors import ConfigurationError
from offbeat.records.schema import Contribution, Dropped, Reason, Update
from offbeat.strategies.gossip.averaging import TIMER
from offbeat.strategies.gossip.gossip_messages import (
    Answer,
    Average,
    Declined,
    Offer,
    Paired,
    PartialSum,
    Ready,
    SampleCounts,
)
from offbeat.strategies.gossip.gossip_parts import GossipBase
from offbeat.strategies.gossip.membership import MembershipNode
from offbeat.strategies.gossip.termination import ENDING, HOLDING, TRAINING
from offbeat.strategies.gossip.tree_reduce import TreeReduce

TALLIES = 100
"""How often in a run a peer tells the root of its samples."""


class Peer(MembershipNode):
    def __init__(self, config: GossipBase, context: NodeContext) -> None:
        super().__init__(config, context)
        optimizer = config.optimizer
        self._stepper = None if optimizer is None else optimizer.build(self._replica.parameters, context.layout)
        self._before: Buffers = ()
        """Buffers as they were when the computation began that is under way."""
        self._nonfinite_in_a_row = 0
        self._tallied = 0
        """Samples of its own that the root has been told of directly."""

    # Events

    def handle(self, event: Event) -> Iterable[Action]:
        if self._finished:
            return ()
        match event:
            case MessageArrived():
                return self._message(event)
            case GradientReady() | StepReady():
                return self._computed(event)
            case TimerFired(name=name) if name == TIMER:
                return self._averaging.beat(event.at)
            case TimerFired(name="until"):
                return self._end(event.at)
            case TimerFired(name="gather"):
                return self._patience_over(event.at)
            case TimerFired(name="meet"):
                self._to_meet.clear()
                return self._meet(event.at)
            case Evaluated():
                return self._evaluated(event)
            case PeerJoined():
                return self._joined(event)
            case PeerLost():
                return self._lost(event)
            case Leave():
                return self._leave(event)
            case Started():
                return self._start(event.at)
            case _:
                return ()

    def _message(self, event: MessageArrived) -> Iterator[Action]:
        message, at, source = event.message, event.at, event.source
        counts = getattr(message, "counts", None)
        if counts is not None:
            self._view.count(counts)
        match message:
            case Offer():
                yield from self._averaging.offered(event)
            case Answer() | Declined():
                yield from self._averaging.answered(event)
                yield from self._settled(at)
            case Ready():
                yield from self._averaging.ready(at, source)
            case Paired():
                yield from self._averaging.paired(at, message)
            case _:
                yield from self._message_to_all(event)
        if self._phase == TRAINING and self._has_enough():
            yield from self._end(at)

    # Training

    def _train(self, at: float) -> Iterator[Action]:
        if self._view.leads:
            yield from self._evaluate(at)
        yield from self._compute(at)

    def _compute(self, at: float) -> Iterator[Action]:
        if self._phase != TRAINING or self._computing or self._through or self._leaving:
            return
        self._averaging.mix(at)
        self._computing = True
        replica = self._replica
        self._before = tuple(buffer.clone() for buffer in replica.buffers)
        budget, microbatch = Samples(self._config.batch), self._config.microbatch
        yield Compute(replica.parameters, replica.buffers, self._version, self._draw, budget, microbatch)

    def _computed(self, event: GradientReady | StepReady) -> Iterator[Action]:
        self._computing = False
        if self._phase != TRAINING or self._through or self._leaving:
            yield from self._drop(event, "stopped")
            yield from self._settled(event.at)
            return
        self._draw = event.draws[1]
        if event.finite and event.samples:
            self._nonfinite_in_a_row = 0
            yield from self._update(event)
        elif not event.finite:
            yield from self._drop(event, "nonfinite")
            self._nonfinite_in_a_row += 1
        if self._nonfinite_in_a_row >= self._config.nonfinite_max:
            yield from self._give_up(
                f"peer {self._rank} computed {self._config.nonfinite_max} gradients in a row that were not finite; "
                "lower the learning rate, clip the gradient (clip_norm), or look at that peer's data"
            )
        elif self._has_enough():
            yield from self._end(event.at)
        else:
            yield from self._compute(event.at)
            yield from self._averaging.gradient(event.at, event.seconds)

    def _update(self, event: GradientReady | StepReady) -> Iterator[Action]:
        self._averaging.mix(event.at)
        before = self._view.samples
        self._view.counts[self._rank] += event.samples
        rate = 0.0
        if isinstance(event, StepReady):
            self._replica.parameters.add_(event.delta)
        else:
            if self._stepper is None:
                raise ConfigurationError(
                    "gossip has no optimizer; give it one, for example offbeat.Gossip(optimizer=offbeat.SGD(lr=0.1))"
                )
            rate = self._stepper.step(event.gradient.div_(event.samples), before)
        self._replica.absorb(self._before, event.buffers)
        self._version += 1
        yield Report(
            Update(
                at=event.at,
                rank=self._rank,
                version=self._version,
                messages=1,
                samples=event.samples,
                samples_total=before + event.samples,
                learning_rate=rate,
                contributions=(Contribution(self._rank, *event.draws, 0),),
            )
        )
        if self._view.leads:
            if self._evaluations.due(event.at, self._version):
                yield from self._evaluate(event.at)
        else:
            yield from self._tally()

    def _tally(self) -> Iterator[Action]:
        """Tell the root how far it is, a hundred times in a run: exchanges alone spread the news too slowly."""
        until, mine = self._setup.until, self._view.counts[self._rank]
        if isinstance(until, Samples) and mine - self._tallied >= until.count / (TALLIES * self._view.size):
            self._tallied = mine
            yield Send(self._root, SampleCounts(self._view.told_counts), supersedes="tally")

    def _drop(self, event: GradientReady | StepReady, reason: Reason) -> Iterator[Action]:
        first, stop = event.draws
        if stop > first:
            yield Report(Dropped(at=event.at, rank=self._rank, first=first, stop=stop, staleness=0, reason=reason))

    def _has_enough(self) -> bool:
        until = self._setup.until
        samples_max = until.count if isinstance(until, Samples) else getattr(until, "samples_max", None)
        return samples_max is not None and self._view.samples >= samples_max

    # Evaluate

    def _evaluate(self, at: float) -> Iterator[Action]:
        """The lowest rank measures its own replica on the way, and the average in the end."""
        if self._evaluations.has_new(self._version):
            values = self._replica.snapshot()
            yield from self._evaluations.begin(at, self._version, self._view.samples, values)

    def _evaluated(self, event: Evaluated) -> Iterator[Action]:
        yield from self._evaluations.report(event)
        yield from self._finish_if_done(event.at)

    def _leave(self, event: Leave) -> Iterator[Action]:
        if self._phase in (ENDING, HOLDING) or self._leaving or (self._through and event.stay):
            return
        if event.stay and self._phase == TRAINING:
            self._through = True
            if self._computing:
                yield Cancel()
            yield from self._say_through(event.at)
            return
        self._leaving = True
        self._averaging.end()
        if self._computing:
            yield Cancel()
        yield from self._settled(event.at)

    def replica(self) -> Tensor:
        return self._replica.parameters

    # State

    def state(self) -> State:
        acid_offset = self._replica.acid_offset
        return {
            "parameters": self._replica.parameters.clone(),
            "acid_offset": None if acid_offset is None else acid_offset.clone(),
            "buffers": [buffer.clone() for buffer in self._replica.buffers],
            "before": [buffer.clone() for buffer in self._before],
            "optimizer": None if self._stepper is None else self._stepper.state(),
            "averaging": self._averaging.state(),
            "live": {str(rank): incarnation for rank, incarnation in self._view.live.items()},
            "absent": sorted(self._view.absent),
            "counts": list(self._view.counts),
            "tree_reduce": None if self._reduce is None else self._reduce.state(),
            "early": [[source, packed(part)] for source, part in self._early],
            "result": None if self._result is None else packed(self._result),
            "heard": list(self._heard),
            "evaluations": self._evaluations.state(),
            "sets": {name: sorted(getattr(self, f"_{name}")) for name in _SETS},
            "plain": {name: getattr(self, f"_{name}") for name in _PLAIN},
            "warned_of": list(self._warned_of),
        }

    def restore(self, state: State) -> None:
        replica = self._replica
        replica.parameters.copy_(state["parameters"])
        if replica.acid_offset is not None:
            replica.acid_offset.copy_(state["acid_offset"])
        replica.buffers = tuple(state["buffers"])
        self._before = tuple(state["before"])
        if self._stepper is not None:
            self._stepper.restore(state["optimizer"])
        self._averaging.restore(state["averaging"])
        for rank, incarnation in state["live"].items():
            self._view.joined(int(rank), incarnation)
        self._view.absent = frozenset(state["absent"])
        self._view.counts = list(state["counts"])
        if state["tree_reduce"] is not None:
            self._reduce = TreeReduce.restored(self._rank, state["tree_reduce"])
        self._early = [(source, unpacked(PartialSum, part)) for source, part in state["early"]]
        self._result = None if state["result"] is None else unpacked(Average, state["result"])
        root, incarnation, number = state["heard"]
        self._heard = (root, incarnation, number)
        self._evaluations.restore(state["evaluations"])
        for name in _SETS:
            setattr(self, f"_{name}", set(state["sets"][name]))
        for name in _PLAIN:
            setattr(self, f"_{name}", state["plain"][name])
        self._warned_of = list(state["warned_of"])


_SETS = ("sources", "awaiting", "unstopped", "throughs", "to_meet")
_PLAIN = (
    "version",
    "draw",
    "phase",
    "began_at",
    "computing",
    "nonfinite_in_a_row",
    "through",
    "leaving",
    "patient",
    "met_beginners",
    "tallied",
    "source",
    "fresh",
    "root",
    "round",
    "owes_have",
    "stopping",
    "told_to_stop",
    "finished",
)
"""Fields of a peer's state that are plain values."""
