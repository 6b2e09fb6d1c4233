"""Rounds in virtual time: when a computation ends, and its gradient.

The gradient is computed when the round ends, so a round that a crash cuts short costs nothing, and a thousand
outstanding rounds hold references to parameters, not gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from offbeat.cluster.faults import Corrupt
from offbeat.core.actions import Compute, Evaluate, Seconds
from offbeat.core.events import Evaluated, Event, GradientReady, StepReady
from offbeat.core.examples import Order
from offbeat.engine.gradient_computer import GradientRequest
from offbeat.errors import ContractViolation
from offbeat.records.schema import Consensus, Round
from offbeat.simulation.delivery import Delivery
from offbeat.simulation.round_timing import Computation, RoundTiming
from offbeat.simulation.state import Process, SimulationState


class Rounds:
    """Carries out `Compute`, `Cancel` and `Evaluate`."""

    def __init__(self, state: SimulationState, delivery: Delivery) -> None:
        self._state = state
        self._delivery = delivery
        self._orders: dict[int, Order] = {}

    def compute(self, rank: int, action: Compute) -> None:
        process = self._state.processes[rank]
        if process.worker is None:
            raise ContractViolation(f"rank {rank} asked for Compute, but its strategy says that it does not compute")
        if process.computation is not None:
            raise ContractViolation(f"rank {rank} asked for a second Compute while one was outstanding")
        delay, natural_speed = next(process.round_delays), process.natural_speed
        timing = RoundTiming(process.speed, delay, action.microbatch, process.position, natural_speed)
        samples = timing.samples(action.budget)
        ends = self._state.now + timing.seconds(samples)
        snapshot = self._snapshot(action)
        computation = Computation(snapshot, timing, samples, self._state.now, ends, snapshot.parameters._version)
        process.computation = computation
        self._schedule_end(rank, computation)

    def _snapshot(self, action: Compute) -> Compute:
        """Copy the parameters, unless they have been sent: those are immutable by contract."""
        if action.parameters in self._delivery.sent or action.parameters is self._state.initial:
            return action
        return Compute(
            action.parameters.clone(),
            tuple(buffer.clone() for buffer in action.buffers),
            action.version,
            action.draw,
            action.budget,
            action.microbatch,
        )

    def _schedule_end(self, rank: int, computation: Computation) -> None:
        def event(at: float) -> Event | None:
            if self._state.processes[rank].computation is not computation:
                return None
            if computation.ends > at:  # the round was extended by a pause
                self._schedule_end(rank, computation)
                return None
            return self._end_round(rank, computation)

        self._state.emit(computation.ends, rank, event)

    def cancel(self, rank: int) -> None:
        process, computation = self._state.processes[rank], self._state.processes[rank].computation
        if computation is None:
            return
        computed = self._state.now - computation.start - computation.paused
        samples = computation.timing.samples_when_cancelled(computed, computation.samples)
        if samples >= computation.samples:
            return
        ends = computation.start + computation.paused + computation.timing.seconds(samples) if samples else 0.0
        process.computation = dataclasses.replace(computation, samples=samples, ends=max(self._state.now, ends))
        self._schedule_end(rank, process.computation)

    def _end_round(self, rank: int, computation: Computation) -> GradientReady | StepReady:
        process, action, now = self._state.processes[rank], computation.action, self._state.now
        if action.parameters._version != computation.parameters_version:
            raise ContractViolation(f"rank {rank} changed a tensor that it had sent, while its gradient was computed")
        process.computation = None
        process.position += computation.samples
        key = (self._state.scenario.seed, rank)
        request = GradientRequest(self._order(rank), action.draw, computation.samples, action.microbatch, key)
        result = self._state.gradient_computer.gradient(action.parameters, action.buffers, request)
        gradient, finite = result.gradient, result.finite
        if self._is_corrupt(rank):
            gradient, finite = gradient.fill_(float("nan")), False
        draws = (action.draw, action.draw + computation.samples)
        seconds = now - computation.start
        induced = computation.timing.induced_seconds(computation.samples, seconds)
        self._state.writer.write(
            Round(
                at=now,
                rank=rank,
                start=computation.start,
                seconds=seconds,
                induced_seconds=induced,
                samples=computation.samples,
                loss=result.loss,
                version=action.version,
                draws=draws,
                idle_seconds=computation.start - process.free_since,
                send_seconds=process.send_seconds,
                finite=finite,
            )
        )
        process.free_since = now
        if self._state.scenario.user_optimizer is not None:
            event_type, value = StepReady, self._user_step(process, action.parameters, gradient, computation.samples)
        else:
            event_type, value = GradientReady, gradient  # type: ignore[assignment]
        samples, loss, buffers, version = computation.samples, result.loss, result.buffers, action.version
        return event_type(now, value, samples, loss, buffers, version, draws, seconds, induced, finite)

    def _user_step(self, process: Process, parameters: Tensor, gradient: Tensor, samples: int) -> Tensor:
        """The step of the worker's own optimizer for this gradient."""
        assert self._state.scenario.user_optimizer is not None
        if process.stepper is None:
            parameters_copy, layout = parameters.clone(), self._state.gradient_computer.flat.layout
            process.stepper = self._state.scenario.user_optimizer.build(parameters_copy, layout), parameters_copy
        stepper, parameters_copy = process.stepper
        parameters_copy.copy_(parameters)
        stepper.step(gradient / max(1, samples), samples)
        return parameters_copy - parameters

    def _is_corrupt(self, rank: int) -> bool:
        faults = (f for f in self._state.scenario.cluster.faults if isinstance(f, Corrupt) and f.rank == rank)
        return any(fault.at_seconds <= self._state.now < fault.at_seconds + fault.seconds for fault in faults)

    def evaluate(self, rank: int, action: Evaluate) -> None:
        measured = self._state.gradient_computer.evaluate(action.parameters, action.buffers)
        self.record_consensus(self._state.now, (process for process in self._state.processes if process.active))
        self._delivery.record_traffic(self._state.now)
        self._state.emit(self._state.now, rank, lambda at: Evaluated(at, action.version, *measured))

    def record_consensus(self, at: float, processes: Iterable[Process]) -> None:
        """Record the consensus distance of these processes, if at least two of them have replicas."""
        replicas = [replica for process in processes if (replica := _replica(process)) is not None]
        if len(replicas) < 2:
            return
        distance = consensus_distance(replicas)
        if math.isfinite(distance):
            self._state.writer.write(Consensus(at=at, peers=len(replicas), distance=distance))

    def _order(self, rank: int) -> Order:
        if rank not in self._orders:
            workload, seed = self._state.scenario.workload, self._state.scenario.seed
            worker = self._state.computing_ranks.index(rank)
            indices = workload.split.indices(workload.train.targets, worker, len(self._state.computing_ranks), seed)
            self._orders[rank] = Order(indices, seed, rank)
        return self._orders[rank]

    def pause(self, computation: Computation, seconds: float) -> None:
        """Extend a round by a pause. The time limit of a `Seconds` budget keeps running, so fewer samples may fit."""
        budget, done = computation.action.budget, self._state.now - computation.start - computation.paused
        computation.paused += seconds
        if isinstance(budget, Seconds):
            left = max(budget.seconds - computation.paused, done, 1e-9)
            samples = computation.timing.samples(Seconds(left, samples_max=budget.samples_max))
            computation.samples = min(computation.samples, samples)
        computation.ends = computation.start + computation.paused + computation.timing.seconds(computation.samples)


def _replica(process: Process) -> Tensor | None:
    """The replica of a process; if it has finished, the parameters that it finished with."""
    replica = process.node.replica()
    return replica if replica is None or process.finish is None else process.finish.parameters


def consensus_distance(replicas: Sequence[Tensor]) -> float:
    """The mean of ‖x_i − mean of x‖², in one pass and float64; exactly 0 if all are equal.

    Differences from the first replica are summed instead of the replicas, against cancellation.
    """
    first = replicas[0].double()
    total, difference = torch.zeros_like(first), torch.empty_like(first)
    squares = 0.0
    for replica in replicas[1:]:
        difference.copy_(replica).sub_(first)
        total += difference
        squares += float(difference @ difference)
    mean = total / len(replicas)
    distance = squares / len(replicas) - float(mean @ mean)
    return 0.0 if distance < 0 else distance  # negative by rounding; NaN stays NaN
