"""What rank 0 of a network test does in addition: it commands one step after the other and collects the results."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from offbeat.core.messages import Message
from offbeat.core.validation import require
from offbeat.errors import OffbeatError, RunFailed
from offbeat.lab.network_test import protocol
from offbeat.lab.network_test.agent import Agent, Connections, ReceiveTimeout, describe_machine
from offbeat.lab.network_test.plan import LATENCY, PAIR, NetworkTest, Step, elements_that_fit, steps_of
from offbeat.lab.network_test.result import Measurements, NetworkResult

OnStep = Callable[[str, float], None]
"""Called before each step with its kind and the share of the test that is done."""

TIMEOUT_SECONDS = 60.0
"""The longest wait for a message while no block is on its way."""
LOSS_SECONDS = 2.0
"""Within this time every transport reports a closed connection."""
BYTES_PER_SECOND_MIN = 1e5
"""The time limit for blocks assumes at least this bandwidth of a rank."""

Reply = TypeVar("Reply", bound=Message)


def check_memory(test: NetworkTest, machines: Iterable[protocol.RankReady], ranks: int) -> None:
    """Raise `ConfigurationError` where blocks do not fit into the memory of a machine; `machines` has one per rank."""
    counts = Counter((machine.host, machine.memory_bytes) for machine in machines)
    for (host, memory_bytes), count in counts.items():
        fitting = elements_that_fit(memory_bytes, count, ranks)
        require(
            test.elements <= fitting,
            f"blocks of {test.elements} elements do not fit into the memory of {host}, where {count} of "
            f"{ranks} ranks are; type --elements {fitting} or less",
        )


class Controller:
    """Rank 0. It is an agent as well and receives its own commands like any other rank."""

    def __init__(self, connections: Connections, test: NetworkTest, on_step: OnStep) -> None:
        self._connections, self._test, self._on_step = connections, test, on_step
        self._agent = Agent(connections)
        self._measurements = Measurements()
        self._corrupt = test.corrupt
        largest_bytes = test.elements * protocol.ELEMENT_BYTES * connections.ranks * 2
        self._timeout_seconds = TIMEOUT_SECONDS + largest_bytes / BYTES_PER_SECOND_MIN

    def run(self, transport: str) -> NetworkResult:
        """Run all steps over the transport of this name. A failure is sent to all ranks and raised."""
        began = time.perf_counter()
        try:
            hosts = self._gather_hosts()
            steps = steps_of(self._test, self._connections.ranks)
            total, done = sum(step.weight for step in steps), 0.0
            for step in steps:
                self._on_step(step.kind, done / total)
                self._measure(step)
                done += step.weight
        except OffbeatError as error:
            self._end(str(error))
            raise
        self._end("")
        return self._measurements.result(self._test, transport, hosts, time.perf_counter() - began)

    def _gather_hosts(self) -> list[str]:
        """Wait for all ranks, and check that blocks fit into their memory."""
        ranks = self._connections.ranks
        self._connections.send(0, describe_machine())
        machines = self._collect(protocol.RankReady, range(ranks), TIMEOUT_SECONDS)
        check_memory(self._test, machines.values(), ranks)
        return [machines[rank].host for rank in range(ranks)]

    def _measure(self, step: Step) -> None:
        if step.kind == LATENCY:
            ((source, destination),) = step.flows
            reply = self._command({source: protocol.MeasureLatency(destination)})[source]
            self._measurements.latency[source, destination] = reply.seconds[0] / 2
            return
        # Rank 0 is last: the blocks that it sends must not delay commands to others.
        ranks = sorted({rank for flow in step.flows for rank in flow}, reverse=True)
        self._command({rank: self._preparation(step, rank) for rank in ranks})
        timed = self._command(dict.fromkeys(ranks, protocol.SendBlocks(step.number)))
        self._measurements.add_seconds(
            step, {rank: dict(zip(_destinations(step, rank), timed[rank].seconds, strict=True)) for rank in ranks}
        )
        verified = self._command(dict.fromkeys(ranks, protocol.VerifyBlocks()))
        for rank in ranks:
            self._measurements.add_flaws(rank, zip(_sources(step, rank), verified[rank].flaws, strict=True))

    def _preparation(self, step: Step, rank: int) -> protocol.PrepareBlocks:
        corrupt = None
        if step.kind == PAIR and step.flows == (self._corrupt,) and rank == step.flows[0][0]:
            corrupt, self._corrupt = step.flows[0][1], None
        destinations, sources = _destinations(step, rank), _sources(step, rank)
        return protocol.PrepareBlocks(step.number, step.elements, destinations, sources, corrupt)

    def _command(self, commands: Mapping[int, Message]) -> dict[int, protocol.StepReply]:
        """Send a command to each of these ranks, in order, and wait for their replies."""
        for rank, command in commands.items():
            self._connections.send(rank, command)
        return self._collect(protocol.StepReply, commands, self._timeout_seconds)

    def _collect(self, kind: type[Reply], ranks: Iterable[int], timeout_seconds: float) -> dict[int, Reply]:
        """One message of this kind from each rank; other messages are for the agent of this rank."""
        replies: dict[int, Reply] = {}
        awaited = set(ranks)
        while awaited:
            source, message = self._connections.receive(timeout_seconds)
            if isinstance(message, protocol.LinkFailed):
                self._await_own_loss()
                raise RunFailed(f"rank {source} lost its link to rank {message.peer} ({message.why})")
            if isinstance(message, kind):
                replies[source] = message
                awaited.discard(source)
            else:
                self._agent.handle(source, message)
        return replies

    def _await_own_loss(self) -> None:
        """Another rank may notice a dead rank first. The error of this rank's own link, if it breaks too, says more."""
        deadline = time.monotonic() + LOSS_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(ReceiveTimeout):
                self._connections.receive(deadline - time.monotonic())

    def _end(self, failure: str) -> None:
        for rank in range(1, self._connections.ranks):
            if rank not in self._connections.missing:
                self._connections.send(rank, protocol.EndTest(failure))


def _destinations(step: Step, rank: int) -> list[int]:
    return [destination for source, destination in step.flows if source == rank]


def _sources(step: Step, rank: int) -> list[int]:
    return [source for source, destination in step.flows if destination == rank]
