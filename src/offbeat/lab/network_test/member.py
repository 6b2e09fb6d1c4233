"""What every rank of a probe does: it answers echoes, sends blocks when it is told to, and looks at those that come.

How a flow is timed. The clock of the sender runs from the moment it hands the block to its transport until a small
receipt is back, which the receiver sends as soon as it has the whole block; half a round trip, measured before, is
taken off by rank 0. So no two clocks are compared, and what lies in buffers or in a window on the way counts as not yet
sent. A receipt can wait behind a block that goes in its own direction. Then it comes when that one is through, so of
several flows at once the longest time is right where blocks go both ways, and each one's where they do not.

Blocks are looked at when all flows of a step are over, so that nobody's checksum slows somebody's flow.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import time

import torch
from torch import Tensor

from offbeat.core.messages import Message
from offbeat.errors import RunFailed
from offbeat.lab.network_test import blocks
from offbeat.lab.network_test.mail import LOST_RANK_0, LinkLost, Mail
from offbeat.lab.network_test.messages import (
    ProbeBlock,
    ProbeEcho,
    ProbeGo,
    ProbeOver,
    ProbePing,
    ProbePinged,
    ProbePrepare,
    ProbePrepared,
    ProbePresent,
    ProbeReceipt,
    ProbeTimed,
    ProbeTrouble,
    ProbeVerified,
    ProbeVerify,
)
from offbeat.lab.network_test.plan import ECHO_SECONDS, ECHOES


def present() -> ProbePresent:
    """This machine, as rank 0 wants to know it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ProbePresent(socket.gethostname(), memory)


class Member:
    """One rank. `handle` takes what came; `serve` does so until rank 0 says that it is over."""

    def __init__(self, mail: Mail) -> None:
        self._mail, self.rank = mail, mail.rank
        self._outgoing: dict[int, Tensor] = {}
        self._order: ProbePrepare | None = None
        self._sums: dict[int, int] = {}
        self._began = 0.0
        self._receipts: dict[int, float] = {}
        self._came: dict[int, ProbeBlock] = {}
        self._echoes: list[float] = []

    def serve(self) -> None:
        """Follow orders until the last one; RunFailed says why where it went wrong.

        There may be no order for a long time, while others are measured; it is rank 0 that loses patience.
        """
        self._mail.send(0, present())
        while True:
            try:
                source, message = self._mail.next(math.inf)
            except LinkLost as lost:
                if lost.peer == 0:
                    raise RunFailed(f"rank {self.rank} {LOST_RANK_0} ({lost.why})") from None
                self._mail.send(0, ProbeTrouble(lost.peer, lost.why))
                continue
            if isinstance(message, ProbeOver):
                if message.failure:
                    raise RunFailed(message.failure)
                return
            self.handle(source, message)

    def handle(self, source: int, message: Message) -> None:
        """React to one message of a peer, or of rank 0."""
        if isinstance(message, ProbeBlock):
            self._mail.send(source, ProbeReceipt(message.step))
            self._came[source] = message
        elif isinstance(message, ProbeReceipt):
            self._receipt(source)
        elif isinstance(message, ProbeEcho):
            self._echo(source, message)
        elif isinstance(message, ProbePing):
            self._echoes = []
            self._began = time.perf_counter()
            self._send_echo(message.peer, message.step)
        elif isinstance(message, ProbePrepare):
            self._prepare(message)
        elif isinstance(message, ProbeGo):
            self._go(message.step)
        elif isinstance(message, ProbeVerify):
            self._verify(message.step)
        else:
            raise RunFailed(f"rank {source} said {type(message).__name__} to rank {self.rank}, which means nothing")

    # Latency

    def _send_echo(self, peer: int, step: int) -> None:
        self._echoes.append(time.perf_counter())
        self._mail.send(peer, ProbeEcho(step, back=False))

    def _echo(self, peer: int, message: ProbeEcho) -> None:
        if not message.back:
            self._mail.send(peer, ProbeEcho(message.step, back=True))
            return
        now = time.perf_counter()
        self._echoes[-1] = now - self._echoes[-1]
        if len(self._echoes) < ECHOES and (now - self._began < ECHO_SECONDS or len(self._echoes) < 3):
            self._send_echo(peer, message.step)
            return
        counted = self._echoes[len(self._echoes) // 5 :]
        self._mail.send(0, ProbePinged(message.step, statistics.median(counted)))

    # Blocks

    def _prepare(self, order: ProbePrepare) -> None:
        self._order, self._receipts = order, {}
        self._came.clear()
        for destination in order.destinations:
            block = self._block(destination, order.elements)
            blocks.fill(block, self.rank, destination, order.step)
            self._sums[destination] = blocks.checksum(block)
            if destination == order.corrupt:
                block[order.elements // 2] ^= 1
        self._mail.send(0, ProbePrepared(order.step))

    def _block(self, destination: int, elements: int) -> Tensor:
        """Memory for what goes there; it is used again, since a block that was verified is of no interest any more."""
        held = self._outgoing.get(destination)
        if held is None or held.numel() < elements:
            self._outgoing.pop(destination, None)
            held = self._outgoing[destination] = torch.empty(elements, dtype=torch.int32)
        return held[:elements]

    def _go(self, step: int) -> None:
        order = self._order
        if order is None or order.step != step:
            raise RunFailed(f"rank {self.rank} was told to begin step {step} without being told what it is")
        self._began = time.perf_counter()
        for destination in order.destinations:
            block = self._block(destination, order.elements)
            self._mail.send(destination, ProbeBlock(step, self.rank, destination, self._sums[destination], block))
        self._all_received()

    def _receipt(self, source: int) -> None:
        self._receipts[source] = time.perf_counter() - self._began
        self._all_received()

    def _all_received(self) -> None:
        order = self._order
        if order is not None and len(self._receipts) == len(order.destinations):
            self._mail.send(0, ProbeTimed(order.step, [self._receipts[rank] for rank in order.destinations]))

    def _verify(self, step: int) -> None:
        order = self._order
        assert order is not None
        flaws = [self._flaw(source, order) for source in order.sources]
        self._came.clear()
        self._mail.send(0, ProbeVerified(step, flaws))

    def _flaw(self, source: int, order: ProbePrepare) -> str:
        came = self._came.get(source)
        if came is None:
            return "no block came"
        if (came.step, came.source, came.destination) != (order.step, source, self.rank):
            return "it is another block than was asked for"
        return blocks.flaw(came.block, came.checksum, order.elements, source, self.rank, order.step) or ""
