"""The training of a gossip peer: gradients and optimizer steps on its own replica, and copies for late joiners."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from offbeat.core.actions import (
    Action,
    Cancel,
    ClearTimer,
    Compute,
    Finish,
    Report,
    Samples,
    Seconds,
    Send,
    SetTimer,
)
from offbeat.core.events import Event, GradientReady, Leave, MessageArrived, Started, StepReady, TimerFired
from offbeat.core.messages import Buffers
from offbeat.core.optimizers import Stepper
from offbeat.core.strategy import NodeContext
from offbeat.errors import ConfigurationError
from offbeat.records.schema import Contribution, Notice, Reason, Update
from offbeat.strategies.evaluations import Evaluations
from offbeat.strategies.gossip.averaging import TIMER, Averaging
from offbeat.strategies.gossip.gossip_messages import CopyReply, SampleCounts, Status
from offbeat.strategies.gossip.gossip_parts import GossipBase
from offbeat.strategies.gossip.membership_view import MembershipView
from offbeat.strategies.gossip.phases import Signal, Step, Trigger
from offbeat.strategies.gossip.replica import Replica
from offbeat.strategies.message_kinds import matched
from offbeat.strategies.node_state import Stateful
from offbeat.strategies.training_node import NO_OPTIMIZER, dropped, samples_limit

HANG_ROUNDS = 2.0
"""A computation hangs if it has not ended when it was cancelled so many rounds ago."""
PROGRESS_REPORTS = 100
"""`SampleCounts` messages that a peer sends to the root in a run."""


class PeerTraining(Stateful):
    """The gradients and optimizer steps of one peer.

    config: the strategy.
    context: the context of the node.
    view: membership and sample counts.
    replica: the parameters that are trained.
    averaging: the exchanges, which are scheduled by gradients.
    evaluations: the evaluations of this rank.
    """

    version: int = 0
    """Updates of this replica."""
    draw: int = 0
    """The next position in this rank's data order."""
    computing: bool = False
    """Whether a `Compute` is outstanding."""
    buffers_before: Buffers = ()
    """Buffers at the start of the outstanding computation."""
    nonfinite_in_a_row: int = 0
    samples_reported: int = 0
    """Own samples at the last `SampleCounts` message to the root."""
    loop_ended: bool = False
    """Whether the user's training loop has ended; this peer goes on averaging with the others."""
    last_round_seconds: float = 0.0
    """How long the last computation took."""
    leaving: bool = False
    """Whether this peer finishes without the others, as soon as nothing is outstanding."""
    began_at: float = 0.0
    """When training began, in seconds on this process's clock."""
    _stepper: Stepper | None

    def __init__(
        self,
        config: GossipBase,
        context: NodeContext,
        view: MembershipView,
        replica: Replica,
        averaging: Averaging,
        evaluations: Evaluations,
    ) -> None:
        self._config = config
        self._until = context.until
        self._view = view
        self._replica = replica
        self._averaging = averaging
        self._evaluations = evaluations
        optimizer = config.optimizer
        self._stepper = None if optimizer is None else optimizer.build(replica.parameters, context.layout)

    @property
    def is_idle(self) -> bool:
        """Whether nothing under way can change the replica any more, once training has ended."""
        return not self.computing and self._averaging.pending is None

    def is_goal_reached(self) -> bool:
        """Whether all ranks together have taken the samples asked for, as far as this one knows."""
        limit = samples_limit(self._until)
        return limit is not None and self._view.samples >= limit

    def clear_links(self, event: object) -> Iterable[Step]:
        """Nothing is under way in a process that has just started."""
        self.computing = False
        self._evaluations.reset()
        return ()

    # Start

    def begin(self, signal: Signal) -> Iterator[Action]:
        """Training has begun, `signal.content` seconds ago."""
        self.began_at = signal.at - signal.content
        yield from self._set_until(signal.at)

    def train(self, signal: Signal) -> Iterator[Action]:
        yield from self._train(signal.at)

    def resume(self, event: Started) -> Iterator[Action]:
        """Continue from a checkpoint."""
        yield from self._set_until(event.at)
        yield from self._train(event.at)
        yield from self._averaging.start_due(event.at)

    def _set_until(self, at: float) -> Iterator[Action]:
        if isinstance(self._until, Seconds):
            yield SetTimer("until", max(0.0, self.began_at + self._until.seconds - at))

    def send_copy(self, event: MessageArrived) -> Iterator[Action]:
        """Send the parameters to a late joiner."""
        if self._replica.is_finite:
            self._averaging.mix(event.at)
            values = self._replica.mean_of_copies()
            yield Send(event.source, CopyReply(*values, self._view.sample_counts, event.at - self.began_at))

    def take_copy(self, event: MessageArrived) -> Iterator[Step]:
        """Begin with the parameters of a rank that is training."""
        message = matched(event, CopyReply)
        self._replica.reset(message.parameters, message.buffers)
        self.draw = self._view.counts[self._view.rank]  # samples unknown to the others are computed again
        yield Signal(Trigger.BEGIN, event.at, message.elapsed_seconds)
        for rank in sorted(self._view.live):  # a rank may wait for a round that this one had started
            yield Send(rank, Status(training=True))

    # Gradients

    def _train(self, at: float) -> Iterator[Action]:
        if self._view.is_root:
            yield from self._evaluate(at)
        yield from self._compute(at)

    def _compute(self, at: float) -> Iterator[Action]:
        if self.computing or self.loop_ended or self.leaving:
            return
        self._averaging.mix(at)
        self.computing = True
        replica = self._replica
        self.buffers_before = tuple(buffer.clone() for buffer in replica.buffers)
        budget, microbatch = Samples(self._config.batch), self._config.microbatch
        yield Compute(replica.parameters, replica.buffers, self.version, self.draw, budget, microbatch)

    def computed(self, event: GradientReady | StepReady) -> Iterator[Step]:
        if self.loop_ended or self.leaving:
            yield from self.drop_computed(event)
            return
        self.computing = False
        self.last_round_seconds = event.seconds
        self.draw = event.draws[1]
        if event.finite and event.samples:
            self.nonfinite_in_a_row = 0
            yield from self._update(event)
        elif not event.finite:
            yield from self._drop(event, "nonfinite")
            self.nonfinite_in_a_row += 1
        if self.nonfinite_in_a_row >= self._config.nonfinite_max:
            sentence = (
                f"peer {self._view.rank} computed {self._config.nonfinite_max} gradients in a row that were not "
                "finite; lower the learning rate, clip the gradient (clip_norm), or look at that peer's data"
            )
            yield Signal(Trigger.FAILED, event.at, sentence)
        elif self.is_goal_reached():
            yield Signal(Trigger.END, event.at)
        else:
            yield from self._compute(event.at)
            yield from self._averaging.gradient_done(event.at, event.seconds)

    def drop_computed(self, event: GradientReady | StepReady) -> Iterator[Step]:
        """Training has ended before this computation."""
        self.computing = False
        yield ClearTimer("hang")
        yield from self._drop(event, "stopped")
        yield from self.check_idle(event)

    def _drop(self, event: GradientReady | StepReady, reason: Reason) -> Iterator[Action]:
        first, stop = event.draws
        if stop > first:
            yield dropped(event.at, self._view.rank, event.draws, 0, reason)

    def _update(self, event: GradientReady | StepReady) -> Iterator[Action]:
        self._averaging.mix(event.at)
        self._replica.settle()
        samples_before = self._view.samples
        self._view.counts[self._view.rank] += event.samples
        rate = 0.0
        if isinstance(event, StepReady):
            self._replica.parameters.add_(event.delta)
        elif self._stepper is None:
            raise ConfigurationError(NO_OPTIMIZER)
        else:
            rate = self._stepper.step(event.gradient.div_(event.divisor), samples_before)
        self._replica.add_buffer_changes(self.buffers_before, event.buffers)
        self.version += 1
        yield Report(
            Update(
                at=event.at,
                rank=self._view.rank,
                version=self.version,
                messages=1,
                samples=event.samples,
                samples_total=samples_before + event.samples,
                learning_rate=rate,
                contributions=(Contribution(self._view.rank, *event.draws, 0),),
            )
        )
        if not self._view.is_root:
            yield from self._report_progress()
        elif self._evaluations.due(event.at, self.version):
            yield from self._evaluate(event.at)

    def _report_progress(self) -> Iterator[Action]:
        """Send sample counts to the root, `PROGRESS_REPORTS` times in a run: exchanges alone spread them too slowly."""
        samples = self._view.counts[self._view.rank]
        if not isinstance(self._until, Samples):
            return
        if samples - self.samples_reported >= self._until.count / (PROGRESS_REPORTS * self._view.size):
            self.samples_reported = samples
            yield Send(self._view.root, SampleCounts(self._view.sample_counts), supersedes="sample counts")

    def _evaluate(self, at: float) -> Iterator[Action]:
        """On the root: evaluate its own replica."""
        if self._evaluations.has_new(self.version):
            values = self._replica.snapshot()
            yield from self._evaluations.begin(at, self.version, self._view.samples, values)

    # End

    def end(self, occurrence: Event | Signal) -> Iterator[Step]:
        """The goal is reached; a peer that leaves does not take part in the end."""
        if not self.leaving:
            yield Signal(Trigger.END, occurrence.at)

    def stop(self, occurrence: Event | Signal) -> Iterator[Action]:
        """From here on only the reply to a pending exchange changes the replica."""
        self._averaging.stop()
        yield ClearTimer(TIMER)
        yield ClearTimer("until")
        if self.computing:
            yield Cancel()
            yield SetTimer("hang", max(self._config.hang_seconds, HANG_ROUNDS * self.last_round_seconds))

    def give_up_computation(self, event: TimerFired) -> Iterator[Step]:
        """The computation hangs: the others do not wait for it, and nothing of it would be used."""
        if not self.computing:
            return
        self.computing = False
        text = (
            f"the computation of peer {self._view.rank} has not ended since the end of training (hang_seconds); the "
            "run ends without it"
        )
        yield Report(Notice(at=event.at, rank=self._view.rank, text=text))
        yield from self.check_idle(event)

    def check_idle(self, occurrence: Event | Signal) -> Iterator[Step]:
        """Announce that nothing is under way, for what had to wait until then."""
        if self.is_idle:
            yield Signal(Trigger.LEFT if self.leaving else Trigger.IDLE, occurrence.at)

    def leave_early(self, event: Leave) -> Iterator[Step]:
        """Leave before training has begun."""
        self.leaving = True
        self._averaging.stop()
        yield from self.check_idle(event)

    def leave(self, event: Leave) -> Iterator[Step]:
        """End the user's loop; with `stay` this peer goes on averaging until all loops have ended."""
        if self.leaving or (self.loop_ended and event.stay):
            return
        if event.stay:
            self.loop_ended = True
        else:
            self.leaving = True
            self._averaging.stop()
        if self.computing:
            yield Cancel()
        if event.stay:
            yield Signal(Trigger.OWN_LOOP_ENDED, event.at)
        else:
            yield from self.check_idle(event)

    def repeat_loop_end(self, signal: Signal) -> Iterator[Step]:
        """Announce the end of the loop again, to another root."""
        if self.loop_ended:
            yield Signal(Trigger.OWN_LOOP_ENDED, signal.at)

    def finish(self, signal: Signal) -> Iterator[Action]:
        yield Finish(*self._replica.mean_of_copies(), self.version)

    def fail(self, signal: Signal) -> Iterator[Action]:
        yield Finish(*self._replica.mean_of_copies(), self.version, signal.content)
