"""One rank of a probe, as `offbeat network --transport mpi` has mpirun start it:
python -m offbeat.cli.network_member RESULT PROBE MANNER, the last two as JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from offbeat.cli import exit_code_of


def member(result: Path, probe: str, options: str) -> int:
    """Be the rank that the environment says; rank 0 writes the result, and progress as lines."""
    from offbeat.cli.network_view import Lines
    from offbeat.lab.network_test.plan import Probe
    from offbeat.lab.network_test.processes import TestOptions, take_part
    from offbeat.lab.network_test.result import write_result
    from offbeat.launch.rank_info import read_rank_info

    network = take_part(
        read_rank_info(),
        msgspec.json.decode(probe, type=Probe),
        msgspec.json.decode(options, type=TestOptions),
        Lines(),
    )
    if network is not None:
        write_result(network, result)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: member(Path(sys.argv[1]), *sys.argv[2:4])))
