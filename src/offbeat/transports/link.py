"""What all links have in common, however their bytes travel: options, losses, encoding, and reading of messages."""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.core.events import LossReason, MessageArrived, Sent
from offbeat.core.memory_pool import Pool
from offbeat.core.run_identity import RunIdentity
from offbeat.core.wire_size import HEAD_BYTES
from offbeat.errors import ContractViolation
from offbeat.transports import wire
from offbeat.transports.link_protocol import LinkProtocol, Outgoing
from offbeat.transports.transport import MESSAGE_BYTES_MAX, SILENCE_SECONDS, InboxItem


class LinkLoss(NamedTuple):
    """Why a link ends; `detail` is for logs and error messages."""

    reason: LossReason
    detail: str


CLOSED = LinkLoss(LossReason.CLOSED, "closed")
CLOSED_HERE = LinkLoss(LossReason.LOCAL, "closed by this side")


class ConnectionLost(ConnectionError):
    """A connection cannot be used any more."""

    def __init__(self, reason: LossReason, detail: str) -> None:
        super().__init__(detail)
        self.loss = LinkLoss(reason, detail)


def loss_of(error: BaseException) -> LinkLoss | None:
    """The loss that an error means; None for an internal error."""
    if isinstance(error, ConnectionLost):
        return error.loss
    if isinstance(error, wire.WireError):
        return LinkLoss(LossReason.INVALID, str(error))
    return None


def different_versions(rank: int, version: int, own_version: int) -> str:
    """The sentence for a process that reached a rank with another version of the wire format."""
    return (
        f"rank {rank} uses version {version} of the wire format, but this process version {own_version}; install the "
        "same offbeat everywhere"
    )


def difference(rank: int, own: RunIdentity, peer: int, theirs: RunIdentity) -> str | None:
    """The sentence for two ranks that cannot be in one run, the same at both ends; None if they can."""
    low, high = min(rank, peer), max(rank, peer)
    expected, other = (own, theirs) if rank < peer else (theirs, own)
    if other.model != expected.model:
        return (
            f"rank {high} has a different model: its fingerprint is {other.model}, that of rank {low} is "
            f"{expected.model}; every rank must build the same model"
        )
    if other.strategy != expected.strategy:
        return (
            f"rank {high} has a different strategy: {other.strategy}, and rank {low} has {expected.strategy}; give "
            "every rank the same strategy"
        )
    return None


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Settings of all links of a transport."""

    silence_seconds: float = SILENCE_SECONDS
    """A peer from which nothing was received for so long is lost."""
    checksum: bool = False
    """Send a checksum with every message."""
    shared_memory: bool = True
    """Use shared memory between processes of one machine, where the transport can."""
    first_incarnation: int = 0
    """The incarnation of the first link to each peer, where ranks can come back."""


class LinkBase(ABC):
    """One incarnation of a link. Subclasses move the bytes, and own the lock that guards `_protocol`."""

    def __init__(
        self,
        peer: int,
        incarnation: int,
        options: LinkOptions,
        pool: Pool,
        deliver: Callable[[InboxItem], None],
    ) -> None:
        """`deliver` puts an event, or the error of a message that cannot be encoded, into the transport's inbox."""
        self.peer = peer
        self.incarnation = incarnation
        self._options = options
        self._pool = pool
        self._deliver = deliver
        self._protocol = LinkProtocol(options.silence_seconds, time.monotonic())

    # Sending

    def _encode(self, outgoing: Outgoing) -> wire.Encoded | None:
        """None for a message that cannot be encoded: its sender gets the error, and the link stays."""
        if outgoing.encoded is None:
            try:
                outgoing.encoded = wire.encode(outgoing.message, self._options.checksum)
            except ContractViolation as error:
                self._deliver(error)
        return outgoing.encoded

    def _report_sent(self, encoded: wire.Encoded, key: str | None, begun: float) -> None:
        seconds = time.perf_counter() - begun
        self._deliver(
            functools.partial(
                Sent, to=self.peer, key=key, incarnation=self.incarnation, size=encoded.size, seconds=seconds
            )
        )

    # Receiving

    def _read(self) -> Iterator[Iterable[Tensor]]:
        """Yields the memory to fill next, and continues when it is filled; ends after a goodbye."""
        raw = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        while True:
            yield [raw]
            head = wire.read_head(raw, MESSAGE_BYTES_MAX)
            self._on_acknowledgement(head.acknowledged)
            if head.kind == wire.GOODBYE:
                return
            if head.kind == wire.MESSAGE:
                yield from self._read_message(head)
            elif head.kind == wire.SLOT:
                self._on_slot(head)

    def _read_message(self, head: wire.Head) -> Iterator[Iterable[Tensor]]:
        # A generator of its own, so that the payload is not referenced while the link waits for the next head.
        meta, nbytes = head.meta, HEAD_BYTES + head.payload_bytes
        if meta is None:
            rest = torch.empty(head.meta_bytes, dtype=torch.uint8)
            yield [rest]
            meta = rest.numpy().tobytes()
            nbytes += head.meta_bytes
        announced = wire.read_meta(head, meta)
        payload = yield from self._read_payload(head, announced.tensor_sizes)
        message = wire.decode(announced, payload)
        self._deliver(
            functools.partial(
                MessageArrived,
                source=self.peer,
                message=message,
                keep=lambda: message,
                incarnation=self.incarnation,
                nbytes=nbytes,
            )
        )

    @abstractmethod
    def _read_payload(self, head: wire.Head, sizes: list[int]) -> Generator[Iterable[Tensor], None, Tensor]:
        """Yield the memory to fill, in pieces, and return the whole; `sizes` are those of the tensors."""

    @abstractmethod
    def _on_acknowledgement(self, count: int) -> None:
        """The peer has received `count` messages so far."""

    def _on_slot(self, head: wire.Head) -> None:  # noqa: B027 (not abstract on purpose)
        """The peer offers a slot of shared memory; links that share none ignore it."""
