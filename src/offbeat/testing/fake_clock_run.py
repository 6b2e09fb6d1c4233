"""A live run in virtual time: every rank has the real live engine on the loopback, and one clock that is set by hand.

No thread waits. The clock is moved to the next moment at which anything happens; the events of one moment are handled
in the order of ranks. Instead of a training loop, a `VirtualWorker` takes the rounds of each rank that computes: a
micro-batch takes as long as the cluster says, and the gradient is computed by the code of the live training loop.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator

from offbeat.core.actions import Evaluate, Finish
from offbeat.core.events import Evaluated
from offbeat.core.examples import Order
from offbeat.core.flat import FlatModule
from offbeat.core.randomness import stream
from offbeat.core.strategy import NodeContext
from offbeat.core.workload import Measured, Workload
from offbeat.engine.experiment import Experiment
from offbeat.engine.gradient_accumulator import GradientAccumulator
from offbeat.engine.workload_losses import WorkloadLosses
from offbeat.errors import RunFailed
from offbeat.live.clock import Clock
from offbeat.live.evaluation import Evaluator, Measure
from offbeat.live.injected_delay import InjectedDelay
from offbeat.live.live_round import LiveRound
from offbeat.live.node_runner import NodeRunner
from offbeat.live.runner_options import RunnerOptions
from offbeat.records.files import MemoryWriter
from offbeat.strategies.compressed_node import build_node
from offbeat.transports.loopback import Loopback
from offbeat.transports.transport import QueuedTransport

MOMENTS_MAX = 200_000
"""Moments after which a run that has not ended is given up."""


class FakeClock(Clock):
    """Shows the time that was set."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def set(self, elapsed_seconds: float, at_monotonic: float) -> None:
        self.time = elapsed_seconds

    def wait(self, event: threading.Event, seconds: float) -> None:
        raise AssertionError("internal error: nothing waits for a fake clock")


class InlineEvaluator(Evaluator):
    """Evaluates at once; the result is delivered when all actions of the event have been carried out."""

    def __init__(
        self,
        measure: Measure,
        deliver: Callable[[Evaluated], None],
        fail: Callable[[BaseException], None],
        now: Callable[[], float],
        pending: list[Callable[[], None]],
    ) -> None:
        super().__init__(measure, deliver, fail, now)
        self._pending = pending

    def put(self, request: Evaluate) -> None:
        measured = self._measure(request)
        self._pending.append(lambda: self._deliver(Evaluated(self._now(), request.version, *measured)))

    def close(self) -> None:
        pass


class VirtualWorker:
    """Computes the rounds of one rank; `next_at` is when its current micro-batch, or the delay before it, ends."""

    def __init__(self, experiment: Experiment, workload: Workload, rank: int, worker: int, workers: int) -> None:
        self.flat = FlatModule(workload.initial_model(experiment.seed))
        self.runner: NodeRunner
        self.next_at: float | None = None
        self._experiment = experiment
        self._workload = workload
        self._rank = rank
        indices = workload.split.indices(workload.train.targets, worker, workers, experiment.seed)
        self._order = Order(indices, experiment.seed, rank)
        self._losses = WorkloadLosses(workload, self.flat.module)
        self._accumulator = GradientAccumulator(self.flat)
        self._round: LiveRound | None = None
        self._sizes: list[int] = []

    def advance(self, now: float) -> bool:
        """Begin a round that was asked for, or go on with the current one; returns whether anything was done."""
        if self._round is None:
            self._round = self.runner.round
            if self._round is None:
                return False
            self._sizes = []
            self.next_at = now + self._round.delay.delay_seconds
            self._round.induced_seconds = self._round.delay.delay_seconds
        current, cancelled = self._round, self._round.cancelled.is_set()
        if self.runner.ended:
            self._round, self.next_at = None, None
            return True
        assert self.next_at is not None
        is_delayed = not self._sizes
        if now < self.next_at and not (is_delayed and cancelled):
            return False
        if is_delayed:  # a cancelled delay ends at once
            current.induced_seconds -= max(0.0, self.next_at - now)
        current.samples = sum(self._sizes)
        size = current.next_microbatch_size()
        if not size:
            self._complete(current)
            return True
        cluster = self._experiment.cluster
        seconds = cluster.seconds_per_call + cluster.seconds_per_sample * size
        slowdown = current.delay.slowdown_seconds(seconds)
        current.induced_seconds += slowdown
        self._sizes.append(size)
        self.next_at = now + (seconds + slowdown)
        return True

    def _complete(self, current: LiveRound) -> None:
        action = current.action
        self._accumulator.begin(self._experiment.seed, self._rank, action.draw)
        first = action.draw
        for size in self._sizes:
            batch = self._workload.train.drawn(self._order, first, first + size)
            self._accumulator.add(self._losses.of(batch).sum())
            first += size
        self._round, self.next_at = None, None
        self.runner.complete(*self._accumulator.end())


