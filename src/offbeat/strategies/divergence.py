"""Notices that training diverges: the training loss rises again instead of falling.

A loss above its first values, or far above its lowest and no longer far below its first, is no noise when it lasts. The
watch compares moving averages and speaks once in a run.
"""

from __future__ import annotations

from offbeat.strategies.node_state import Stateful

UPDATES_FIRST = 5
"""Updates whose mean loss is that of the beginning."""
SMOOTHING = 0.1
"""Weight of an update in the moving averages of loss and staleness."""
UPDATES_RISING = 10
"""Updates in a row with a loss that has risen before the watch speaks."""
ABOVE_FIRST = 1.2
ABOVE_LOWEST = 3.0
NEAR_FIRST = 0.5
"""Multiples: a loss has risen that exceeds that of the first, or of the lowest and of `NEAR_FIRST` of the first."""


class DivergenceWatch(Stateful):
    """Watches the mean training loss of updates."""

    updates: int = 0
    first: float = 0.0
    """Mean loss of the first updates."""
    recent: float = 0.0
    """Moving average of the loss."""
    lowest: float = 0.0
    """The lowest value of that average."""
    staleness: float = 0.0
    """Moving average of the staleness."""
    rising: int = 0
    has_spoken: bool = False

    def observe(self, loss: float, staleness: float) -> bool:
        """Take the mean loss and mean staleness of an update; true if this is when to say that training diverges."""
        self.updates += 1
        weight = max(SMOOTHING, 1.0 / self.updates)
        self.recent += weight * (loss - self.recent)
        self.staleness += weight * (staleness - self.staleness)
        if self.updates <= UPDATES_FIRST:
            self.first = self.lowest = self.recent
            return False
        self.lowest = min(self.lowest, self.recent)
        has_risen = self.recent > ABOVE_FIRST * self.first or (
            self.recent > ABOVE_LOWEST * self.lowest and self.recent > NEAR_FIRST * self.first
        )
        self.rising = self.rising + 1 if has_risen else 0
        if self.has_spoken or self.rising < UPDATES_RISING:
            return False
        self.has_spoken = True
        return True

    def sentence(self, advice: str) -> str:
        """What to tell the user; `advice` says what to type."""
        return (
            f"training diverges: the training loss is {self.recent:.3g}, but was {self.first:.3g} at the beginning and "
            f"{self.lowest:.3g} at best; gradients are {self.staleness:.3g} updates stale on average; {advice}"
        )
