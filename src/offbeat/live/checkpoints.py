"""Checkpoints of a live run: their content, their file names, and the thread that writes them.

The last KEPT are on disk: `checkpoint-0.offbeat`, and older ones with a number before the extension. A damaged one is
passed over when the run resumes. State that is not finite is never written, since a run that resumed from it could
not go on. A checkpoint that cannot be written costs a warning, and is tried again; training goes on.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from offbeat.core.device_transfer import state_to_device
from offbeat.core.run_identity import RunIdentity
from offbeat.core.strategy import Node
from offbeat.errors import ConfigurationError, ContractViolation, OffbeatError, RunFailed, shortened
from offbeat.live.node_runner import NodeRunner
from offbeat.live.state_file import PARTIAL, load, save
from offbeat.records.files import RankWriter
from offbeat.transports.tensor_threads import TensorThread

CHECKPOINT_FILE = re.compile(r"checkpoint-\d+(\.[12])?\.offbeat(\.partial)?")

KEPT = 3
"""How many checkpoints are kept, the newest included."""

GROWING_SECONDS = 5.0
"""A partial file that was not written to for so long does not grow any more."""

RETRY_SECONDS = 5.0
"""Until a checkpoint that could not be written is tried again, if that is sooner than the next one is due."""

_log = logging.getLogger(__name__)


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
    records_position: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """Size of the records file of rank 0, in bytes; later records are discarded when the run resumes."""
    resumes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """How many times the run was resumed before."""
    node: dict[str, Any] = field(repr=False)
    """`Node.state()`"""

    def save(self, path: Path) -> None:
        """Write it to `path`; the checkpoint that is there is kept as an older one."""
        save(path, vars(self), replacing=lambda: _keep_older(path))

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a file that `save` has written; raises `ConfigurationError` if it does not hold a checkpoint."""
        state = load(path)
        try:
            if not isinstance(state, dict):  # msgspec would look for the fields among the attributes of a tensor
                raise msgspec.ValidationError(f"Expected `object`, got `{type(state).__name__}`")
            return msgspec.convert(state, cls)
        except msgspec.ValidationError as error:
            raise ConfigurationError(
                f"{path} does not hold a run of this version of offbeat: {shortened(error)}"
            ) from None

    def check_fits(self, identity: RunIdentity) -> None:
        """Raise `ConfigurationError` if the checkpoint was written with another model or strategy."""
        if self.strategy != identity.strategy:
            raise ConfigurationError(
                f"the checkpoint is of the strategy {shortened(self.strategy)}, and this run's is {identity.strategy}; "
                "resume with the strategy that it was made with, or start anew without --resume"
            )
        if self.model != identity.model:
            raise ConfigurationError(
                f"the checkpoint is of another model (fingerprint {shortened(self.model[:16])}, this one has "
                f"{identity.model[:16]}); resume with the model that it was made with, or start anew without --resume"
            )

    def restore(self, node: Node, device: torch.device) -> None:
        """Let a new node continue from here; raises `ConfigurationError` if the state is not one of such a node."""
        try:
            node.restore(state_to_device(self.node, device))
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, msgspec.MsgspecError) as error:
            raise ConfigurationError(
                f"the checkpoint has the state of another version of offbeat ({type(error).__name__}: "
                f"{shortened(error)}); resume with that version, or start anew without --resume"
            ) from None


def older_path(path: Path, age: int) -> Path:
    """The file of the checkpoint that was written `age` checkpoints before the one at `path`."""
    return path.with_name(f"{path.stem}.{age}{path.suffix}") if age else path


def is_being_written(directory: Path) -> bool:
    """Whether a checkpoint in a run directory has grown within the last seconds."""
    partial = checkpoint_path(directory).with_name(checkpoint_path(directory).name + PARTIAL)
    try:
        return time.time() - partial.stat().st_mtime < GROWING_SECONDS
    except OSError:
        return False


def has_checkpoint(directory: Path) -> bool:
    """Whether there is a checkpoint in a run directory, damaged or not."""
    return any(older_path(checkpoint_path(directory), age).exists() for age in range(KEPT))


def read_checkpoint(directory: Path) -> Checkpoint:
    """The newest checkpoint in a run directory that can be read; raises `ConfigurationError` if there is none.

    A warning says which ones are damaged.
    """
    failure: ConfigurationError | None = None
    for age in range(KEPT):
        path = older_path(checkpoint_path(directory), age)
        if not path.exists():
            continue
        try:
            checkpoint = Checkpoint.load(path)
        except ConfigurationError as error:
            failure = failure or error
            continue
        if failure is not None:
            _log.warning(
                "offbeat: %s; the run continues from an older checkpoint, %s, of %.0f s after its start",
                failure,
                path.name,
                checkpoint.elapsed_seconds,
            )
        return checkpoint
    raise failure or ConfigurationError(
        f"there is no checkpoint in {directory}; name the directory of a run that has made one, or start anew"
    )


def _keep_older(path: Path) -> None:
    """Give the checkpoints at `path` and before it the names of older ones; that at `path` stays until it is replaced.

    Whenever the process is killed, one of them has the name that is read first.
    """
    for age in range(KEPT - 1, 0, -1):
        newer = older_path(path, age - 1)
        if not newer.exists():
            continue
        if age > 1:
            os.replace(newer, older_path(path, age))
            continue
        try:
            os.link(newer, older_path(path, age))
        except OSError:  # a file system without links
            os.replace(newer, older_path(path, age))


def _first_nonfinite(value: Any, name: str = "") -> str | None:
    """Where in nested state there is a tensor with a value that is not finite."""
    if isinstance(value, Tensor):
        has_values = value.is_floating_point() and value.numel()
        return None if not has_values or bool(torch.isfinite(value).all()) else name
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return next((found for key, item in items if (found := _first_nonfinite(item, str(key)))), None)


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
        self._warned: str | None = None
        self._end = threading.Event()
        self._thread = TensorThread(self._run, "offbeat checkpoints", finish=self._end.set)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def save(self) -> None:
        """Write a checkpoint now, if that is possible; a warning says why not.

        Node, records and clock are read at the same moment, under the runner's lock.
        """
        self._save()

    def _save(self) -> bool:
        state: dict[str, Any] = {}

        def read(node: Node) -> None:
            state.update(
                node=node.state(),
                records_position=self._writer.position(),
                elapsed_seconds=self._runner.clock.now(),
            )

        try:
            self._runner.inspect(read)
            nonfinite = _first_nonfinite(state["node"])
            if nonfinite is not None:
                raise RunFailed(f"the state of the run is not finite ({nonfinite}), and it cannot be resumed from that")
            self._writer.sync()  # records must be on disk before a checkpoint that refers to them
            Checkpoint(**self._identity, **state).save(self._path)
        except ContractViolation as error:  # a strategy whose state cannot be saved: its author has to know
            self._runner.fail(error)
            return True
        except Exception as error:
            self._warn(error)
            return False
        if self._warned is not None:
            _log.warning("offbeat: checkpoints are written again")
        self._warned = None
        return True

    def _warn(self, error: Exception) -> None:
        """Say why there is no checkpoint, once for each reason."""
        reason = str(error) if isinstance(error, OffbeatError) else f"{type(error).__name__}: {error}"
        if reason != self._warned:
            _log.warning("offbeat: no checkpoint was written: %s; training goes on, and it is tried again", reason)
        self._warned = reason

    def _run(self) -> None:
        seconds = 0.0
        while not self._end.wait(seconds) and not self._runner.ended:
            seconds = self._seconds if self._save() else min(self._seconds, RETRY_SECONDS)
