"""The states of a data loader by position in its data, so that a worker that starts again continues to draw from there.

A worker reports a state with its results; its hub keeps some of them beside the ledger of samples, and sends one back
when the worker joins again.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass

from torch import Tensor

STATES_MAX = 32
"""How many states of one loader are kept."""

STATE_BYTES_MAX = 1 << 20
"""The largest state of a loader that is sent and kept."""


@dataclass(frozen=True)
class LoaderState:
    """A loader in this state yields the sample at position `draw` next. `encoded` are the bytes of the state."""

    draw: int
    encoded: Tensor


def add_state(states: list[LoaderState], state: LoaderState) -> None:
    """Insert a state into a sorted list, in place of one at the same position.

    Beyond `STATES_MAX` every second of the older half is removed, never the first: from any earlier state the loader
    reaches a position by skipping samples.
    """
    states[:] = [kept for kept in states if kept.draw != state.draw]
    insort(states, state, key=lambda kept: kept.draw)
    if len(states) > STATES_MAX:
        del states[1 : STATES_MAX // 2 : 2]


def state_at(states: list[LoaderState], draw: int) -> LoaderState | None:
    """The last state at or before a position; None if there is none."""
    index = bisect_right(states, draw, key=lambda kept: kept.draw)
    return states[index - 1] if index else None
