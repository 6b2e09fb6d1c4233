"""Write and read run directories.

Records are appended line by line and flushed, so a killed process loses at most its last line; the reader
passes over a last line that was cut off. A simulated run has one file of records. A live run has one for each rank,
written by that rank's own process, and the reader puts them together.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from offbeat.core.actions import Record
from offbeat.errors import ConfigurationError, RunFailed
from offbeat.records.schema import FORMAT, RECORD_DECODER, AnyRecord, RunHeader, RunRecords

HEADER = "run.json"
RECORDS = "records.jsonl"
LIVE = "live.json"
"""How a live run was started."""
RESULT = "result.offbeat"
"""What a live run ended with."""
RANK_RECORDS = re.compile(r"records-(0|[1-9]\d*)\.jsonl")
"""The names of the files of a live run, one for each rank."""

BLOCK_BYTES = 1 << 16
"""How much is read at a time in search of the last end of a line."""


def rank_file(directory: Path, rank: int) -> Path:
    """Where a rank of a live run puts its records."""
    return directory / f"records-{rank}.jsonl"


def rank_files(directory: Path) -> list[tuple[int, Path]]:
    """The files of a live run that are there, in the order of their ranks."""
    named = [(RANK_RECORDS.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted((int(match[1]), path) for match, path in named if match)


# Writing


class Writer(Protocol):
    """Where an engine puts records."""

    def write(self, record: Record) -> None: ...


class MemoryWriter:
    """Keeps records in a list."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)


def write_header(directory: Path, header: RunHeader) -> None:
    """Make the directory of a run, and say in it what is run."""
    text = msgspec.json.format(msgspec.json.encode(header), indent=2)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / HEADER).write_bytes(text + b"\n")
    except OSError as error:
        raise _cannot_begin(directory, error) from None


