"""Carries out the actions of a live node; see `engine/dispatcher.py`."""

from __future__ import annotations

from offbeat.core.actions import Compute, Disconnect, Evaluate, Finish, Record, Send
from offbeat.errors import ContractViolation
from offbeat.live.due_queue import DueQueue, TimerDue
from offbeat.live.evaluation import Evaluator
from offbeat.live.live_outbox import LiveOutbox
from offbeat.live.live_round import LiveRound
from offbeat.live.record_sink import RecordSink
from offbeat.live.runner_options import RunnerOptions


class LiveBackend:
    """The actions of one rank on the wall clock. Not thread-safe: the caller holds the lock of the runner.

    options: rank, clock, model and delays.
    outbox, due, records: carry out `Send`, timers and `Report`.
    evaluator: carries out `Evaluate`; None if this rank does not evaluate.
    """

    def __init__(
        self,
        options: RunnerOptions,
        outbox: LiveOutbox,
        due: DueQueue,
        records: RecordSink,
        evaluator: Evaluator | None,
    ) -> None:
        self.rank = options.rank
        self.is_peer = options.is_peer
        self.round: LiveRound | None = None
        """The outstanding computation."""
        self.has_computed = False
        """Whether the node has asked for a computation: it has got the state of the run then."""
        self.is_leaving = False
        """Whether computations are cancelled at once, since the training loop was left."""
        self.finished: Finish | None = None
        self._clock = options.clock
        self._load = options.load
        self._injected_delay = options.injected_delay
        self._outbox = outbox
        self._due = due
        self._records = records
        self._evaluator = evaluator

    @property
    def computes(self) -> bool:
        return self._load is not None

    @property
    def is_computing(self) -> bool:
        return self.round is not None

    def send(self, action: Send) -> None:
        self._outbox.send(action, self._clock.now())

    def disconnect(self, action: Disconnect) -> None:
        self._outbox.disconnect(action.peer, action.why)

    def compute(self, action: Compute) -> None:
        assert self._load is not None
        injected = self._injected_delay
        delay, now = injected.next_round_delay(), self._clock.now()
        live_round = LiveRound(action, self._clock, now, delay, injected.hang_seconds)
        self._records.date()
        self.has_computed = True
        self._load(action.parameters, action.buffers)
        if self.is_leaving:
            live_round.cancelled.set()
        self.round = live_round

    def cancel(self) -> None:
        if self.round is not None:
            self.round.cancelled.set()

    def set_timer(self, name: str, seconds: float) -> None:
        self._due.put(self._clock.now() + seconds, TimerDue(name))

    def clear_timer(self, name: str) -> None:
        self._due.remove(TimerDue(name))

    def evaluate(self, action: Evaluate) -> None:
        if self._evaluator is None:
            raise ContractViolation(
                f"rank {self.rank} asked for Evaluate, but has nothing to evaluate with; pass one: "
                "offbeat.join(model, strategy, until, evaluate=lambda model: (loss, accuracy))"
            )
        self._evaluator.put(action)

    def report(self, record: Record) -> None:
        self._records.write(record)

    def finish(self, action: Finish) -> None:
        self.finished = action

    def shift(self, seconds: float) -> None:
        """The clock was adjusted by `seconds`."""
        if self.round is not None:
            self.round.start += seconds

    def close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()