class FakeClockRun:
    """All ranks of a live run of an experiment; `run` plays it to its end.

    experiment: what to run; resolved, without faults.
    workload: the workload of the experiment.
    """

    def __init__(self, experiment: Experiment, workload: Workload) -> None:
        self.clock = FakeClock()
        self.records = MemoryWriter()
        self._experiment = experiment
        self._workload = workload
        self._pending: list[Callable[[], None]] = []
        strategy = experiment.strategy
        self._size = strategy.processes(experiment.worker_count)
        computing = [rank for rank in range(self._size) if strategy.computes(rank)]
        self._ranks = {rank: worker for worker, rank in enumerate(computing)}
        self._workers = {
            rank: VirtualWorker(experiment, workload, rank, worker, len(computing))
            for rank, worker in self._ranks.items()
        }
        self._evaluated = FlatModule(workload.initial_model(experiment.seed))
        self._evaluation = WorkloadLosses(workload, self._evaluated.module)
        loopback = Loopback({rank: strategy.peers(rank, self._size) for rank in range(self._size)})
        self._transports: dict[int, QueuedTransport] = {rank: loopback.transport(rank) for rank in range(self._size)}
        self.runners = {rank: self._runner(rank) for rank in range(self._size)}
        for rank, worker in self._workers.items():
            worker.runner = self.runners[rank]

    def _runner(self, rank: int) -> NodeRunner:
        experiment, strategy = self._experiment, self._experiment.strategy
        assert experiment.until is not None
        initial = FlatModule(self._workload.initial_model(experiment.seed))
        parameters, buffers = initial.initial_values()
        node = build_node(
            strategy,
            NodeContext(
                rank=rank,
                members=tuple(range(self._size)),
                layout=initial.layout,
                parameters=parameters,
                buffers=buffers,
                random=stream(experiment.seed, "node", rank, 0),
                until=experiment.until,
                evaluate=experiment.evaluate,
            ),
        )
        peers = frozenset(strategy.peers(rank, self._size))
        options = RunnerOptions(
            rank=rank,
            clock=self.clock,
            writer=self.records,
            is_peer=peers.__contains__,
            load=self._workers[rank].flat.load if rank in self._workers else None,
            measure=self._measure,
            make_evaluator=functools.partial(InlineEvaluator, pending=self._pending),
            injected_delay=InjectedDelay.of(experiment.cluster, self._ranks, rank, peers, experiment.seed),
            bytes_per_second=experiment.bytes_per_second,
        )
        return NodeRunner(node, self._transports[rank], options)

    def _measure(self, request: Evaluate) -> Measured:
        self._evaluated.load(request.parameters, request.buffers)
        return self._evaluation.evaluate(is_score=request.is_score)

    def run(self) -> dict[int, Finish]:
        """Play the run; returns the `Finish` of each rank. Raises the error of a rank that has failed."""
        for runner in self.runners.values():
            runner.start(threaded=False)
        for _ in range(MOMENTS_MAX):
            while self._handle_moment():
                for runner in self.runners.values():
                    runner.check()
            if all(runner.ended for runner in self.runners.values()):
                break
            following = min(self._next_times(), default=None)
            if following is None:
                waiting = [rank for rank, runner in self.runners.items() if not runner.ended]
                raise RunFailed(f"nothing was left to happen at {self.clock.time:g} s, but ranks {waiting} go on")
            self.clock.time = following
        for rank, runner in self.runners.items():
            runner.check()
            runner.write_last(runner.ended_record())
            self._transports[rank].close()
        return {rank: finish for rank, runner in self.runners.items() if (finish := runner.finish) is not None}

    def _handle_moment(self) -> bool:
        """Handle one thing of each rank that happens now; returns whether there was any."""
        happened = False
        for rank, runner in self.runners.items():
            transport = self._transports[rank]
            received = transport.receive(0.0) or transport.receive(0.0)  # the first may only report a `wake`
            due = runner.next_due()
            if received is not None or (due is not None and due <= self.clock.time):
                runner.process(received)
                happened = True
            if rank in self._workers:
                happened = self._workers[rank].advance(self.clock.time) or happened
        pending, self._pending[:] = list(self._pending), []
        for deliver in pending:
            deliver()
        return happened or bool(pending)

    def _next_times(self) -> Iterator[float]:
        for rank, runner in self.runners.items():
            if (due := runner.next_due()) is not None:
                yield due
            if rank in self._workers and (at := self._workers[rank].next_at) is not None:
                yield at
