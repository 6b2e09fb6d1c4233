"""The states of data loaders, as a hub keeps them: what a worker reports, and gets back when it joins."""

from __future__ import annotations

from typing import Any

import torch

from offbeat.core.events import MessageArrived
from offbeat.core.loader_states import STATE_BYTES_MAX, LoaderState, add_state, state_at
from offbeat.core.messages import LoaderMessage, loader_fields
from offbeat.strategies.member_checks import MemberCheck
from offbeat.strategies.node_state import Stateful


class LoaderKeeper(Stateful):
    """A part of a hub. Workers whose data is drawn by index report nothing, and none is kept for them."""

    _states: dict[int, list[LoaderState]]
    """rank → states by position"""

    def __init__(self) -> None:
        self._states = {}

    def check(self, event: MessageArrived, receiver: int, draw_max: int) -> None:
        """Raise InvalidMessage unless a message carries no state, or one that its sender can have."""
        if not isinstance(event.message, LoaderMessage) or not event.message.loader:
            return
        check, states = MemberCheck(event, receiver), event.message.loader
        is_one = len(states) == 1 and states[0].dim() == 1 and states[0].dtype == torch.uint8
        check.require(is_one, "a state of a loader that is not one row of bytes")
        check.require(
            states[0].numel() <= STATE_BYTES_MAX,
            f"a state of a loader of {states[0].numel()} bytes, where {STATE_BYTES_MAX} is the most",
        )
        draw = event.message.loader_draw
        check.require(0 <= draw <= draw_max, f"a loader at draw {draw}, where {draw_max} is possible by now")

    def keep(self, event: MessageArrived) -> None:
        """Store the state that a valid message carries, if any."""
        state = event.message.loader_state if isinstance(event.message, LoaderMessage) else None
        if state is not None:  # the memory of the message is reused after this event
            copied = LoaderState(state.draw, state.encoded.clone())
            add_state(self._states.setdefault(event.source, []), copied)

    def fields(self, rank: int, draw: int) -> dict[str, Any]:
        """The fields of a message that carry the last state of a worker at or before a position."""
        return loader_fields(state_at(self._states.get(rank, []), draw))
