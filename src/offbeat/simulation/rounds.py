"""Rounds in virtual time: when a computation ends, and what it yields.

The gradient is computed when the round ends. A round that a crash cuts short then costs nothing, and a thousand
outstanding ones hold references to parameters, not gradients.
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
from offbeat.errors import ContractViolation
from offbeat.records.schema import Consensus, Round
from offbeat.simulation.delivery import Delivery
from offbeat.simulation.gradients import GradientRequest
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
        timing = RoundTiming(process.speed, next(process.round_delays), action.microbatch, process.position)
        samples = timing.samples(action.budget)
        ends = self._state.now + timing.seconds(samples)
        snapshot = self._snapshot(action)
        computation = Computation(snapshot, timing, samples, self._state.now, ends, snapshot.parameters._version)
        process.computation = computation
        self._compute_ends(rank, computation)

    def _snapshot(self, action: Compute) -> Compute:
        """The values as they are now. A tensor that has been sent is immutable by contract and need not be copied."""
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

    def _compute_ends(self, rank: int, computation: Computation) -> None:
        def event(at: float) -> Event | None:
            if self._state.processes[rank].computation is not computation:
                return None
            if computation.ends > at:  # it was paused
                self._compute_ends(rank, computation)
                return None
            return self._computed(rank, computation)

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
        self._compute_ends(rank, process.computation)

    def _computed(self, rank: int, computation: Computation) -> GradientReady | StepReady:
        process, action = self._state.processes[rank], computation.action
        if action.parameters._version != computation.parameters_version:
            raise ContractViolation(f"rank {rank} changed a tensor that it had sent, while it was differentiated at")
        process.computation = None
        process.position += computation.samples
        batches = GradientRequest(
            self._order(rank),
            action.draw,
            computation.samples,
            action.microbatch,
            (self._state.scenario.seed, rank),
        )
        result = self._state.gradient_computer.gradient(action.parameters, action.buffers, batches)
        gradient, finite = result.gradient, result.finite
        if self._is_corrupt(rank):
            gradient, finite = gradient.fill_(float("nan")), False
        draws = (action.draw, action.draw + computation.samples)
        induced = min(computation.timing.round_delay.delay_seconds, self._state.now - computation.start)
        self._state.writer.write(
            Round(
                at=self._state.now,
                rank=rank,
                start=computation.start,
                seconds=self._state.now - computation.start,
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
        process.free_since = self._state.now
        if self._state.scenario.user_optimizer is not None:
            kind, value = StepReady, self._user_step(process, action.parameters, gradient, computation.samples)
        else:
            kind, value = GradientReady, gradient  # type: ignore[assignment]
        return kind(
            self._state.now,
            value,
            computation.samples,
            result.loss,
            result.buffers,
            action.version,
            draws,
            self._state.now - computation.start,
            induced,
            finite,
        )

    def _user_step(self, process: Process, parameters: Tensor, gradient: Tensor, samples: int) -> Tensor:
        """The change that the worker's own optimizer makes of this gradient."""
        assert self._state.scenario.user_optimizer is not None
        if process.stepper is None:
            own = parameters.clone()
            process.stepper = (
                self._state.scenario.user_optimizer.build(own, self._state.gradient_computer.flat.layout),
                own,
            )
        stepper, own = process.stepper
        own.copy_(parameters)
        stepper.step(gradient / max(1, samples), samples)
        return own - parameters

    def _is_corrupt(self, rank: int) -> bool:
        faults = (f for f in self._state.scenario.cluster.faults if isinstance(f, Corrupt) and f.rank == rank)
        return any(fault.at_seconds <= self._state.now < fault.at_seconds + fault.seconds for fault in faults)

    def evaluate(self, rank: int, action: Evaluate) -> None:
        measured = self._state.gradient_computer.evaluate(action.parameters, action.buffers)
        self.record_consensus(self._state.now, (process for process in self._state.processes if process.active))
        self._delivery.record_traffic(self._state.now)
        self._state.emit(self._state.now, rank, lambda at: Evaluated(at, action.version, *measured))

    def record_consensus(self, at: float, processes: Iterable[Process]) -> None:
        """Write down how far these are apart, where two of them or more have parameters of their own."""
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

    def hold_up(self, computation: Computation, seconds: float) -> None:
        """A pause adds to the round. The clock of a time limit runs on meanwhile, so what is left of it shrinks."""
        budget, done = computation.action.budget, self._state.now - computation.start - computation.paused
        computation.paused += seconds
        if isinstance(budget, Seconds):
            left = max(budget.seconds - computation.paused, done, 1e-9)
            samples = computation.timing.samples(Seconds(left, samples_max=budget.samples_max))
            computation.samples = min(computation.samples, samples)
        computation.ends = computation.start + computation.paused + computation.timing.seconds(computation.samples)


def _replica(process: Process) -> Tensor | None:
    """The parameters that a process has as its own; of one that has finished, those that it finished with."""
    replica = process.node.replica()
    return replica if replica is None or process.finish is None else process.finish.parameters


def consensus_distance(replicas: Sequence[Tensor]) -> float:
    """The mean of ‖x_i − mean of x‖², in one pass and float64; exactly 0 where all are equal.

    Differences from the first replica are summed, not the replicas: what all have in common costs no digits.
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
    return 0.0 if distance < 0 else distance  # by rounding; what is not a number stays so
