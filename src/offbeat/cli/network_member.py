"""One rank of a probe, as `offbeat network --transport mpi` has mpirun start it:
python -m offbeat.cli.network_member RESULT PROBE MANNER, the last two as JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from offbeat.cli import answered


def member(result: Path, probe: str, manner: str) -> int:
    """Be the rank that the environment says; rank 0 writes the result, and progress as lines."""
    from offbeat.cli.network_view import Lines
    from offbeat.launch import seat
    from offbeat.probing.plan import Probe
    from offbeat.probing.processes import Manner, take_part
    from offbeat.probing.result import write_result

    network = take_part(
        seat(), msgspec.json.decode(probe, type=Probe), msgspec.json.decode(manner, type=Manner), Lines()
    )
    if network is not None:
        write_result(network, result)
    return 0


if __name__ == "__main__":
    sys.exit(answered(lambda: member(Path(sys.argv[1]), *sys.argv[2:4])))
