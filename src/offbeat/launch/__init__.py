"""Where a process sits in a run, and the local processes of one: started, watched, started again, ended."""

from offbeat.launch.children import Child, start_command, start_forked
from offbeat.launch.doors import invited, open_door
from offbeat.launch.faults import check_faults
from offbeat.launch.seat import Seat, environment_of, read_token, seat
from offbeat.launch.supervisor import Supervisor
from offbeat.launch.watch import Watch, Watcher

__all__ = [
    "Child",
    "Seat",
    "Supervisor",
    "Watch",
    "Watcher",
    "check_faults",
    "environment_of",
    "invited",
    "open_door",
    "read_token",
    "seat",
    "start_command",
    "start_forked",
]
