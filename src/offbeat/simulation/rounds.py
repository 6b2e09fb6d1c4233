"""Rounds in virtual time: when a computation ends, and its gradient.

The gradient is computed when the round ends, so a round that a crash cuts short costs nothing, and a thousand
outstanding rounds hold references to parameters, not gradients. Small rounds are computed in groups, some of them
before they end; see `round_groups.py`.
"""

from __future__ import annotations

import dataclasses
import functools

from torch import Tensor

from offbeat.cluster.faults import Corrupt, Hang
from offbeat.core.actions import Compute, Evaluate
from offbeat.core.events import Evaluated, Event, GradientReady, StepReady
from offbeat.core.optimizers import Optimizer
from offbeat.engine.experiment import Experiment
from offbeat.engine.gradient_accumulator import GradientResult
from offbeat.engine.gradient_computer import GradientComputer, GradientRequest
from offbeat.errors import ContractViolation
from offbeat.records.schema import Round
from offbeat.simulation.evaluation_timing import EvaluationTiming
from offbeat.simulation.event_queue import EventQueue
from offbeat.simulation.leases import SentTensors
from offbeat.simulation.process import Process
from offbeat.simulation.round_groups import RoundGroups
from offbeat.simulation.round_timing import Computation
from offbeat.simulation.sample_orders import SampleOrders
from offbeat.simulation.simulation_records import SimulationRecords


