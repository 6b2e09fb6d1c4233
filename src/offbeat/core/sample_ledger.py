"""The draws of one rank that are accounted for. A sample is identified by (rank, draw).

They are stored as disjoint, sorted, half-open ranges. Almost always there is a single range [0, n): gaps exist only
while messages are out of order, or after a worker was lost with a message in flight.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from offbeat.errors import ContractViolation

Range = tuple[int, int]


class SampleLedger:
    """A set of draws; adding one twice raises ContractViolation."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges: list[Range] = []
        for first, stop in ranges:
            self.add(first, stop)

    def add(self, first: int, stop: int) -> None:
        """Enter the draws [first, stop)."""
        if first == stop:
            return
        at = bisect_right(self._ranges, (first, stop))
        before = self._ranges[at - 1] if at else (0, 0)
        after = self._ranges[at] if at < len(self._ranges) else (stop, stop)
        if not 0 <= first < stop or before[1] > first or after[0] < stop:
            raise ContractViolation(f"draws {first} to {stop} were accounted for before: {self._ranges}")
        self._ranges[at:at] = [(first, stop)]
        self._join(at)

    def overlaps(self, first: int, stop: int) -> bool:
        """Whether any of the draws [first, stop) is accounted for."""
        at = bisect_right(self._ranges, first, key=lambda entry: entry[0])
        before = self._ranges[at - 1] if at else (0, 0)
        after = self._ranges[at] if at < len(self._ranges) else (stop, stop)
        return first < stop and (before[1] > first or after[0] < stop)

    def _join(self, at: int) -> None:
        """Merge the range at index `at` with adjacent ones."""
        for left in (at, at - 1):
            if left >= 0 and left + 1 < len(self._ranges) and self._ranges[left][1] == self._ranges[left + 1][0]:
                self._ranges[left : left + 2] = [(self._ranges[left][0], self._ranges[left + 1][1])]

    def remove(self, first: int, stop: int) -> None:
        """Remove the draws [first, stop)."""
        at = bisect_right(self._ranges, first, key=lambda entry: entry[0]) - 1
        if at < 0 or self._ranges[at][1] < stop:
            raise ContractViolation(f"draws {first} to {stop} were not accounted for: {self._ranges}")
        before, after = (self._ranges[at][0], first), (stop, self._ranges[at][1])
        self._ranges[at : at + 1] = [rest for rest in (before, after) if rest[0] < rest[1]]

    @property
    def first_missing(self) -> int:
        """The lowest draw that is missing: where a restarted worker continues."""
        return self._ranges[0][1] if self._ranges and self._ranges[0][0] == 0 else 0

    def missing_below(self, stop: int) -> Iterator[Range]:
        """The gaps in [0, stop)."""
        position = 0
        for first, last in self._ranges:
            if position < min(first, stop):
                yield position, min(first, stop)
            position = max(position, last)
        if position < stop:
            yield position, stop

    def room_from(self, draw: int) -> tuple[int, int | None]:
        """The first missing draw from `draw` on, and the length of its gap; None: unlimited."""
        for first, stop in self._ranges:
            if first <= draw < stop:
                draw = stop
            elif draw < first:
                return draw, first - draw
        return draw, None

    @property
    def stop(self) -> int:
        """One past the highest draw."""
        return self._ranges[-1][1] if self._ranges else 0

    @property
    def ranges(self) -> list[Range]:
        return list(self._ranges)

    def __contains__(self, draw: int) -> bool:
        return any(first <= draw < stop for first, stop in self._ranges)

    def __len__(self) -> int:
        return sum(stop - first for first, stop in self._ranges)
