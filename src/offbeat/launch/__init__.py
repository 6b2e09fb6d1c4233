"""Where a process sits in a run, and the local processes of one: started, watched, started again, ended."""

from offbeat.launch.children import Child, start_command, start_forked
from offbeat.launch.doors import invited, open_door
from offbeat.launch.faults import check_faults
from offbeat.launch.mpirun import mpirun_command
from offbeat.launch.seat import TRANSPORTS, Seat, environment_of, read_token, seat
from offbeat.launch.supervisor import Supervisor
from offbeat.launch.watch import Watch, Watcher

__all__ = [
    "TRANSPORTS",
    "Child",
    "Seat",
    "Supervisor",
    "Watch",
    "Watcher",
    "check_faults",
    "environment_of",
    "invited",
    "mpirun_command",
    "open_door",
    "read_token",
    "seat",
    "start_command",
    "start_forked",
]
