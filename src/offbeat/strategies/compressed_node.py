"""Compression of the messages of any strategy: a node that wraps another, which does not depend on it.

The tensors that a message declares are encoded when the inner node sends it, and decoded before the inner node of the
receiver handles it. An encoded tensor replaces the original in the same message, so engines, wire format and transports
are not involved. A message declares

    increments   gradients, differences: the encoding error is kept in a residual, per peer, kind of message, field and
                 `residual_key_fields`, and is added to the next one
    values       parameters: without a residual; top-k does not encode them
    roundtrip    tensors that the node has encoded and decoded itself, so that encoding them again loses nothing

All other tensors are sent exactly, in particular those of Stop, so that all ranks end with the same bits.
Residuals are part of the state. Those of a lost peer are dropped, since a peer that joins again begins anew.
An increment that is superseded before it has left loses the residual that was added to it; no strategy here does that.
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
from offbeat.core.device_transfer import to_device, to_host
from offbeat.core.events import Event, MessageArrived, PeerLost, Started
from offbeat.core.flat import master_dtype
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Message
from offbeat.core.strategy import Node, NodeContext, State, Strategy
from offbeat.strategies.node_state import Stateful

_Key = tuple[int, str, str, tuple[Any, ...]]
"""peer, kind of message, field, values of `residual_key_fields`"""


def build_node(strategy: Strategy, context: NodeContext) -> Node:
    """The node of `context.rank`, wrapped if the strategy has a compression. Engines call this function."""
    node = strategy.node(context)
    return node if strategy.compression is None else CompressedNode(node, strategy.compression, context.parameters)


class CompressedNode(Stateful, Node):
    """A node whose messages are compressed.

    inner: the node that is wrapped.
    compression: how tensors are encoded.
    parameters: its device is that of decoded tensors, its length the most that one may have.
    """

    caches = ("_coded", "_pool")

    _inner: Node
    _residuals: dict[_Key, Tensor]

    def __init__(self, inner: Node, compression: Compression, parameters: Tensor) -> None:
        self._inner = inner
        self._compression = compression
        self._device = parameters.device
        self._numel_max = parameters.numel()
        self._pool = Pool()
        self._residuals = {}
        self._coded: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        """id of a tensor → itself, its version counter, and its code: one snapshot is sent to many peers"""

    def handle(self, event: Event) -> Iterable[Action]:
        if isinstance(event, PeerLost):
            self._residuals = {key: kept for key, kept in self._residuals.items() if key[0] != event.peer}
        elif isinstance(event, Started):
            self._residuals = {}  # a process that continues from a checkpoint is connected to no peer yet
        elif isinstance(event, MessageArrived):
            event = self._decoded(event)
        return self._compressed(self._inner.handle(event))

    def extra_state(self) -> State:
        return self._inner.extra_state()

    def load_extra_state(self, state: State) -> None:
        self._inner.load_extra_state(state)

    def replica(self) -> Tensor | None:
        return self._inner.replica()

    # Encode

    def _compressed(self, actions: Iterable[Action]) -> Iterator[Action]:
        for action in actions:
            yield self._encoded(action) if isinstance(action, Send) else action

    def _encoded(self, send: Send) -> Send:
        message, changes = send.message, {}
        for name in message.increments:
            fields = tuple(getattr(message, field) for field in message.residual_key_fields)
            changes[name] = self._increment((send.to, type(message).__name__, name, fields), getattr(message, name))
        for name in message.roundtrip:
            changes[name] = self._code(getattr(message, name))
        if self._compression.encodes_values:
            for name in message.values:
                changes[name] = self._value(getattr(message, name))
        if not changes:
            return send
        return dataclasses.replace(send, message=dataclasses.replace(message, **changes))

    def _increment(self, key: _Key, vector: Tensor) -> Tensor:
        if not self._compression.keeps_residual or vector.numel() == 0:
            return self._code(vector)
        residual = self._residuals.get(key)
        if residual is None or residual.numel() != vector.numel() or residual.dtype is not master_dtype(vector.dtype):
            dtype = master_dtype(vector.dtype)
            residual = self._residuals[key] = torch.zeros_like(vector, device="cpu", dtype=dtype)
        return self._code(vector, residual)

    def _code(self, vector: Tensor, residual: Tensor | None = None) -> Tensor:
        """The code of a vector, or itself if that is not smaller. Codes hold float32 in place of bfloat16, float16."""
        on_host = to_host(vector)
        wide = on_host.to(master_dtype(vector.dtype))
        code = self._compression.encode(wide, self._pool, residual)
        is_larger = residual is None and code.nbytes >= vector.nbytes  # with a residual, which has changed, it is sent
        return on_host if code is wide or is_larger else code

    def _value(self, vector: Tensor) -> Tensor:
        identity = id(vector)
        cached = self._coded.get(identity)
        if cached is not None and cached[0]() is vector and cached[1] == vector._version:
            return cached[2]
        code = self._code(vector)
        if code is vector:
            return code
        remove = self._coded.pop
        self._coded[identity] = weakref.ref(vector, lambda _: remove(identity, None)), vector._version, code
        return code

    # Decode

    def _decoded(self, event: MessageArrived) -> MessageArrived:
        message = event.message
        vectors = {
            name: to_device(decode(to_host(tensor), self._pool, self._numel_max), self._device)
            for name in message.compressible()
            if is_encoded(tensor := getattr(message, name))
        }
        if not vectors:
            return event
        return dataclasses.replace(event, message=dataclasses.replace(message, **vectors), keep=_kept(event, vectors))


def _kept(event: MessageArrived, vectors: dict[str, Tensor]) -> Callable[[], Message]:
    """The `keep` of a message with decoded vectors, which no buffer of the transport refers to."""
    return lambda: dataclasses.replace(event.keep(), **vectors)
