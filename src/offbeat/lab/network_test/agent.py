"""What every rank of a network test does: it carries out the commands of rank 0 over its connections to all ranks.

How a flow is timed. The sender's clock runs from the moment it hands the block to its transport until it has the
acknowledgement, which the receiver sends as soon as it has the whole block; rank 0 subtracts half of a measured round
trip. So no two clocks are compared, and bytes in buffers count as not yet sent. An acknowledgement can wait behind a
block in its own direction, so where blocks go both ways over a link, only the longest time of the flows is right.

Blocks are verified after all flows of a step have ended, so that checksums slow no flow down.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from offbeat.core.events import MessageArrived, PeerJoined, PeerLost
from offbeat.core.messages import Message
from offbeat.errors import LinkLost, RunFailed
from offbeat.lab.network_test import protocol
from offbeat.transports.transport import Transport

POLL_SECONDS = 0.25
"""How often a wait is interrupted to check the local processes."""
ECHOES_MIN, ECHOES_MAX, ECHO_SECONDS = 3, 100, 1.0
"""Round trips of each pair, and for how long; the first fifth of them is not counted."""

CheckProcesses = Callable[[PeerLost | None], None]
"""Raises `RunFailed` where a local process has ended; it receives the lost link, if one is the reason for the check."""


class ReceiveTimeout(RunFailed):
    """No message arrived within the time limit."""


class Connections:
    """The connections of one rank to all others; messages to itself are queued. Every wait has a time limit.

    Args:
        transport: carries the messages; the caller closes it.
        rank: this rank.
        ranks: how many there are.
        check_processes: called while waiting, and when a link is lost.
    """

    def __init__(
        self, transport: Transport, rank: int, ranks: int, check_processes: CheckProcesses = lambda lost: None
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._transport, self._check_processes = transport, check_processes
        self._incarnations: dict[int, int] = {}
        self._queue: deque[tuple[int, Message]] = deque()

    @property
    def missing(self) -> list[int]:
        """The ranks without a link."""
        return [rank for rank in range(self.ranks) if rank != self.rank and rank not in self._incarnations]

    def connect(self, wait_seconds: float) -> None:
        """Wait for links to all ranks; messages that arrive meanwhile are queued."""
        deadline = time.monotonic() + wait_seconds
        while self.missing:
            if time.monotonic() >= deadline:
                names = ", ".join(map(str, self.missing))
                raise RunFailed(
                    f"rank {self.rank} waited {wait_seconds:g} s for a link to rank {names}; start every rank, or wait "
                    "longer with --wait SECONDS"
                )
            self._poll(min(POLL_SECONDS, deadline - time.monotonic()))

    def send(self, to: int, message: Message) -> None:
        if to == self.rank:
            self._queue.append((self.rank, message))
        else:
            self._transport.send(to, self._incarnations[to], message)

    def receive(self, timeout_seconds: float) -> tuple[int, Message]:
        """The next message and the rank that sent it. Raises `ReceiveTimeout`, and `LinkLost` for a lost peer.

        The test then fails: without this peer its measurements would be incomplete.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self._queue:
            if time.monotonic() >= deadline:
                raise ReceiveTimeout(f"rank {self.rank} received no message for {timeout_seconds:.0f} s")
            self._poll(POLL_SECONDS)
        return self._queue.popleft()

    def _poll(self, seconds: float) -> None:
        match self._transport.receive(max(0.0, seconds)):
            case MessageArrived(source=source, message=message):
                self._queue.append((source, message))
            case PeerJoined(peer=peer, incarnation=incarnation):
                self._incarnations[peer] = incarnation
            case PeerLost() as lost:
                self._check_processes(lost)
                raise LinkLost(lost.peer, lost.detail)
            case None:
                self._check_processes(None)


