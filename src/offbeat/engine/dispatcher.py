"""Validates the actions of a node and routes them to the engine.

Both engines use it, so a node that breaks the contract is refused with the same sentence in virtual time and live.
"""

from __future__ import annotations

from typing import Protocol

from offbeat.core.actions import (
    Action,
    Cancel,
    ClearTimer,
    Compute,
    Disconnect,
    Evaluate,
    Finish,
    Record,
    Report,
    Send,
    SetTimer,
)
from offbeat.errors import ContractViolation


class Backend(Protocol):
    """Carries out the valid actions of one rank."""

    @property
    def rank(self) -> int: ...
    @property
    def computes(self) -> bool:
        """Whether this rank computes gradients, by its strategy."""

    @property
    def is_computing(self) -> bool:
        """Whether a `Compute` is outstanding."""

    def is_peer(self, rank: int) -> bool:
        """Whether this rank exchanges messages with another, by its strategy."""

    def send(self, action: Send) -> None: ...
    def disconnect(self, action: Disconnect) -> None:
        """Called with or without a link to the peer."""

    def compute(self, action: Compute) -> None: ...
    def cancel(self) -> None:
        """Called with or without an outstanding `Compute`."""

    def set_timer(self, name: str, seconds: float) -> None: ...
    def clear_timer(self, name: str) -> None: ...
    def evaluate(self, action: Evaluate) -> None: ...
    def report(self, record: Record) -> None: ...
    def finish(self, action: Finish) -> None: ...


def dispatch(action: Action, backend: Backend) -> None:
    """Let `backend` carry out an action; raises `ContractViolation` for one that the contract does not allow."""
    match action:
        case Send():
            if not backend.is_peer(action.to):
                _refuse(backend, f"sent to {action.to}, which its strategy does not name as a peer")
            backend.send(action)
        case Report(record=record):
            backend.report(record)
        case Compute():
            if not backend.computes:
                _refuse(backend, "asked for Compute, but by its strategy it does not compute")
            if backend.is_computing:
                _refuse(backend, "asked for a second Compute while one was outstanding")
            backend.compute(action)
        case SetTimer(name=name, seconds=seconds):
            if not seconds >= 0:
                _refuse(backend, f"set the timer {name!r} to {seconds} s, but a timer needs 0 s or more")
            backend.set_timer(name, seconds)
        case ClearTimer(name=name):
            backend.clear_timer(name)
        case Disconnect(peer=peer):
            if not backend.is_peer(peer):
                _refuse(backend, f"asked to disconnect {peer}, which its strategy does not name as a peer")
            backend.disconnect(action)
        case Cancel():
            backend.cancel()
        case Evaluate():
            backend.evaluate(action)
        case Finish():
            backend.finish(action)
        case _:
            _refuse(backend, f"asked for {action!r}, which is not an action")


def _refuse(backend: Backend, offence: str) -> None:
    raise ContractViolation(f"rank {backend.rank} {offence}")