class Rounds:
    """Carries out `Compute`, `Cancel` and `Evaluate`, and lets updates take time."""

    def __init__(
        self,
        experiment: Experiment,
        user_optimizer: Optimizer | None,
        queue: EventQueue,
        gradient_computer: GradientComputer,
        evaluations: EvaluationTiming,
        orders: SampleOrders,
        groups: RoundGroups | None,
        records: SimulationRecords,
        sent: SentTensors,
        initial: Tensor,
    ) -> None:
        """Nothing is computed yet.

        experiment: its seed and corrupt gradients.
        user_optimizer: each worker steps its own copy of it, as a user's loop would, and nodes get `StepReady`; None:
            they get gradients.
        queue: the clock.
        gradient_computer: differentiates and evaluates the model.
        evaluations: when evaluations end, and which rounds they slow down.
        orders: which samples belong to the draws of a rank.
        groups: computes gradients of several rounds together; None: each is computed by itself.
        records: receives the record of each round, and those of an evaluation.
        sent: tensors that are immutable since they have been sent; all others are copied.
        initial: the initial parameters, which are immutable too.
        """
        self._seed = experiment.seed
        self._user_optimizer = user_optimizer
        self._corruptions = [fault for fault in experiment.cluster.faults if isinstance(fault, Corrupt)]
        self._hangs = [fault for fault in experiment.cluster.faults if isinstance(fault, Hang)]
        self._queue = queue
        self._gradient_computer = gradient_computer
        self._evaluations = evaluations
        evaluations.schedule_round_end = self._schedule_end
        self._orders = orders
        self._groups = groups
        self._records = records
        self._sent = sent
        self._initial = initial

    def compute(self, process: Process, action: Compute) -> None:
        """Begin a round of a process that has none outstanding."""
        timing = process.speed.next_round(action.microbatch)
        samples = timing.samples(action.budget)
        now = self._queue.now
        snapshot = self._snapshot(action)
        version = snapshot.parameters._version
        process.computation = Computation(snapshot, timing, samples, now, now + timing.seconds(samples), version)
        for fault in self._hangs:
            if fault.rank == process.rank and fault.at_seconds <= now < fault.at_seconds + fault.seconds:
                self.hang(process.computation, fault.at_seconds + fault.seconds - now)
        self._evaluations.computing_began(process, process.computation)
        self._schedule_end(process, process.computation)
        if self._groups is not None:
            self._groups.begin(process, process.computation)

    def _snapshot(self, action: Compute) -> Compute:
        """Copy the parameters, unless they have been sent: those are immutable by contract."""
        if action.parameters in self._sent or action.parameters is self._initial:
            return action
        copied = tuple(buffer.clone() for buffer in action.buffers)
        return dataclasses.replace(action, parameters=action.parameters.clone(), buffers=copied)

    def _schedule_end(self, process: Process, computation: Computation) -> None:
        process.emit(computation.ends, functools.partial(self._end_of_round, process, computation))

    def _end_of_round(self, process: Process, computation: Computation, at: float) -> Event | None:
        """The event of a round that ends now; None if it was cancelled or extended meanwhile."""
        if process.computation is not computation:
            return None
        if computation.ends > at:  # the round was extended by a pause
            self._schedule_end(process, computation)
            return None
        return self._end_round(process, computation)

    def cancel(self, process: Process) -> None:
        """End the outstanding round of a process, if any, at the next micro-batch boundary."""
        computation, now = process.computation, self._queue.now
        if computation is None:
            return
        done = computation.done_seconds(now)
        samples = computation.timing.samples_when_cancelled(done, computation.samples)
        if samples >= computation.samples:
            return
        ends = max(now, computation.end_of(samples) if samples else 0.0, computation.hung_until)
        process.computation = dataclasses.replace(
            computation, samples=samples, ends=ends, cancelled=True, computed=None
        )
        self._schedule_end(process, process.computation)

    def _end_round(self, process: Process, computation: Computation) -> GradientReady | StepReady:
        action, samples, now = computation.action, computation.samples, self._queue.now
        if action.parameters._version != computation.parameters_version:
            raise ContractViolation(
                f"rank {process.rank} changed a tensor that it had sent, while its gradient was computed"
            )
        process.computation = None
        self._evaluations.computing_ended()
        process.speed.advance(samples)
        result = self._gradient(process, computation)
        seconds = now - computation.start
        record = Round(
            at=now,
            rank=process.rank,
            start=computation.start,
            seconds=seconds,
            induced_seconds=computation.timing.induced_seconds(samples, seconds),
            samples=samples,
            loss=result.loss,
            version=action.version,
            draws=(action.draw, action.draw + samples),
            idle_seconds=computation.start - process.free_since,
            send_seconds=process.send_seconds,
            finite=result.finite,
        )
        self._records.write(record)
        process.free_since = now
        event_type: type[GradientReady] | type[StepReady] = GradientReady
        value = result.gradient
        if self._user_optimizer is not None:
            event_type, value = StepReady, self._user_step(process, action.parameters, result.gradient, samples)
        statistics = (samples, result.loss, result.buffers, action.version, record.draws, seconds)
        return event_type(now, value, *statistics, record.induced_seconds, result.finite)

    def _gradient(self, process: Process, computation: Computation) -> GradientResult:
        result = None if self._groups is None else self._groups.gradient(process, computation)
        if result is None:
            action, key = computation.action, (self._seed, process.rank)
            order = self._orders.of(process)
            request = GradientRequest(order, action.draw, computation.samples, action.microbatch, key)
            result = self._gradient_computer.gradient(action.parameters, action.buffers, request)
        if self._corruptions and self._is_corrupt(process.rank):
            return result._replace(gradient=result.gradient.fill_(float("nan")), finite=False)
        return result

    def _is_corrupt(self, rank: int) -> bool:
        """Whether a fault makes the gradient of a round that ends now useless."""
        return any(
            fault.rank == rank and fault.at_seconds <= self._queue.now < fault.at_seconds + fault.seconds
            for fault in self._corruptions
        )

    def _user_step(self, process: Process, parameters: Tensor, gradient: Tensor, samples: int) -> Tensor:
        """The step of the worker's own optimizer for this gradient."""
        assert self._user_optimizer is not None
        layout = self._gradient_computer.flat.layout
        before = parameters.to(layout.dtype)  # it steps the parameters of the model, not the master values
        if process.stepper is None:
            parameters_copy = before.clone()
            process.stepper = self._user_optimizer.build(parameters_copy, layout), parameters_copy
        stepper, parameters_copy = process.stepper
        parameters_copy.copy_(before)
        stepper.step((gradient / max(1, samples)).to(layout.dtype), samples)
        return parameters_copy.to(layout.master_dtype) - before

    def evaluate(self, process: Process, action: Evaluate) -> None:
        """Evaluate now; the result arrives after the time that an evaluation takes."""
        measured = self._gradient_computer.evaluate(action.parameters, action.buffers, is_score=action.is_score)
        self._records.write_evaluation(self._queue.now)
        workload = self._gradient_computer.workload
        share = len(workload.validation) / len(workload.evaluation_examples) if action.is_score else 1.0
        self._evaluations.put(process, lambda at: Evaluated(at, action.version, *measured), share)

    def update(self, process: Process, seconds: float) -> None:
        """Let a process be busy with an update."""
        self._evaluations.updating(process, seconds)
        process.sleep(seconds)

    def pause(self, computation: Computation, seconds: float) -> None:
        """Extend a round by a pause. The time limit of a `Seconds` budget keeps running, so fewer samples may fit."""
        done = computation.done_seconds(self._queue.now)
        computation.paused += seconds
        computation.fit(done)

    def hang(self, computation: Computation, seconds: float) -> None:
        """Extend a round by a hang: as a pause, and `Cancel` does not end it."""
        self.pause(computation, seconds)
        computation.hung_until = self._queue.now + seconds
