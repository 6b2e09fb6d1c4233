"""Checkpoints of a live node: its state under the lock, the file on a thread of its own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from offbeat.core.strategy import Node
from offbeat.errors import ConfigurationError, OffbeatError
from offbeat.live.checkpoint_file import Checkpoint, checkpoint_path
from offbeat.live.node_runner import NodeRunner
from offbeat.records.files import RankWriter


def read_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint of the run in a directory."""
    path = checkpoint_path(directory)
    if not path.exists():
        raise ConfigurationError(
            f"there is no checkpoint in {directory}; name the directory of a run that has made one, or start anew"
        )
    return Checkpoint.load(path)


class Checkpointing:
    """Saves the node of rank 0 every so many seconds."""

    def __init__(
        self,
        path: Path,
        participant: NodeRunner,
        writer: RankWriter,
        *,
        seconds: float,
        fingerprint: str,
        strategy: str,
        before: Checkpoint | None,
    ) -> None:
        self._path = path
        self._participant = participant
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
                elapsed_seconds=self._participant.clock.now(),
            )

        self._participant.inspect(look)
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
            while not self._end.wait(self._seconds) and not self._participant.ended:
                self.save()
        except OffbeatError as error:
            self._participant.fail(error)
