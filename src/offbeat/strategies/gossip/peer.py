"""A gossip peer: trains its own replica, averages it with neighbours meanwhile, and starts and ends with the others.

    gathering   until all expected ranks have joined or patience_seconds have passed; then a first global average
    training    gradient → optimizer step → next gradient; exchanges run concurrently (`averaging.py`)
    ending      the sample goal is reached: the replica is frozen, and the final global average is computed
    complete    this rank holds the final average; when all ranks do, Stop → Stopped → Finish

This file has the training. Membership and start are in `membership.py`, global averages and the end in
`termination.py`; the lowest live rank, the root, starts both, and the next one takes over when it is lost.
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
from offbeat.core.optimizers import Stepper
from offbeat.core.strategy import NodeContext
from offbeat.errors import ConfigurationError
from offbeat.records.schema import Contribution, Reason, Update
from offbeat.strategies.gossip.averaging import TIMER
from offbeat.strategies.gossip.gossip_messages import Answer, Declined, Offer, Paired, Ready, SampleCounts
from offbeat.strategies.gossip.gossip_parts import GossipBase
from offbeat.strategies.gossip.membership import MembershipNode
from offbeat.strategies.gossip.peer_state import COMPLETE, ENDING, TRAINING
from offbeat.strategies.training_node import NO_OPTIMIZER, dropped, samples_limit

PROGRESS_REPORTS = 100
"""`SampleCounts` messages that a peer sends to the root in a run."""


class Peer(MembershipNode):
    """The node of every rank of a gossip run."""

    _stepper: Stepper | None

    def __init__(self, config: GossipBase, context: NodeContext) -> None:
        super().__init__(config, context)
        optimizer = config.optimizer
        self._stepper = None if optimizer is None else optimizer.build(self._replica.parameters, context.layout)

    def replica(self) -> Tensor:
        return self._replica.parameters

    # Events

    def handle(self, event: Event) -> Iterable[Action]:
        if self.finished:
            return ()
        match event:
            case MessageArrived():
                return self._on_message(event)
            case GradientReady() | StepReady():
                return self._on_computed(event)
            case TimerFired():
                return self._on_timer(event)
            case Evaluated():
                return self._on_evaluated(event)
            case PeerJoined():
                return self._on_peer_joined(event)
            case PeerLost():
                return self._on_peer_lost(event)
            case Leave():
                return self._on_leave(event)
            case Started():
                return self._start(event.at)
            case _:
                return ()

    def _on_timer(self, event: TimerFired) -> Iterable[Action]:
        handlers = {
            TIMER: self._averaging.start_due,
            "gather": self._on_gather_timeout,
            "links": self._on_links_timeout,
            "until": self._end,
        }
        return handlers[event.name](event.at)

    def _on_message(self, event: MessageArrived) -> Iterator[Action]:
        message, at, source = event.message, event.at, event.source
        counts = getattr(message, "counts", None)
        if counts is not None:
            self._view.merge_counts(counts)
        match message:
            case Offer():
                yield from self._averaging.on_offer(event)
            case Answer() | Declined():
                yield from self._averaging.on_reply(event)
                yield from self._continue_when_idle(at)
            case Ready():
                yield from self._averaging.on_ready(at, source)
            case Paired():
                yield from self._averaging.on_paired(at, message)
            case _:
                yield from self._on_group_message(event)
        if self.phase == TRAINING and self._is_goal_reached():
            yield from self._end(at)

    # Training

    def _train(self, at: float) -> Iterator[Action]:
        if self._view.is_root:
            yield from self._evaluate(at)
        yield from self._compute(at)

    def _compute(self, at: float) -> Iterator[Action]:
        if self.phase != TRAINING or self.computing or self.loop_ended or self.leaving:
            return
        self._averaging.mix(at)
        self.computing = True
        replica = self._replica
        self.buffers_before = tuple(buffer.clone() for buffer in replica.buffers)
        budget, microbatch = Samples(self._config.batch), self._config.microbatch
        yield Compute(replica.parameters, replica.buffers, self.version, self.draw, budget, microbatch)

    def _on_computed(self, event: GradientReady | StepReady) -> Iterator[Action]:
        self.computing = False
        if self.phase != TRAINING or self.loop_ended or self.leaving:
            yield from self._drop(event, "stopped")
            yield from self._continue_when_idle(event.at)
            return
        self.draw = event.draws[1]
        if event.finite and event.samples:
            self.nonfinite_in_a_row = 0
            yield from self._update(event)
        elif not event.finite:
            yield from self._drop(event, "nonfinite")
            self.nonfinite_in_a_row += 1
        if self.nonfinite_in_a_row >= self._config.nonfinite_max:
            yield self._fail(
                f"peer {self._rank} computed {self._config.nonfinite_max} gradients in a row that were not finite; "
                "lower the learning rate, clip the gradient (clip_norm), or look at that peer's data"
            )
        elif self._is_goal_reached():
            yield from self._end(event.at)
        else:
            yield from self._compute(event.at)
            yield from self._averaging.gradient_done(event.at, event.seconds)

    def _update(self, event: GradientReady | StepReady) -> Iterator[Action]:
        self._averaging.mix(event.at)
        samples_before = self._view.samples
        self._view.counts[self._rank] += event.samples
        rate = 0.0
        if isinstance(event, StepReady):
            self._replica.parameters.add_(event.delta)
        elif self._stepper is None:
            raise ConfigurationError(NO_OPTIMIZER)
        else:
            rate = self._stepper.step(event.gradient.div_(event.samples), samples_before)
        self._replica.add_buffer_changes(self.buffers_before, event.buffers)
        self.version += 1
        yield Report(
            Update(
                at=event.at,
                rank=self._rank,
                version=self.version,
                messages=1,
                samples=event.samples,
                samples_total=samples_before + event.samples,
                learning_rate=rate,
                contributions=(Contribution(self._rank, *event.draws, 0),),
            )
        )
        if not self._view.is_root:
            yield from self._report_progress()
        elif self._evaluations.due(event.at, self.version):
            yield from self._evaluate(event.at)

    def _report_progress(self) -> Iterator[Action]:
        """Send sample counts to the root, `PROGRESS_REPORTS` times in a run: exchanges alone spread them too slowly."""
        until, samples = self._context.until, self._view.counts[self._rank]
        if not isinstance(until, Samples):
            return
        if samples - self.samples_reported >= until.count / (PROGRESS_REPORTS * self._view.size):
            self.samples_reported = samples
            yield Send(self.root, SampleCounts(self._view.sample_counts), supersedes="sample counts")

    def _drop(self, event: GradientReady | StepReady, reason: Reason) -> Iterator[Action]:
        first, stop = event.draws
        if stop > first:
            yield dropped(event.at, self._rank, event.draws, 0, reason)

    def _is_goal_reached(self) -> bool:
        """Whether all ranks together have taken the samples asked for, as far as this one knows."""
        limit = samples_limit(self._context.until)
        return limit is not None and self._view.samples >= limit

    # Evaluation

    def _evaluate(self, at: float) -> Iterator[Action]:
        """On the root: evaluate its own replica; the final average is evaluated in `_apply_average`."""
        if self._evaluations.has_new(self.version):
            values = self._replica.snapshot()
            yield from self._evaluations.begin(at, self.version, self._view.samples, values)

    def _on_evaluated(self, event: Evaluated) -> Iterator[Action]:
        yield from self._evaluations.report(event)
        yield from self._finish_if_done()

    # Leaving

    def _on_leave(self, event: Leave) -> Iterator[Action]:
        """End the user's loop; with `stay` this peer goes on averaging until all loops have ended."""
        if self.phase in (ENDING, COMPLETE) or self.leaving or (self.loop_ended and event.stay):
            return
        stays = event.stay and self.phase == TRAINING
        if stays:
            self.loop_ended = True
        else:
            self.leaving = True
            self._averaging.stop()
        if self.computing:
            yield Cancel()
        yield from self._announce_loop_end(event.at) if stays else self._continue_when_idle(event.at)