def describe_machine() -> protocol.RankReady:
    """The host name and the memory of this machine."""
    return protocol.RankReady(socket.gethostname(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


class Agent:
    """One rank. `serve` handles messages until rank 0 ends the test; rank 0 itself calls `handle`."""

    def __init__(self, connections: Connections) -> None:
        self._connections, self.rank = connections, connections.rank
        self._buffers: dict[int, Tensor] = {}
        self._command: protocol.PrepareBlocks | None = None
        self._outgoing: dict[int, protocol.DataBlock] = {}
        self._incoming: dict[int, protocol.DataBlock] = {}
        self._sent_at = 0.0
        self._acknowledged_seconds: dict[int, float] = {}
        self._latency_since = 0.0
        self._round_trips: list[float] = []

    def serve(self) -> None:
        """Carry out commands until `EndTest`. Raises `RunFailed` with the reason where the test failed.

        There is no time limit, since other ranks may be measured for long: rank 0 has one.
        """
        self._connections.send(0, describe_machine())
        while True:
            try:
                source, message = self._connections.receive(math.inf)
            except LinkLost as lost:
                if lost.peer == 0:
                    raise LinkLost(0, lost.why, f"rank {self.rank} lost rank 0 ({lost.why})") from None
                self._connections.send(0, protocol.LinkFailed(lost.peer, lost.why))
                continue
            if isinstance(message, protocol.EndTest):
                if message.failure:
                    raise RunFailed(message.failure)
                return
            self.handle(source, message)

    def handle(self, source: int, message: Message) -> None:
        """React to a command of rank 0 or to a message of a peer."""
        match message:
            case protocol.DataBlock():
                self._connections.send(source, protocol.BlockReceived())
                self._incoming[source] = message
            case protocol.BlockReceived():
                self._acknowledged_seconds[source] = time.perf_counter() - self._sent_at
                self._reply_when_acknowledged()
            case protocol.Echo(is_reply=False):
                self._connections.send(source, protocol.Echo(is_reply=True))
            case protocol.Echo():
                self._end_round_trip(source)
            case protocol.MeasureLatency(peer=peer):
                self._round_trips = []
                self._latency_since = time.perf_counter()
                self._begin_round_trip(peer)
            case protocol.PrepareBlocks():
                self._prepare(message)
            case protocol.SendBlocks(step=step):
                self._send_blocks(step)
            case protocol.VerifyBlocks():
                self._verify()
            case _:
                kind = type(message).__name__
                raise RunFailed(f"internal error: rank {source} sent {kind} to rank {self.rank}; please report it")

    # Latency

    def _begin_round_trip(self, peer: int) -> None:
        self._sent_at = time.perf_counter()
        self._connections.send(peer, protocol.Echo(is_reply=False))

    def _end_round_trip(self, peer: int) -> None:
        now = time.perf_counter()
        self._round_trips.append(now - self._sent_at)
        count = len(self._round_trips)
        if count < ECHOES_MIN or (count < ECHOES_MAX and now - self._latency_since < ECHO_SECONDS):
            self._begin_round_trip(peer)
        else:
            self._connections.send(0, protocol.StepReply(seconds=[statistics.median(self._round_trips[count // 5 :])]))

    # Blocks

    def _prepare(self, command: protocol.PrepareBlocks) -> None:
        self._command, self._acknowledged_seconds = command, {}
        self._incoming.clear()
        self._outgoing.clear()
        for destination in command.destinations:
            block = self._buffer(destination, command.elements)
            protocol.fill(block, (self.rank, destination), command.step)
            self._outgoing[destination] = protocol.DataBlock(command.step, protocol.checksum(block), block)
            if destination == command.corrupt:
                block[command.elements // 2] ^= 1
        self._connections.send(0, protocol.StepReply())

    def _buffer(self, destination: int, elements: int) -> Tensor:
        """Memory for a block; it is used again, since earlier blocks have been verified."""
        buffer = self._buffers.get(destination)
        if buffer is None or buffer.numel() < elements:
            self._buffers.pop(destination, None)
            buffer = self._buffers[destination] = torch.empty(elements, dtype=torch.int32)
        return buffer[:elements]

    def _send_blocks(self, step: int) -> None:
        if self._command is None or self._command.step != step:
            raise RunFailed(f"internal error: rank {self.rank} has not prepared step {step}; please report it")
        self._sent_at = time.perf_counter()
        for destination, block in self._outgoing.items():
            self._connections.send(destination, block)
        self._reply_when_acknowledged()

    def _reply_when_acknowledged(self) -> None:
        if self._acknowledged_seconds.keys() == self._outgoing.keys():
            seconds = [self._acknowledged_seconds[destination] for destination in self._outgoing]
            self._connections.send(0, protocol.StepReply(seconds=seconds))

    def _verify(self) -> None:
        command = self._command
        assert command is not None
        flaws = [
            protocol.flaw_of(self._incoming.get(source), command.elements, (source, self.rank), command.step)
            for source in command.sources
        ]
        self._incoming.clear()
        self._connections.send(0, protocol.StepReply(flaws=flaws))
