"""SIGTERM, by which launchers other than ours ask a process to end: the run ends in order, with a checkpoint.

mpirun sends it to everybody when one rank dies, unless it tolerates that; a cluster's queue, or a cloud, sends it
before it takes the machine away.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from offbeat.checkpoints import checkpoint_path
from offbeat.launch import Seat

EXIT_CODE = 128 + signal.SIGTERM


def heed_end(place: Seat, is_main: bool) -> Callable[[], None]:
    """From now on SIGTERM raises SystemExit, so that a `with` block ends in order; what is returned undoes this.

    Only where somebody has started us who is not ours, and where nobody else has plans for the signal.
    """
    ours = place.launcher == "alone" or (place.launcher == "offbeat" and not place.member)
    elsewhere = threading.current_thread() is not threading.main_thread()
    if ours or elsewhere or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return lambda: None

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # asking once is enough
        if is_main:
            print(f"offbeat: {_sentence(place)}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODE)

    signal.signal(signal.SIGTERM, end)
    return lambda: _undo(end)


def _undo(end: Callable[[int, FrameType | None], None]) -> None:
    if signal.getsignal(signal.SIGTERM) in (end, signal.SIG_IGN):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _sentence(place: Seat) -> str:
    said = f"{place.launcher} has asked this run to end (SIGTERM)"
    if place.transport == "mpi":
        from offbeat.transports.mpi import survives_losses

        if not survives_losses():
            said += ", as it does when a rank has died; with 'mpirun --with-ft ulfm' the others go on"
    if place.directory is not None and checkpoint_path(place.directory).exists():
        said += f"; to go on from its checkpoint: offbeat train --resume {place.directory}"
    return said
