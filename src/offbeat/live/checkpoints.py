"""Checkpoints of a run: what one holds, where it is kept, and the thread that writes it for a live node."""

from __future__ import annotations

import dataclasses
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from offbeat.core.strategy import Node
from offbeat.errors import ConfigurationError, OffbeatError
from offbeat.live.node_runner import NodeRunner
from offbeat.live.state_file import load, save
from offbeat.records.files import RankWriter

CHECKPOINT_FILE = re.compile(r"checkpoint-\d+\.offbeat(\.partial)?")


def checkpoint_path(directory: Path, rank: int = 0) -> Path:
    """Where a rank of a live run puts its checkpoint."""
    return directory / f"checkpoint-{rank}.offbeat"


def checkpoint_files(directory: Path) -> list[Path]:
    """The checkpoints in a run directory, and what is left of one that was being written."""
    return sorted(path for path in directory.iterdir() if CHECKPOINT_FILE.fullmatch(path.name))


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A run as it stood: the node of its rank 0, and what the engine around it must remember."""

    fingerprint: str
    """Of the model: shapes and strides."""
    experiment: dict[str, Any] | None
    strategy: str
    elapsed_seconds: Annotated[float, msgspec.Meta(ge=0)]
    records_position: Annotated[int, msgspec.Meta(ge=0)]
    """How long the records were; what was written later is done again."""
    incarnations: dict[str, int]
    resumes: Annotated[int, msgspec.Meta(ge=0)]
    node: dict[str, Any] = dataclasses.field(repr=False)

    def to_plain(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}

    @classmethod
    def from_plain(cls, plain: Any, where: str = "the checkpoint") -> Checkpoint:
        try:
            return msgspec.convert(plain, cls)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{where} does not hold a run of this version of offbeat: {error}") from None

    def save(self, path: Path) -> None:
        save(path, self.to_plain())

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        return cls.from_plain(load(path), str(path))

    def check_fits(self, fingerprint: str, strategy: str) -> None:
        """Refuse to go on with another model, or with another strategy, than the checkpoint is of."""
        if self.strategy != strategy:
            raise ConfigurationError(
                f"the checkpoint is of the strategy {self.strategy}, and this run's is {strategy}; "
                "resume with the strategy that it was made with, or start anew without --resume"
            )
        if self.fingerprint != fingerprint:
            raise ConfigurationError(
                f"the checkpoint is of another model (fingerprint {self.fingerprint[:16]}, this one has "
                f"{fingerprint[:16]}); resume with the model that it was made with, or start anew without --resume"
            )


def read_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint of the run in a directory."""
    path = checkpoint_path(directory)
    if not path.exists():
        raise ConfigurationError(
            f"there is no checkpoint in {directory}; name the directory of a run that has made one, or start anew"
        )
    return Checkpoint.load(path)


class CheckpointWriter:
    """Saves the node of rank 0 every so many seconds."""

    def __init__(
        self,
        path: Path,
        runner: NodeRunner,
        writer: RankWriter,
        *,
        seconds: float,
        fingerprint: str,
        strategy: str,
        before: Checkpoint | None,
    ) -> None:
        self._path = path
        self._runner = runner
        self._writer = writer
        self._seconds = seconds
        self._fingerprint = fingerprint
        self._strategy = strategy
        self._resumes = 0 if before is None else before.resumes + 1
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offbeat checkpoints", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def save(self) -> None:
        """Save now. State and position of the records are of one moment."""
        found: dict[str, Any] = {}

        def look(node: Node) -> None:
            found.update(
                node=node.state(),
                records_position=self._writer.position(),
                elapsed_seconds=self._runner.clock.now(),
            )

        self._runner.inspect(look)
        self._writer.sync()  # on disk before a checkpoint that speaks of it
        checkpoint = Checkpoint(
            fingerprint=self._fingerprint,
            experiment=None,
            strategy=self._strategy,
            incarnations={},
            resumes=self._resumes,
            **found,
        )
        checkpoint.save(self._path)

    def _run(self) -> None:
        try:
            self.save()
            while not self._end.wait(self._seconds) and not self._runner.ended:
                self.save()
        except OffbeatError as error:
            self._runner.fail(error)
