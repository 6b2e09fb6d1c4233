"""How long a message is under way."""

from __future__ import annotations

from dataclasses import dataclass

from numpy.random import Generator

from offbeat.configuration import option
from offbeat.validation import require_not_negative, require_positive


@dataclass(frozen=True)
class Link:
    """One end's connection to the others. A message leaves for `transmit_seconds`, then travels `latency_seconds`.

    `delay_std_seconds` holds every received message |N(0, 1)| times as long; messages may overtake each other.
    """

    latency_seconds: float = option(0.0, "seconds from the last byte sent to the last byte received")
    bytes_per_second: float | None = option(None, "bandwidth in bytes per second; none: unlimited")
    delay_std_seconds: float = option(0.0, "spread, in seconds, of the random delay of each received message")

    def __post_init__(self) -> None:
        require_not_negative(self, "latency_seconds", "delay_std_seconds")
        require_positive(self, "bytes_per_second")

    def transmit_seconds(self, nbytes: int) -> float:
        """How long the link is busy with a message of this size."""
        return 0.0 if self.bytes_per_second is None else nbytes / self.bytes_per_second

    def draw_delay(self, rng: Generator) -> float:
        """The random delay of one received message, in seconds."""
        return abs(float(rng.standard_normal())) * self.delay_std_seconds