class FileWriter:
    """Writes the header and then all records of a run; `flush_every` lines at the latest are on disk."""

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
            raise _cannot_begin(directory, error) from None

    def write(self, record: Record) -> None:
        try:
            self._file.write(self._encoder.encode(record) + b"\n")
            self._unflushed += 1
            if self._unflushed >= self._flush_every:
                self._file.flush()
                self._unflushed = 0
        except OSError as error:
            self._failed = True
            raise _cannot_go_on(self.directory, error) from None

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # what was not flushed has no room either; a failure is said once
            if not self._failed:
                self._failed = True
                raise _cannot_go_on(self.directory, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class RankWriter:
    """Appends the records of one rank of a live run. Every line is handed to the system as it is written.

    A process that takes over a rank goes on in the file of the one before, whose last line may have been cut off:
    what is left of it is removed first. One thread at a time may write.

    The writer of rank 0 holds the run as long as it is open: a second one is refused, in this process or another.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        self.rank = rank
        self._encoder = msgspec.json.Encoder()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = rank_file(directory, rank).open("a+b", buffering=0)
        except OSError as error:
            raise _cannot_begin(directory, error) from None
        try:
            if rank == 0:
                _hold(directory, self._file.fileno(), fcntl.LOCK_EX)
            size = os.fstat(self._file.fileno()).st_size
            self._position = self._end_of_lines(size)
            if self._position < size:
                self._file.truncate(self._position)
        except OSError as error:
            self._file.close()
            raise _cannot_begin(directory, error) from None
        except ConfigurationError:
            self._file.close()
            raise

    def write(self, record: Record) -> None:
        line = self._encoder.encode(record) + b"\n"
        try:
            left = memoryview(line)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._position)
            raise _cannot_go_on(self.directory, error) from None
        self._position += len(line)

    def position(self) -> int:
        """How many bytes of records there are: what a checkpoint remembers, for `truncate` on resuming."""
        return self._position

    def sync(self) -> None:
        """Wait until all lines are on the disk, so that a checkpoint is never ahead of them, even if power fails."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _cannot_go_on(self.directory, error) from None

    def truncate(self, position: int) -> None:
        """Forget what was recorded after `position`: it is about to be done again."""
        if not 0 <= position <= self._position or self._end_of_lines(position) != position:
            raise ConfigurationError(
                f"{rank_file(self.directory, self.rank)} does not go with the checkpoint, which expects the end of a "
                f"line at byte {position} of {self._position}; resume in the directory where the checkpoint was made"
            )
        try:
            self._file.truncate(position)
        except OSError as error:
            raise _cannot_go_on(self.directory, error) from None
        self._position = position

    def _end_of_lines(self, stop: int) -> int:
        """Where the last complete line before `stop` ends."""
        while stop > 0:
            start = max(0, stop - BLOCK_BYTES)
            found = os.pread(self._file.fileno(), stop - start, start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            stop = start
        return 0

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def check_idle(directory: Path) -> None:
    """Refuse a directory whose live run is still going on, in whatever process."""
    with contextlib.suppress(FileNotFoundError), rank_file(directory, 0).open("rb") as file:
        _hold(directory, file.fileno(), fcntl.LOCK_SH)


def _hold(directory: Path, file: int, how: int) -> None:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigurationError(
            f"the run in {directory} is still going on; wait for its end, or end it with Ctrl-C where it was started"
        ) from None
    except OSError:  # a file system without locks, where nobody can tell
        pass


def _cannot_begin(directory: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot write records to {directory} ({error.strerror or error}); name another place with --out"
    )


def _cannot_go_on(directory: Path, error: OSError) -> RunFailed:
    return RunFailed(
        f"no more records could be written to {directory} ({error.strerror or error}); "
        "make room there, or name another place with --out"
    )


# Reading


def read_header(directory: Path) -> RunHeader:
    """What was run in `directory`."""
    try:
        raw = (directory / HEADER).read_bytes()
    except OSError as error:
        raise _not_a_run(directory, error) from None
    try:
        header = msgspec.json.decode(raw, type=RunHeader)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{directory / HEADER} cannot be read: {error}") from None
    if header.format != FORMAT:
        raise ConfigurationError(
            f"{directory} was written in format {header.format}, and this version of offbeat reads format {FORMAT}"
        )
    return header


def read_run(directory: Path) -> RunRecords:
    """The run in `directory`. Of a live run, the records of all ranks in the order of time, and then of ranks."""
    header = read_header(directory)
    try:
        found = [path for _, path in rank_files(directory)]
        apart = not (directory / RECORDS).exists() and (found or header.engine == "live")
        if not apart:
            return RunRecords(directory, header, tuple(_read(directory / RECORDS)))
        merged = [record for path in found for record in _read(path)]
    except OSError as error:
        raise _not_a_run(directory, error) from None
    merged.sort(key=lambda record: record.at)
    return RunRecords(directory, header, tuple(merged))


def read_rank(directory: Path, rank: int) -> Iterator[AnyRecord]:
    """What one rank of a live run has recorded."""
    return _read(rank_file(directory, rank))


def _read(path: Path) -> Iterator[AnyRecord]:
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield RECORD_DECODER.decode(line)
        except msgspec.MsgspecError as error:
            if number == len(lines):
                return
            raise ConfigurationError(f"{path}, line {number}, cannot be read: {error}") from None


def _not_a_run(directory: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"{directory} is not a run directory ({Path(error.filename or directory).name}: {error.strerror}); "
        "name one that 'offbeat simulate', 'offbeat compare' or 'offbeat train' has written"
    )


def file_name(label: str) -> str:
    """A label as the name of a directory."""
    return "".join(sign if sign.isalnum() or sign in "-_.=" else "-" for sign in label)


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run directories at or below the given paths, in order."""
    found: list[Path] = []
    for path in paths:
        below = sorted(header.parent for header in path.rglob(HEADER)) if path.is_dir() else []
        if not below:
            raise ConfigurationError(
                f"there is no run at {path}; name a directory that 'offbeat simulate', 'offbeat compare' or "
                "'offbeat train' has written"
            )
        found.extend(below)
    return list(dict.fromkeys(found))


# Follow a live run while its ranks are writing.


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
