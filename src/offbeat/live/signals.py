"""Signals: SIGTERM ends a run in order, with a checkpoint, and no signal interrupts a node that handles an event.

mpirun sends SIGTERM to all ranks when one dies, unless it was told to tolerate that; a batch queue or a cloud sends it
before it takes the machine away.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from offbeat.launch.rank_info import RankInfo
from offbeat.live.checkpoints import has_checkpoint

EXIT_CODE = 128 + signal.SIGTERM
DEFERRED_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def install_sigterm_handler(rank_info: RankInfo, is_main: bool) -> Callable[[], None]:
    """Let SIGTERM raise SystemExit, so that a `with` block ends in order; returns a function that undoes this.

    Does nothing under our own supervisor, outside the main thread, or if another handler is installed.
    """
    ours = rank_info.launcher == "alone" or (rank_info.launcher == "offbeat" and not rank_info.member)
    is_other_thread = threading.current_thread() is not threading.main_thread()
    if ours or is_other_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return lambda: None

    ends_with_any_rank = False
    if rank_info.transport == "mpi":
        from offbeat.transports.mpi import is_fault_tolerant

        ends_with_any_rank = not is_fault_tolerant()

    def handle_sigterm(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        if is_main:  # unbuffered: the interrupted code may hold the lock of stderr
            os.write(2, f"offbeat: {_termination_notice(rank_info, ends_with_any_rank)}\n".encode())
        raise SystemExit(EXIT_CODE)

    signal.signal(signal.SIGTERM, handle_sigterm)
    return lambda: _uninstall(handle_sigterm)


def _uninstall(handle_sigterm: Callable[[int, FrameType | None], None]) -> None:
    """Restore the default handler, unless SIGTERM has been received already."""
    if signal.getsignal(signal.SIGTERM) == handle_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Handle SIGINT and SIGTERM when this block ends: a node interrupted in mid-event could not end in order."""
    received: list[tuple[int, FrameType | None]] = []
    is_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {int(number): signal.getsignal(number) for number in DEFERRED_SIGNALS} if is_main_thread else {}
    before = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number, frame in received:
            before[number](number, frame)


def _termination_notice(rank_info: RankInfo, ends_with_any_rank: bool) -> str:
    notice = f"{rank_info.launcher} has asked this run to end (SIGTERM)"
    if ends_with_any_rank:
        notice += ", as it does when a rank has died; with 'mpirun --with-ft ulfm' the others go on"
    if rank_info.directory is not None and has_checkpoint(rank_info.directory):
        notice += f"; to resume from its checkpoint: offbeat train --resume {rank_info.directory}"
    return notice
