"""Follow a live run while its ranks are writing."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from offbeat.records.files import rank_files
from offbeat.records.schema import RECORD_DECODER, AnyRecord


class Tail:
    """Reads what the ranks of a live run have added since it last looked, from the beginning on.

    Files may appear later, and so may the directory. A line that is not complete yet is left for the next time;
    where a file has been cut back, on resuming, what follows the cut is new. Somebody who looks on must not fall
    over a line that cannot be read: it is passed over here, and `read_run` says what is wrong with it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._positions: dict[int, int] = {}

    def poll(self) -> list[AnyRecord]:
        """The records that are new, in the order of time, and then of ranks."""
        try:
            files = rank_files(self.directory)
        except OSError:
            return []
        found = [record for rank, path in files for record in self._new(rank, path)]
        found.sort(key=lambda record: record.at)
        return found

    def _new(self, rank: int, path: Path) -> list[AnyRecord]:
        position = self._positions.get(rank, 0)
        try:
            with path.open("rb") as file:
                position = min(position, os.fstat(file.fileno()).st_size)
                file.seek(position)
                added = file.read()
        except OSError:
            return []
        complete = added[: added.rfind(b"\n") + 1]
        self._positions[rank] = position + len(complete)
        return [record for line in complete.splitlines() if (record := self._decode(line)) is not None]

    def _decode(self, line: bytes) -> AnyRecord | None:
        try:
            record: AnyRecord = RECORD_DECODER.decode(line)
        except msgspec.MsgspecError:
            return None
        return record
