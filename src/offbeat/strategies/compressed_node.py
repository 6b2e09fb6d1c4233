"""Compression of any strategy's messages: a node around the node, which does not know of it.

What the inner node sends leaves with the tensors coded that the message declares; what arrives is decoded before the
inner node sees it. The coded tensor takes the place of the other in the same message, so engines, wire and transports
need not know. A message declares

    increments   gradients, differences: what the code loses is kept in a residual, per peer, kind of message, field
                 and `residual_key_fields`, and is added to the next one
    values       parameters: no residual; top-k leaves them as they are
    conveyed     what the node has put through the compression itself, so that there is nothing left to lose

Everything else travels exactly, above all Stop, so that all end with the same bits.
Residuals are part of the state. Those towards a peer are dropped when it is lost, since whoever comes back begins anew.
An increment that is superseded before it has left takes what was coded into it along; no strategy here does that.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from offbeat.core.actions import Action, Send
from offbeat.core.compression import Compression, decode, is_encoded
from offbeat.core.events import Event, MessageArrived, PeerLost, Started
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Message
from offbeat.core.strategy import Node, NodeContext, State, Strategy

_Key = tuple[int, str, str, tuple[Any, ...]]
"""peer, kind of message, field, values of `residual_key_fields`"""


def build_node(strategy: Strategy, context: NodeContext) -> Node:
    """The node of `context.rank`, its messages compressed where the strategy says so. Engines make nodes by this."""
    node = strategy.node(context)
    return node if strategy.compression is None else CompressedNode(node, strategy.compression, context.parameters)


class CompressedNode(Node):
    def __init__(self, inner: Node, compression: Compression, parameters: Tensor) -> None:
        """`parameters` says where vectors belong, and how long one can be at the most."""
        self._inner = inner
        self._compression = compression
        self._device = parameters.device
        self._numel_max = parameters.numel()
        self._pool = Pool()
        self._residuals: dict[_Key, Tensor] = {}
        self._coded: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        """Values that are coded already, by identity: one snapshot goes to many peers."""

    def handle(self, event: Event) -> Iterable[Action]:
        if isinstance(event, PeerLost):
            self._residuals = {key: kept for key, kept in self._residuals.items() if key[0] != event.peer}
        elif isinstance(event, Started):
            self._residuals = {}  # a process that goes on from a checkpoint knows nobody yet
        elif isinstance(event, MessageArrived):
            event = self._decoded(event)
        return self._compressed(self._inner.handle(event))

    def replica(self) -> Tensor | None:
        return self._inner.replica()

    # Out

    def _compressed(self, actions: Iterable[Action]) -> Iterator[Action]:
        for action in actions:
            yield self._encoded(action) if isinstance(action, Send) else action

    def _encoded(self, send: Send) -> Send:
        message, changes = send.message, {}
        for name in message.increments:
            parts = tuple(getattr(message, part) for part in message.residual_key_fields)
            changes[name] = self._increment((send.to, type(message).__name__, name, parts), getattr(message, name))
        for name in message.roundtrip:
            changes[name] = self._compression.encode(getattr(message, name).cpu(), self._pool)
        if self._compression.encodes_values:
            for name in message.values:
                changes[name] = self._value(getattr(message, name))
        if not changes:
            return send
        return dataclasses.replace(send, message=dataclasses.replace(message, **changes))

    def _increment(self, key: _Key, vector: Tensor) -> Tensor:
        if not self._compression.keeps_residual or vector.numel() == 0:
            return self._compression.encode(vector.cpu(), self._pool)
        residual = self._residuals.get(key)
        if residual is None or residual.numel() != vector.numel() or residual.dtype is not vector.dtype:
            residual = self._residuals[key] = torch.zeros_like(vector, device="cpu")
        return self._compression.encode(vector.cpu(), self._pool, residual)

    def _value(self, vector: Tensor) -> Tensor:
        identity = id(vector)
        found = self._coded.get(identity)
        if found is not None and found[0]() is vector and found[1] == vector._version:
            return found[2]
        blob = self._compression.encode(vector.cpu(), self._pool)
        if blob is vector:
            return blob
        forget = self._coded.pop
        self._coded[identity] = weakref.ref(vector, lambda _: forget(identity, None)), vector._version, blob
        return blob

    # In

    def _decoded(self, event: MessageArrived) -> MessageArrived:
        message = event.message
        vectors = {
            name: decode(tensor.cpu(), self._pool, self._numel_max).to(self._device)
            for name in message.compressible()
            if is_encoded(tensor := getattr(message, name))
        }
        if not vectors:
            return event
        return dataclasses.replace(event, message=dataclasses.replace(message, **vectors), keep=_kept(event, vectors))

    # State

    def state(self) -> State:
        residuals = [[peer, kind, name, list(parts)] for peer, kind, name, parts in self._residuals]
        return {
            "inner": self._inner.state(),
            "residuals": residuals,
            "residual_vectors": [residual.clone() for residual in self._residuals.values()],
        }

    def restore(self, state: State) -> None:
        self._inner.restore(state["inner"])
        keys = [(peer, kind, name, tuple(parts)) for peer, kind, name, parts in state["residuals"]]
        self._residuals = dict(zip(keys, state["residual_vectors"], strict=True))


def _kept(event: MessageArrived, vectors: dict[str, Tensor]) -> Callable[[], Message]:
    """`keep` of a message with these vectors decoded, which are the receiver's own in any case."""
    return lambda: dataclasses.replace(event.keep(), **vectors)
