"""Write and read run directories.

Records are appended line by line and flushed, so a killed process loses at most its last line, or the last window of
aggregated ones (`records/aggregation.py`); the reader ignores an incomplete last line. A simulated run has one file of
records. A live run has one per rank, written by the process of that rank, and the reader merges them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, Self

import msgspec

from offbeat.core.actions import Record
from offbeat.errors import ConfigurationError, RunFailed, shortened
from offbeat.records.schema import FORMAT, RECORD_DECODER, AnyRecord, RunHeader, RunRecords

HEADER = "run.json"
RECORDS = "records.jsonl"
LIVE = "live.json"
"""The options of a live run."""
RESULT = "result.offbeat"
"""The result of a live run."""
RANK_RECORDS = re.compile(r"records-(0|[1-9]\d*)\.jsonl")
"""The file names of the records of a live run, one per rank."""

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What msgspec raises for damaged JSON: it is something else, is no UTF-8, or is nested too deeply."""

BLOCK_BYTES = 1 << 16
"""Bytes read at a time in search of the last end of a line."""


def rank_file(directory: Path, rank: int) -> Path:
    """The file of the records of one rank of a live run."""
    return directory / f"records-{rank}.jsonl"


def rank_files(directory: Path) -> list[tuple[int, Path]]:
    """The existing files of records of a live run with their ranks, in the order of ranks."""
    named = [(RANK_RECORDS.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted((int(match[1]), path) for match, path in named if match)


class Writer(Protocol):
    """What an engine writes records to."""

    def write(self, record: Record) -> None: ...


class MemoryWriter:
    """Stores records in a list."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)


def write_header(directory: Path, header: RunHeader) -> None:
    """Create the directory of a run and write its header; raises ConfigurationError if that is not possible."""
    text = msgspec.json.format(msgspec.json.encode(header), indent=2)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / HEADER).write_bytes(text + b"\n")
    except OSError as error:
        raise _not_writable(directory, error) from None


class _ClosingWriter:
    """The base class of writers that are context managers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class FileWriter(_ClosingWriter):
    """Writes the header and then all records of a run in one file. One thread at a time may write.

    directory: the run directory, which is created
    header: the header of the run
    flush_every: lines after which the file is flushed
    """

    def __init__(self, directory: Path, header: RunHeader, *, flush_every: int = 1) -> None:
        self.directory = directory
        self._encoder = msgspec.json.Encoder()
        self._flush_every = flush_every
        self._unflushed = 0
        self._failed = False
        write_header(directory, header)
        try:
            self._file = (directory / RECORDS).open("wb")
        except OSError as error:
            raise _not_writable(directory, error) from None

    def write(self, record: Record) -> None:
        try:
            self._file.write(self._encoder.encode(record) + b"\n")
            self._unflushed += 1
            if self._unflushed >= self._flush_every:
                self._file.flush()
                self._unflushed = 0
        except OSError as error:
            self._failed = True
            raise _write_failed(self.directory, error) from None

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # flushing the rest fails too; the failure is reported once
            if not self._failed:
                self._failed = True
                raise _write_failed(self.directory, error) from None


class RankWriter(_ClosingWriter):
    """Appends the records of one rank of a live run, unbuffered. One thread at a time may write.

    A restarted process continues the file of its rank, after removing an incomplete last line.

    The writer of rank 0 locks the run while it is open: a second one, in this process or another, raises
    ConfigurationError.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        self.rank = rank
        self._encoder = msgspec.json.Encoder()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = rank_file(directory, rank).open("a+b", buffering=0)
        except OSError as error:
            raise _not_writable(directory, error) from None
        try:
            if rank == 0:
                _lock(directory, self._file.fileno(), fcntl.LOCK_EX)
            size = os.fstat(self._file.fileno()).st_size
            self._position = self._end_of_lines(size)
            if self._position < size:
                self._file.truncate(self._position)
        except (OSError, ConfigurationError) as error:
            self._file.close()
            if isinstance(error, OSError):
                raise _not_writable(directory, error) from None
            raise

    def write(self, record: Record) -> None:
        line = self._encoder.encode(record) + b"\n"
        try:
            unwritten = memoryview(line)
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._position)
            raise _write_failed(self.directory, error) from None
        self._position += len(line)

    def position(self) -> int:
        """The size of the file in bytes, which a checkpoint stores for `truncate` on resuming."""
        return self._position

    def sync(self) -> None:
        """Flush to the disk, so that a checkpoint is never ahead of the records, even after a power failure."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _write_failed(self.directory, error) from None

    def truncate(self, position: int) -> None:
        """Remove the records after `position`, which are about to be repeated.

        Raises ConfigurationError if `position` is not the end of a line.
        """
        if not 0 <= position <= self._position or self._end_of_lines(position) != position:
            raise ConfigurationError(
                f"{rank_file(self.directory, self.rank)} does not match the checkpoint, which expects the end of a "
                f"line at byte {position} of {self._position}; resume in the directory where the checkpoint was made"
            )
        try:
            self._file.truncate(position)
        except OSError as error:
            raise _write_failed(self.directory, error) from None
        self._position = position

    def _end_of_lines(self, stop: int) -> int:
        """The position after the last complete line before `stop`."""
        while stop > 0:
            start = max(0, stop - BLOCK_BYTES)
            newline = os.pread(self._file.fileno(), stop - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            stop = start
        return 0

    def close(self) -> None:
        self._file.close()


def check_idle(directory: Path) -> None:
    """Raise ConfigurationError if a live run in this directory has not ended, in any process."""
    with contextlib.suppress(FileNotFoundError), rank_file(directory, 0).open("rb") as file:
        _lock(directory, file.fileno(), fcntl.LOCK_SH)


def _lock(directory: Path, file: int, mode: int) -> None:
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigurationError(
            f"the run in {directory} is still going on; wait for its end, or end it with Ctrl-C where it was started"
        ) from None
    except OSError:  # a file system without locks
        pass


def _not_writable(directory: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot write records to {directory} ({error.strerror or error}); name another place with --out"
    )


def _write_failed(directory: Path, error: OSError) -> RunFailed:
    return RunFailed(
        f"no more records could be written to {directory} ({error.strerror or error}); "
        "make room there, or name another place with --out"
    )


def read_header(directory: Path) -> RunHeader:
    """The header of a run; raises ConfigurationError if there is none that this version can read."""
    try:
        raw = (directory / HEADER).read_bytes()
    except OSError as error:
        raise _not_a_run(directory, error) from None
    try:
        header = msgspec.json.decode(raw, type=RunHeader)
    except UNREADABLE as error:
        raise ConfigurationError(f"{directory / HEADER} cannot be read: {shortened(error)}") from None
    if header.format != FORMAT:
        raise ConfigurationError(
            f"{directory} was written in format {header.format}, and this version of offbeat reads format {FORMAT}"
        )
    return header


def read_run(directory: Path) -> RunRecords:
    """The run in `directory`; records of a live run are sorted by time, then by rank.

    Raises ConfigurationError if it is no run directory, or a record cannot be read.
    """
    header = read_header(directory)
    try:
        files = [path for _, path in rank_files(directory)]
        if (directory / RECORDS).exists() or not (files or header.engine == "live"):
            return RunRecords(directory, header, tuple(_read(directory / RECORDS)))
        records = [record for path in files for record in _read(path)]
    except OSError as error:
        raise _not_a_run(directory, error) from None
    return RunRecords(directory, header, tuple(sorted(records, key=lambda record: record.at)))


def read_rank(directory: Path, rank: int) -> Iterator[AnyRecord]:
    """The records of one rank of a live run."""
    return _read(rank_file(directory, rank))


def _read(path: Path) -> Iterator[AnyRecord]:
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield RECORD_DECODER.decode(line)
        except UNREADABLE as error:
            if number == len(lines):
                return
            raise ConfigurationError(f"{path}, line {number}, cannot be read: {shortened(error)}") from None


def _not_a_run(directory: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"{directory} is not a run directory ({Path(error.filename or directory).name}: {error.strerror}); "
        "name one that 'offbeat simulate', 'offbeat compare' or 'offbeat train' has written"
    )


def file_name(label: str) -> str:
    """A label with all characters replaced that are not suitable for a file name."""
    return "".join(sign if sign.isalnum() or sign in "-_.=" else "-" for sign in label)


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run directories at or below the given paths, in order; raises ConfigurationError if a path has none."""
    runs: list[Path] = []
    for path in paths:
        below = sorted(header.parent for header in path.rglob(HEADER)) if path.is_dir() else []
        if not below:
            raise ConfigurationError(
                f"there is no run at {path}; name a directory that 'offbeat simulate', 'offbeat compare' or "
                "'offbeat train' has written"
            )
        runs.extend(below)
    return list(dict.fromkeys(runs))


class Tail:
    """Reads new records of a live run while its ranks are writing, starting with the first.

    Files, and the directory, may appear later. An incomplete line is left for the next call; if a file was truncated on
    resuming, the records after that are new. A line that cannot be decoded is ignored here; `read_run` raises an error
    for it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._positions: dict[int, int] = {}

    def poll(self) -> list[AnyRecord]:
        """The new records, sorted by time, then by rank."""
        try:
            files = rank_files(self.directory)
        except OSError:
            return []
        records = [record for rank, path in files for record in self._new(rank, path)]
        return sorted(records, key=lambda record: record.at)

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
        records: list[AnyRecord] = []
        for line in complete.splitlines():
            with contextlib.suppress(*UNREADABLE):
                records.append(RECORD_DECODER.decode(line))
        return records
