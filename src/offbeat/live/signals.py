"""SIGTERM, by which launchers other than ours ask a process to end: the run ends in order, with a checkpoint.

mpirun sends it to everybody when one rank dies, unless it tolerates that; a cluster's queue, or a cloud, sends it
before it takes the machine away. It is not heard in the middle of an event, and neither is Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from offbeat.launch.rank_info import RankInfo
from offbeat.live.checkpoints import checkpoint_path

EXIT_CODE = 128 + signal.SIGTERM
HEEDED = (signal.SIGINT, signal.SIGTERM)


def install_sigterm_handler(rank_info: RankInfo, is_main: bool) -> Callable[[], None]:
    """From now on SIGTERM raises SystemExit, so that a `with` block ends in order; what is returned undoes this.

    Only where somebody has started us who is not ours, and where nobody else has plans for the signal.
    """
    ours = rank_info.launcher == "alone" or (rank_info.launcher == "offbeat" and not rank_info.member)
    elsewhere = threading.current_thread() is not threading.main_thread()
    if ours or elsewhere or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return lambda: None

    fragile = rank_info.transport == "mpi" and not _is_fault_tolerant()

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # asking once is enough
        if is_main:  # written as it is: what was interrupted may have been writing, too
            os.write(2, f"offbeat: {_sentence(rank_info, fragile)}\n".encode())
        raise SystemExit(EXIT_CODE)

    signal.signal(signal.SIGTERM, end)
    return lambda: _undo(end)


def _undo(end: Callable[[int, FrameType | None], None]) -> None:
    """Nobody is interrupted any more; who was asked already goes on with ending."""
    if signal.getsignal(signal.SIGTERM) == end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM are heard when this is over: a node that was left in mid-event could not say goodbye."""
    asked: list[tuple[int, FrameType | None]] = []
    here = threading.current_thread() is threading.main_thread()
    handlers = {int(number): signal.getsignal(number) for number in HEEDED} if here else {}
    before = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda number, frame: asked.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number, frame in asked:
            before[number](number, frame)


def exit_without_finalize() -> None:
    """A process that fails under MPI does not wait for the others at its exit."""
    from offbeat.transports import mpi

    mpi.exit_without_finalize()


def _is_fault_tolerant() -> bool:
    from offbeat.transports.mpi import is_fault_tolerant

    return is_fault_tolerant()


def _sentence(rank_info: RankInfo, fragile: bool) -> str:
    said = f"{rank_info.launcher} has asked this run to end (SIGTERM)"
    if fragile:
        said += ", as it does when a rank has died; with 'mpirun --with-ft ulfm' the others go on"
    if rank_info.directory is not None and checkpoint_path(rank_info.directory).exists():
        said += f"; to go on from its checkpoint: offbeat train --resume {rank_info.directory}"
    return said
