"""Ownership of tensors: what was sent is immutable, and what an event carries is valid while it is handled."""

from __future__ import annotations

import weakref

from torch import Tensor

from offbeat.core.events import Event, GradientReady, MessageArrived, StepReady
from offbeat.core.messages import Message


class SentTensors:
    """The tensors that have been sent, by identity; entries disappear with their tensors.

    A sent tensor is immutable by contract, so ranks share it without a copy, and a modification is detected.
    """

    def __init__(self) -> None:
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def add(self, tensor: Tensor) -> None:
        key = id(tensor)
        if key not in self._versions:
            forget = self._versions.pop
            self._versions[key] = weakref.ref(tensor, lambda _: forget(key, None)), tensor._version

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._versions

    def was_modified(self, tensor: Tensor) -> bool:
        """Whether a tensor was changed in place after it was sent, by torch's version counter."""
        entry = self._versions.get(id(tensor))
        return entry is not None and entry[1] != tensor._version


class Lease:
    """`MessageArrived.keep` in strict mode: records whether the node has kept the message."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.kept = False

    def __call__(self) -> Message:
        self.kept = True
        return self.message


def revoke_lease(event: Event, sent: SentTensors) -> None:
    """Overwrite the tensors of a handled event, unless they were kept or sent."""
    tensors: list[Tensor] = []
    if isinstance(event, GradientReady):
        tensors = [event.gradient, *event.buffers]
    elif isinstance(event, StepReady):
        tensors = [event.delta, *event.buffers]
    elif isinstance(event, MessageArrived) and isinstance(event.keep, Lease) and not event.keep.kept:
        tensors = list(event.message.tensors())
    for tensor in tensors:
        if tensor not in sent:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
