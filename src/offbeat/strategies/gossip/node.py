"""A peer: trains a replica of its own, averages with its neighbours underneath, and starts and ends with the others.

    gathering   until all expected have joined, or patience ends; then a global average, so that all begin alike.
                Who comes late, or again, copies one that is training instead
    training    a gradient → a step of its own → the next; exchanges go on meanwhile (`averaging.py`)
    ending      somebody has counted enough samples: nothing changes any more, and a global average is made
    holding     it is there; once everybody has it, Stop → Stopped → Finish

The lowest rank that is alive, the root, calls for these averages; where it dies, the next goes on. Nobody finishes
before everybody holds the result, and whoever is asked again hands out the one it holds: so all that are connected
end with the same parameters, whoever dies on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

import torch

from offbeat.actions import (
    Action,
    Cancel,
    ClearTimer,
    Compute,
    Evaluate,
    Finish,
    Report,
    Samples,
    Seconds,
    Send,
    SetTimer,
)
from offbeat.errors import ConfigurationError
from offbeat.events import (
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
from offbeat.messages import Buffers, Stop, Stopped
from offbeat.records.schema import Contribution, Dropped, Evaluation, Membership, Notice, Reason, Update
from offbeat.strategies.gossip.assembly import Assembly, children
from offbeat.strategies.gossip.averaging import TIMER, Averaging
from offbeat.strategies.gossip.members import STEWARDS, Members
from offbeat.strategies.gossip.messages import (
    Answer,
    AskCopy,
    Average,
    Copied,
    Declined,
    Enough,
    Gather,
    Have,
    Offer,
    Paired,
    Part,
    Ready,
    Retry,
    Roster,
    Status,
    Tally,
    Through,
    packed,
    unpacked,
)
from offbeat.strategies.gossip.replica import Replica
from offbeat.strategies.strategy import EverySeconds, EveryUpdates, Node, Setup, State

if TYPE_CHECKING:
    from offbeat.strategies.gossip.named import Gossip

GATHERING, TRAINING, ENDING, HOLDING = "gathering", "training", "ending", "holding"
TALLIES = 100
"""How often in a run a peer tells the root of its samples."""
EVALUATIONS_MAX = 8
"""Evaluations under way at a time: each holds parameters of its own."""


class Peer(Node):
    def __init__(self, config: Gossip, setup: Setup) -> None:
        self._config = config
        self._setup = setup
        self._rank = setup.rank
        size = max(setup.members) + 1
        config.processes(size)  # refuses a size that the graph does not have
        self._expected = set(setup.members) - {setup.rank}

        self._replica = Replica(setup.parameters, setup.buffers, accelerated=config.momentum is not None)
        self._members = Members(setup.rank, size, config.graph, config.rate)
        self._averaging = Averaging(config, self._members, self._replica, setup.random)
        optimizer = config.optimizer
        self._stepper = None if optimizer is None else optimizer.build(self._replica.parameters, setup.layout)
        self._version = 0
        self._draw = 0
        self._tallied = 0
        """Samples of its own that the root has been told of directly."""

        self._phase = GATHERING
        self._began_at = 0.0
        self._computing = False
        self._before: Buffers = ()
        """Buffers as they were when the computation began that is under way."""
        self._nonfinite_in_a_row = 0
        self._through = False
        """Its own loop is over; it stays for the others."""
        self._leaving = False
        self._warned_of: list[int] = []
        self._evaluated_at = 0.0
        self._evaluated_version = -1
        self._evaluations: dict[int, tuple[float, int]] = {}
        """version → (when it was made, samples in it), of those that are being evaluated"""

        self._patient = True
        self._met_beginners = False
        """Whether others were about to begin as well: then it is a start, and not a return when all is over."""
        self._source: int | None = None
        """The one that this peer is about to copy."""
        self._sources: set[int] = set()
        self._fresh = False
        """It has nothing to contribute: it came when all was over."""
        self._root = setup.rank
        self._round = int(setup.random.integers(1 << 40))
        """The last round that this peer has called for, as root; none is called twice, not even in another life."""
        self._heard: tuple[int, int, int] = (-1, -1, -1)
        """root, its incarnation, and the last round that it called for"""
        self._assembly: Assembly | None = None
        self._early: list[tuple[int, Part]] = []
        """Parts of a round that this peer has not been called to yet."""
        self._result: Average | None = None
        self._awaiting: set[int] = set()
        """For the root: who does not hold the result yet, as far as it knows."""
        self._owes_have = False
        self._stopping = False
        self._unstopped: set[int] = set()
        self._told_to_stop = False
        self._throughs: set[int] = set()
        self._to_meet: set[int] = set()
        """For a root that knows less than the others: whom it should be linked to before it calls for the end."""
        self._finished = False

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
            self._members.count(counts)
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

    def _message_to_all(self, event: MessageArrived) -> Iterable[Action]:
        """What concerns the start, the end, and who is there."""
        message, at, source = event.message, event.at, event.source
        match message:
            case Gather():
                return self._gather(at, source, message)
            case Part():
                return self._part(at, source, cast(Part, event.keep()))
            case Average():
                return self._average(at, cast(Average, event.keep()))
            case Have(version=version):
                return self._have(at, source, version)
            case Retry(round=number):
                return self._retry(at, source, number)
            case Status(training=training):
                return self._status(source, training)
            case AskCopy():
                return self._copy(at, source)
            case Copied():
                return self._copied(at, message)
            case Enough(members=members):
                return self._told_enough(at, source, members)
            case Through():
                return self._told_through(at, source)
            case Roster(ranks=ranks):
                if source == self._root:
                    self._members.told(ranks)
                return ()
            case Stop(version=version):
                return self._told_stop(at, source, version)
            case Stopped():
                self._unstopped.discard(source)
                return self._finish_if_done(at)
            case _:
                return ()

    # Who is there

    def _start(self, at: float) -> Iterator[Action]:
        if self._phase == GATHERING and self._members.size == 1:
            yield from self._begin(at, 0.0)
        elif self._phase == GATHERING:
            self._forget_all()  # a checkpoint may know of some who have joined the process before
            yield SetTimer("gather", self._config.patience_seconds)
        else:
            yield from self._resume(at)

    def _resume(self, at: float) -> Iterator[Action]:
        """Go on from a checkpoint, in a process that knows nobody yet: whoever joins may copy."""
        self._forget_all()
        if self._phase == TRAINING:
            yield from self._set_until(at)
            yield from self._compute(at)
            yield from self._averaging.beat(at)
        else:
            self._to_meet = set(self._expected)
            yield SetTimer("meet", self._config.patience_seconds)
            yield from self._meet(at)

    def _forget_all(self) -> None:
        self._members.live.clear()
        self._averaging.forget_all()
        self._root, self._computing, self._evaluations = self._rank, False, {}
        self._awaiting, self._unstopped, self._throughs = set(), set(), set()
        self._assembly, self._source, self._sources, self._early = None, None, set(), []

    def _joined(self, event: PeerJoined) -> Iterator[Action]:
        at, rank = event.at, event.peer
        yield self._seen(event, joined=True)
        self._members.joined(rank, event.incarnation)
        if self._phase != GATHERING:
            yield Send(rank, Status(training=True))
        if self._root != self._members.root:
            yield from self._new_root(at)
        elif self._to_meet:
            yield from self._meet(at)
        elif self._phase == GATHERING:
            yield from self._start_if_ready(at)
        elif self._members.leads and self._phase == ENDING:
            yield from self._assemble(at, final=True)
        elif rank in self._audience() and self._members.leads and self._phase == HOLDING:
            self._awaiting.add(rank)
            yield self._directly(rank)
        elif self._members.leads:
            yield from self._tell_roster()

    def _lost(self, event: PeerLost) -> Iterator[Action]:
        at, rank = event.at, event.peer
        if rank not in self._members.live:
            return
        yield self._seen(event, joined=False)
        self._members.lost(rank)
        yield from self._averaging.lost(at, rank)
        self._awaiting.discard(rank)
        self._unstopped.discard(rank)
        self._throughs.discard(rank)
        self._early = [(source, part) for source, part in self._early if source != rank]
        yield from self._source_lost(rank)
        if self._root != self._members.root:
            yield from self._new_root(at)
        else:
            yield from self._one_less(at, rank)
        yield from self._settled(at)
        yield from self._finish_if_done(at)

    def _one_less(self, at: float, rank: int) -> Iterator[Action]:
        """Somebody is gone who was not the root."""
        assembly = self._assembly
        if not self._members.leads:
            if assembly is not None and assembly.concerns(rank):
                yield Send(self._root, Retry(assembly.gather.round))
        elif self._phase == HOLDING:
            for missing in sorted(self._awaiting):  # whoever was to hand it on may be the one that is gone
                yield self._directly(missing)
            yield from self._stop_if_all_have(at)
        elif self._phase == GATHERING:
            self._assembly = None
            yield from self._start_if_ready(at)
        elif assembly is not None:
            yield from self._assemble(at, final=True)
        elif self._phase == TRAINING:
            yield from self._tell_roster()
            yield from self._end_if_all_through(at)
        if self._phase == TRAINING:
            yield from self._warn_if_cut_off(at)

    def _new_root(self, at: float) -> Iterator[Action]:
        """Another rank is the lowest now, perhaps this one: whatever concerns all goes on there."""
        self._root = self._members.root
        leads = self._members.leads
        self._assembly = None
        self._awaiting.clear()
        self._to_meet.clear()
        self._stopping = False
        yield from self._averaging.root_changed(at)
        if self._phase == GATHERING:
            if leads:
                yield from self._start_if_ready(at)
            else:
                yield Send(self._root, Status(training=False))
        elif self._phase in (ENDING, HOLDING):
            if leads:
                yield from self._assemble(at, final=True)
            else:
                yield Send(self._root, self._enough())
        else:
            if self._through:
                yield from self._say_through(at)
            if leads:
                yield from self._tell_roster()
            else:
                yield Send(self._root, Status(training=True))
            yield from self._warn_if_cut_off(at)

    def _tell_roster(self) -> Iterator[Action]:
        """Where not everybody is linked to everybody, the root, which is, says who is there."""
        if self._members.size > STEWARDS > self._rank:
            for rank in sorted(self._members.live):
                yield Send(rank, Roster(self._members.all()), supersedes="roster")

    def _warn_if_cut_off(self, at: float) -> Iterator[Action]:
        cut_off = self._members.cut_off
        if cut_off and cut_off != self._warned_of:
            text = (
                f"without those who are lost, the graph is in pieces: peer {self._rank} no longer averages, not even "
                f"through others, with {', '.join(map(str, cut_off))}; they meet again in the final average"
            )
            yield Report(Notice(at=at, rank=self._rank, text=text))
        self._warned_of = cut_off

    def _seen(self, event: PeerJoined | PeerLost, joined: bool) -> Report:
        return Report(
            Membership(at=event.at, rank=self._rank, peer=event.peer, incarnation=event.incarnation, joined=joined)
        )

    # Gathering

    def _start_if_ready(self, at: float) -> Iterator[Action]:
        if self._phase != GATHERING or not self._members.leads or self._source is not None:
            return
        complete = self._expected <= self._members.live.keys()
        if complete or (self._members.live and not self._patient):
            yield from self._assemble(at, final=False)

    def _patience_over(self, at: float) -> Iterator[Action]:
        if self._phase != GATHERING:
            return
        self._patient = False
        if self._members.live:
            yield SetTimer("gather", self._config.patience_seconds)
            if self._assembly is None:
                yield from self._start_if_ready(at)
            return
        if self._met_beginners:
            yield from self._assemble(at, final=False)
            return
        others = "none of the others" if len(self._expected) > 1 else "no other peer"
        yield from self._give_up(
            f"peer {self._rank} found {others} within {self._config.patience_seconds:g} s (patience_seconds); start "
            "them, or be more patient"
        )

    def _status(self, source: int, training: bool) -> Iterator[Action]:
        if not training:
            self._met_beginners = True
            if self._phase == TRAINING:
                yield Send(source, Status(training=True))
            elif self._assembly is not None and self._members.leads:
                yield Send(source, self._assembly.gather)  # it did not know yet that this peer leads
        elif self._phase == GATHERING:
            self._sources.add(source)
            yield from self._choose_source()

    def _choose_source(self) -> Iterator[Action]:
        if self._source is None and self._sources:
            near = self._sources & set(self._members.neighbours)
            self._source = min(near or self._sources)
            yield Send(self._source, AskCopy())

    def _source_lost(self, rank: int) -> Iterator[Action]:
        self._sources.discard(rank)
        if self._source == rank:
            self._source = None
            yield from self._choose_source()

    def _copy(self, at: float, source: int) -> Iterator[Action]:
        if self._phase == TRAINING and self._replica.finite:
            self._averaging.mix(at)
            values = self._replica.mean_point()
            yield Send(source, Copied(*values, self._members.told_counts, at - self._began_at))

    def _copied(self, at: float, message: Copied) -> Iterator[Action]:
        if self._phase == GATHERING:
            self._replica.reset(message.parameters, message.buffers)
            self._draw = self._members.counts[self._rank]  # what the others know of; the rest is repeated
            yield from self._begin(at, message.elapsed_seconds)
            for rank in sorted(self._members.live):  # somebody may have been called by this peer, and wait
                yield Send(rank, Status(training=True))

    def _begin(self, at: float, elapsed_seconds: float) -> Iterator[Action]:
        self._phase = TRAINING
        self._assembly, self._source, self._sources = None, None, set()
        self._began_at = at - elapsed_seconds
        yield ClearTimer("gather")
        yield from self._averaging.begin(at)
        yield from self._set_until(at)
        if self._members.leads:
            yield from self._evaluate(at)
            yield from self._tell_roster()
        yield from self._compute(at)

    def _set_until(self, at: float) -> Iterator[Action]:
        if isinstance(self._setup.until, Seconds):
            yield SetTimer("until", max(0.0, self._began_at + self._setup.until.seconds - at))

    # Training

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
        before = self._members.samples
        self._members.counts[self._rank] += event.samples
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
        if self._members.leads:
            yield from self._evaluate_if_due(event.at)
        else:
            yield from self._tally()

    def _tally(self) -> Iterator[Action]:
        """Tell the root how far it is, a hundred times in a run: exchanges alone spread the news too slowly."""
        until, mine = self._setup.until, self._members.counts[self._rank]
        if isinstance(until, Samples) and mine - self._tallied >= until.count / (TALLIES * self._members.size):
            self._tallied = mine
            yield Send(self._root, Tally(self._members.told_counts), supersedes="tally")

    def _drop(self, event: GradientReady | StepReady, reason: Reason) -> Iterator[Action]:
        first, stop = event.draws
        if stop > first:
            yield Report(Dropped(at=event.at, rank=self._rank, first=first, stop=stop, staleness=0, reason=reason))

    def _has_enough(self) -> bool:
        until = self._setup.until
        samples_max = until.count if isinstance(until, Samples) else getattr(until, "samples_max", None)
        return samples_max is not None and self._members.samples >= samples_max

    # Evaluate

    def _evaluate_if_due(self, at: float) -> Iterator[Action]:
        cadence = self._setup.evaluate
        if len(self._evaluations) >= EVALUATIONS_MAX:
            return
        if isinstance(cadence, EveryUpdates):
            due = self._version - self._evaluated_version >= cadence.updates
        else:
            due = isinstance(cadence, EverySeconds) and at - self._evaluated_at >= cadence.seconds
        if due:
            yield from self._evaluate(at)

    def _evaluate(self, at: float) -> Iterator[Action]:
        """The lowest rank measures its own replica on the way, and the average in the end."""
        if self._setup.evaluate is None:
            return
        if self._result is None:
            version, (parameters, buffers) = self._version, self._replica.snapshot()
        else:
            version, parameters, buffers = self._result.version, self._result.parameters, self._result.buffers
        self._evaluated_at, self._evaluated_version = at, version
        self._evaluations[version] = (at, self._members.samples)
        yield Evaluate(parameters, buffers, version)

    def _evaluated(self, event: Evaluated) -> Iterator[Action]:
        if event.version not in self._evaluations:
            return
        at, samples = self._evaluations.pop(event.version)
        yield Report(
            Evaluation(
                at=at,
                rank=self._rank,
                version=event.version,
                samples_total=samples,
                loss=event.loss,
                accuracy=event.accuracy,
            )
        )
        yield from self._finish_if_done(event.at)

    # Global averages

    def _assemble(self, at: float, final: bool) -> Iterator[Action]:
        """For the root: call for an average over all that are there; again, and directly, where one was under way."""
        self._round += 1
        members = (self._rank, *sorted(self._audience()))
        if self._rank >= STEWARDS:
            text = f"peer {self._rank} goes on by itself: none of the {STEWARDS} lowest ranks is left to call for all"
            yield Report(Notice(at=at, rank=self._rank, text=text))
        gather = Gather(self._round, final, members, direct=self._assembly is not None)
        self._assembly = Assembly(self._rank, self._rank, gather)
        if final and self._phase == GATHERING:
            self._come_too_late()
        for rank in gather.members:
            if rank != self._rank:
                yield Send(rank, gather)
        yield from self._contribute(at)

    def _audience(self) -> set[int]:
        """Whom this peer, as root, calls: all, or nobody, where none is left of those that all are linked to."""
        return set(self._members.live) if self._rank < STEWARDS else set()

    def _come_too_late(self) -> None:
        self._phase, self._fresh = ENDING, True
        self._source, self._sources = None, set()

    def _gather(self, at: float, root: int, gather: Gather) -> Iterator[Action]:
        call = (root, self._members.live.get(root, -1), gather.round)
        if root != self._root or (call[:2] == self._heard[:2] and gather.round <= self._heard[2]):
            return
        self._heard = call
        if not gather.final and self._phase != GATHERING:
            yield Send(root, Status(training=True) if self._phase == TRAINING else self._enough())
            return
        if gather.final and self._phase == GATHERING:
            self._come_too_late()
        elif self._phase == TRAINING:
            yield from self._freeze()
        self._met_beginners = True
        self._assembly = Assembly(self._rank, root, gather)
        early, self._early = self._early, []
        for source, part in early:
            if self._assembly.is_of(part):
                self._assembly.add(source, part)
        yield from self._contribute(at)

    def _contribute(self, at: float) -> Iterator[Action]:
        """Add this peer's own part, once nothing changes it any more."""
        assembly = self._assembly
        if assembly is None:
            return
        if not assembly.contributed:
            if self._computing or self._averaging.outstanding is not None:
                return
            self._averaging.mix(at)
            if self._result is not None:
                held = self._result
                assembly.contribute((held.parameters, held.buffers), held.version, result=True)
            elif self._fresh or not self._replica.finite:
                assembly.contribute(None, self._version)
            else:
                assembly.contribute(self._replica.mean_point(), self._version)
        if not assembly.complete:
            return
        if assembly.parent is None:
            yield from self._complete(at, assembly)
        elif assembly.parent in self._members.live:
            yield Send(assembly.parent, assembly.part(self._replica.parameters, self._members.told_counts))
        else:
            yield Send(self._root, Retry(assembly.gather.round))

    def _part(self, at: float, source: int, part: Part) -> Iterator[Action]:
        if self._assembly is not None and self._assembly.is_of(part):
            if source in self._assembly.awaited:
                self._assembly.add(source, part)
                yield from self._contribute(at)
        else:
            self._early.append((source, part))

    def _retry(self, at: float, source: int, number: int) -> Iterator[Action]:
        if self._phase == HOLDING and self._members.leads:
            yield self._directly(source)
        elif self._phase == TRAINING:
            yield Send(source, Status(training=True))
        elif self._assembly is not None and self._members.leads and number == self._assembly.gather.round:
            yield from self._assemble(at, final=self._assembly.gather.final)

    def _complete(self, at: float, assembly: Assembly) -> Iterator[Action]:
        """For the root: everybody's part is there."""
        parameters, buffers = assembly.mean() or self._replica.mean_point()
        if not self._fresh and not assembly.says_something and not self._replica.finite:
            yield from self._give_up("no peer has finite parameters; lower the learning rate, or clip the gradient")
            return
        gather = assembly.gather
        average = Average(
            parameters=parameters,
            buffers=buffers,
            root=self._rank,
            round=gather.round,
            final=gather.final,
            members=gather.members,
            direct=gather.direct,
            version=assembly.version if assembly.result else assembly.version + 1,
            counts=self._members.told_counts,
        )
        yield from self._take(at, average)

    def _average(self, at: float, average: Average) -> Iterator[Action]:
        if not average.final and self._phase != GATHERING:
            return
        if average.final and self._phase == TRAINING:
            yield from self._freeze()
        yield from self._take(at, average)

    def _take(self, at: float, average: Average) -> Iterator[Action]:
        if average.members:
            for rank in children(self._rank, average.members, average.direct):
                yield Send(rank, average)
        self._assembly = None
        if not average.final:
            self._replica.reset(average.parameters, average.buffers)
            yield from self._begin(at, 0.0)
            return
        self._result, self._phase = average, HOLDING
        if self._members.leads:
            self._awaiting = self._audience()
            yield from self._evaluate(at)
            yield from self._stop_if_all_have(at)
        else:
            self._owes_have = True
            yield from self._settled(at)

    def _directly(self, rank: int) -> Send:
        """The result, to one alone, who hands it on to nobody."""
        assert self._result is not None
        held = self._result
        message = Average(
            parameters=held.parameters,
            buffers=held.buffers,
            root=self._rank,
            round=self._round,
            final=True,
            members=(),
            direct=True,
            version=held.version,
            counts=self._members.told_counts,
        )
        return Send(rank, message, supersedes="result")

    # The end

    def _end(self, at: float) -> Iterator[Action]:
        """Training is over, as far as this peer knows."""
        if self._phase != TRAINING or self._leaving:
            return
        yield from self._freeze()
        if self._members.leads:
            yield from self._assemble(at, final=True)
        else:
            yield Send(self._root, self._enough())

    def _freeze(self) -> Iterator[Action]:
        """From here on this replica does not change any more, but for an answer that is still owed to it."""
        self._phase = ENDING
        self._averaging.end()
        yield ClearTimer(TIMER)
        yield ClearTimer("until")
        if self._computing:
            yield Cancel()

    def _enough(self) -> Enough:
        return Enough(self._members.told_counts, self._members.all())

    def _told_enough(self, at: float, source: int, members: tuple[int, ...]) -> Iterator[Action]:
        if self._phase == TRAINING:
            yield from self._end(at)
        elif not self._members.leads:
            return
        elif self._phase == HOLDING and not self._to_meet:
            self._awaiting.add(source)
            yield self._directly(source)
        elif self._assembly is not None and self._assembly.gather.final:
            yield Send(source, self._assembly.gather)  # it did not know yet that this peer leads
        elif self._phase == GATHERING:
            self._to_meet |= {*members} - {self._rank}
            yield SetTimer("meet", self._config.patience_seconds / 10)
            yield from self._meet(at)

    def _meet(self, at: float) -> Iterator[Action]:
        """Call for the end, once those are there who are known to be."""
        if self._to_meet <= self._members.live.keys() and self._members.leads and self._phase != TRAINING:
            self._to_meet.clear()
            yield ClearTimer("meet")
            yield from self._assemble(at, final=True)

    def _say_through(self, at: float) -> Iterator[Action]:
        if self._members.leads:
            yield from self._told_through(at, self._rank)
        else:
            yield Send(self._root, Through(self._members.told_counts))

    def _told_through(self, at: float, rank: int) -> Iterator[Action]:
        self._throughs.add(rank)
        yield from self._end_if_all_through(at)

    def _end_if_all_through(self, at: float) -> Iterator[Action]:
        if self._members.leads and self._throughs >= set(self._members.all()):
            yield from self._end(at)

    def _settled(self, at: float) -> Iterator[Action]:
        """Nothing is being computed, or no answer is owed any more: what has waited for that goes on."""
        if self._computing or self._averaging.outstanding is not None:
            return
        if self._leaving:
            yield from self._finish(*self._replica.mean_point(), self._version, None)
            return
        if self._assembly is not None and not self._assembly.contributed:
            yield from self._contribute(at)
        if self._phase == HOLDING and self._owes_have and not self._members.leads:
            assert self._result is not None
            self._owes_have = False
            yield Send(self._root, Have(self._result.version))

    def _have(self, at: float, source: int, version: int) -> Iterator[Action]:
        if self._result is None or self._result.version != version or not self._members.leads:
            return
        self._awaiting.discard(source)
        if self._stopping:
            yield self._stop(source)
        yield from self._stop_if_all_have(at)

    def _stop_if_all_have(self, at: float) -> Iterator[Action]:
        if not self._awaiting and not self._stopping and self._members.leads:
            self._stopping = True
            for rank in sorted(self._audience()):
                yield self._stop(rank)
        yield from self._finish_if_done(at)

    def _stop(self, rank: int) -> Send:
        """Everybody holds the result; so it need not travel again."""
        assert self._result is not None
        self._unstopped.add(rank)
        return Send(rank, Stop(self._result.parameters.new_empty(0), (), self._result.version))

    def _told_stop(self, at: float, source: int, version: int) -> Iterator[Action]:
        if self._result is None or self._result.version != version:
            return
        self._told_to_stop = True
        yield Send(source, Stopped(draws_stop=self._draw, samples=self._members.counts[self._rank]))
        yield from self._finish_if_done(at)

    def _finish_if_done(self, at: float) -> Iterator[Action]:
        if self._finished or self._phase != HOLDING or self._unstopped:
            return
        alone = self._members.leads and self._stopping and not self._awaiting and not self._evaluations
        if self._told_to_stop or alone:
            assert self._result is not None
            yield from self._finish(self._result.parameters, self._result.buffers, self._result.version, None)

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

    def _give_up(self, sentence: str) -> Iterator[Action]:
        yield from self._finish(*self._replica.mean_point(), self._version, sentence)

    def _finish(
        self, parameters: torch.Tensor, buffers: Buffers, version: int, failure: str | None
    ) -> Iterator[Action]:
        self._finished = True
        yield Finish(parameters, buffers, version, failure)

    def replica(self) -> torch.Tensor:
        return self._replica.parameters

    # State

    def state(self) -> State:
        lead = self._replica.lead
        return {
            "parameters": self._replica.parameters.clone(),
            "lead": None if lead is None else lead.clone(),
            "buffers": [buffer.clone() for buffer in self._replica.buffers],
            "before": [buffer.clone() for buffer in self._before],
            "optimizer": None if self._stepper is None else self._stepper.state(),
            "averaging": self._averaging.state(),
            "live": {str(rank): incarnation for rank, incarnation in self._members.live.items()},
            "absent": sorted(self._members.absent),
            "counts": list(self._members.counts),
            "assembly": None if self._assembly is None else self._assembly.state(),
            "early": [[source, packed(part)] for source, part in self._early],
            "result": None if self._result is None else packed(self._result),
            "heard": list(self._heard),
            "evaluations": {str(version): list(made) for version, made in self._evaluations.items()},
            "sets": {name: sorted(getattr(self, f"_{name}")) for name in _SETS},
            "plain": {name: getattr(self, f"_{name}") for name in _PLAIN},
            "warned_of": list(self._warned_of),
        }

    def restore(self, state: State) -> None:
        replica = self._replica
        replica.parameters.copy_(state["parameters"])
        if replica.lead is not None:
            replica.lead.copy_(state["lead"])
        replica.buffers = tuple(state["buffers"])
        self._before = tuple(state["before"])
        if self._stepper is not None:
            self._stepper.restore(state["optimizer"])
        self._averaging.restore(state["averaging"])
        for rank, incarnation in state["live"].items():
            self._members.joined(int(rank), incarnation)
        self._members.absent = frozenset(state["absent"])
        self._members.counts = list(state["counts"])
        if state["assembly"] is not None:
            self._assembly = Assembly.restored(self._rank, state["assembly"])
        self._early = [(source, unpacked(Part, part)) for source, part in state["early"]]
        self._result = None if state["result"] is None else unpacked(Average, state["result"])
        root, incarnation, number = state["heard"]
        self._heard = (root, incarnation, number)
        self._evaluations = {int(version): (at, samples) for version, (at, samples) in state["evaluations"].items()}
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
    "evaluated_at",
    "evaluated_version",
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
