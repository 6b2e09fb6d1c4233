"""Where a process sits in a run, and the local processes of one: started, watched, started again, ended."""

from offbeat.launch.children import Child, start_command, start_forked
from offbeat.launch.doors import listening, open_door
from offbeat.launch.faults import check_faults
from offbeat.launch.seat import Seat, environment_of, read_token, seat
from offbeat.launch.supervisor import Supervisor

__all__ = [
    "Child",
    "Seat",
    "Supervisor",
    "check_faults",
    "environment_of",
    "listening",
    "open_door",
    "read_token",
    "seat",
    "start_command",
    "start_forked",
]
