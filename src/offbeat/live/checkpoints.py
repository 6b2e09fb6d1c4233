"""Checkpoints of a live run: their content, their file names, and the thread that writes them."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from offbeat.core.run_identity import RunIdentity
from offbeat.core.strategy import Node
from offbeat.errors import ConfigurationError, OffbeatError
from offbeat.live.node_runner import NodeRunner
from offbeat.live.state_file import load, save
from offbeat.records.files import RankWriter
from offbeat.transports.tensor_threads import TensorThread

CHECKPOINT_FILE = re.compile(r"checkpoint-\d+\.offbeat(\.partial)?")


def checkpoint_path(directory: Path) -> Path:
    """Where rank 0 of a live run writes its checkpoint."""
    return directory / "checkpoint-0.offbeat"


def checkpoint_files(directory: Path) -> list[Path]:
    """The checkpoints in a run directory, partly written ones included."""
    return sorted(path for path in directory.iterdir() if CHECKPOINT_FILE.fullmatch(path.name))


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of a run: the node of rank 0 and what the engine needs to continue."""

    model: str
    strategy: str
    """See `RunIdentity`, as for `model`."""
    elapsed_seconds: Annotated[float, msgspec.Meta(ge=0)]
    records_position: Annotated[int, msgspec.Meta(ge=0)]
    """Size of the records file of rank 0, in bytes; later records are discarded when the run resumes."""
    resumes: Annotated[int, msgspec.Meta(ge=0)]
    """How many times the run was resumed before."""
    node: dict[str, Any] = field(repr=False)
    """`Node.state()`"""

    def save(self, path: Path) -> None:
        save(path, vars(self))

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a file that `save` has written; raises `ConfigurationError` if it does not hold a checkpoint."""
        try:
            return msgspec.convert(load(path), cls)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{path} does not hold a run of this version of offbeat: {error}") from None

    def check_fits(self, identity: RunIdentity) -> None:
        """Raise `ConfigurationError` if the checkpoint was written with another model or strategy."""
        if self.strategy != identity.strategy:
            raise ConfigurationError(
                f"the checkpoint is of the strategy {self.strategy}, and this run's is {identity.strategy}; "
                "resume with the strategy that it was made with, or start anew without --resume"
            )
        if self.model != identity.model:
            raise ConfigurationError(
                f"the checkpoint is of another model (fingerprint {self.model[:16]}, this one has "
                f"{identity.model[:16]}); resume with the model that it was made with, or start anew without --resume"
            )


def read_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint in a run directory; raises `ConfigurationError` if there is none."""
    path = checkpoint_path(directory)
    if not path.exists():
        raise ConfigurationError(
            f"there is no checkpoint in {directory}; name the directory of a run that has made one, or start anew"
        )
    return Checkpoint.load(path)


class CheckpointWriter:
    """Writes a checkpoint of rank 0 periodically, on a thread of its own."""

    def __init__(
        self,
        path: Path,
        runner: NodeRunner,
        writer: RankWriter,
        *,
        seconds: float,
        identity: RunIdentity,
        resumes: int,
    ) -> None:
        """Build the writer; `start` starts its thread.

        path: the file to write.
        runner: drives the node to be saved.
        writer: writes the records of the same rank.
        seconds: interval between two checkpoints.
        identity: of the run.
        resumes: how many times the run was resumed before.
        """
        self._path = path
        self._runner = runner
        self._writer = writer
        self._seconds = seconds
        self._identity: dict[str, Any] = {"model": identity.model, "strategy": identity.strategy, "resumes": resumes}
        self._end = threading.Event()
        self._thread = TensorThread(self._run, "offbeat checkpoints", finish=self._end.set)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def save(self) -> None:
        """Write a checkpoint now. Node, records and clock are read at the same moment, under the runner's lock."""
        state: dict[str, Any] = {}

        def read(node: Node) -> None:
            state.update(
                node=node.state(),
                records_position=self._writer.position(),
                elapsed_seconds=self._runner.clock.now(),
            )

        self._runner.inspect(read)
        self._writer.sync()  # records must be on disk before a checkpoint that refers to them
        Checkpoint(**self._identity, **state).save(self._path)

    def _run(self) -> None:
        try:
            self.save()
            while not self._end.wait(self._seconds) and not self._runner.ended:
                self.save()
        except OffbeatError as error:
            self._runner.fail(error)
