"""Where a process sits in a run, and the local processes of one: started, watched, started again, ended."""

from offbeat.launch.children import Child, start_command, start_forked
from offbeat.launch.listeners import advertised_address, open_listener
from offbeat.launch.mpirun import mpirun_command
from offbeat.launch.rank_info import TRANSPORTS, RankInfo, environment_of, read_rank_info, read_token
from offbeat.launch.supervisor import RunMonitor, RunObserver, Supervisor, check_faults

__all__ = [
    "TRANSPORTS",
    "Child",
    "RankInfo",
    "RunMonitor",
    "RunObserver",
    "Supervisor",
    "advertised_address",
    "check_faults",
    "environment_of",
    "mpirun_command",
    "open_listener",
    "read_rank_info",
    "read_token",
    "start_command",
    "start_forked",
]
