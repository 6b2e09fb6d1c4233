"""Write and read run directories.

Records are appended line by line and flushed, so a killed process loses at most its last line; the reader
passes over a last line that was cut off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from offbeat.actions import Record
from offbeat.errors import ConfigurationError
from offbeat.records.schema import FORMAT, AnyRecord, RunHeader

HEADER = "run.json"
RECORDS = "records.jsonl"


class Writer(Protocol):
    """Where an engine puts records."""

    def write(self, record: Record) -> None: ...


class MemoryWriter:
    """Keeps records in a list."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)


class FileWriter:
    """Appends records to a file of a run directory; `flush_every` lines at the latest are on disk."""

    def __init__(self, directory: Path, header: RunHeader, *, flush_every: int = 1) -> None:
        self.directory = directory
        self._encoder = msgspec.json.Encoder()
        self._flush_every = flush_every
        self._unflushed = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            text = msgspec.json.format(msgspec.json.encode(header), indent=2)
            (directory / HEADER).write_bytes(text + b"\n")
            self._file = (directory / RECORDS).open("wb")
        except OSError as error:
            raise ConfigurationError(
                f"cannot write records to {directory} ({error.strerror}); name another place with --out"
            ) from None

    def write(self, record: Record) -> None:
        self._file.write(self._encoder.encode(record) + b"\n")
        self._unflushed += 1
        if self._unflushed >= self._flush_every:
            self._file.flush()
            self._unflushed = 0

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class RunRecords:
    """A run as it was recorded."""

    directory: Path | None
    header: RunHeader
    records: tuple[AnyRecord, ...]


def read_run(directory: Path) -> RunRecords:
    """The run in `directory`."""
    try:
        raw = (directory / HEADER).read_bytes()
        lines = (directory / RECORDS).read_bytes().splitlines()
    except OSError as error:
        raise ConfigurationError(
            f"{directory} is not a run directory ({Path(error.filename or directory).name}: {error.strerror}); "
            "name one that 'offbeat simulate' or 'offbeat compare' has written"
        ) from None
    try:
        header = msgspec.json.decode(raw, type=RunHeader)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{directory / HEADER} cannot be read: {error}") from None
    if header.format != FORMAT:
        raise ConfigurationError(
            f"{directory} was written in format {header.format}, and this version of offbeat reads format {FORMAT}"
        )
    return RunRecords(directory, header, tuple(_decode(lines, directory)))


def _decode(lines: list[bytes], directory: Path) -> Iterator[AnyRecord]:
    decoder = msgspec.json.Decoder(AnyRecord)
    for number, line in enumerate(lines, start=1):
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError as error:
            if number == len(lines):
                return
            raise ConfigurationError(f"{directory / RECORDS}, line {number}, cannot be read: {error}") from None


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run directories at or below the given paths, in order."""
    found: list[Path] = []
    for path in paths:
        below = sorted(header.parent for header in path.rglob(HEADER)) if path.is_dir() else []
        if not below:
            raise ConfigurationError(
                f"there is no run at {path}; name a directory that 'offbeat simulate' or 'offbeat compare' has written"
            )
        found.extend(below)
    return list(dict.fromkeys(found))
