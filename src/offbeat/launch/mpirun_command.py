"""The command line of mpirun: that beside this Python comes first, where `pip install 'offbeat[mpi]'` puts it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from offbeat.errors import ConfigurationError

ULFM_SINCE = 5
"""The first version of Open MPI whose mpirun lets the other processes go on when one is lost."""


def mpirun_command(processes: int) -> list[str]:
    """The start of a command line that runs a program in `processes` processes on this machine."""
    program = _find_mpirun()
    flags = ["-n", str(processes)]
    if match := re.search(r"\(Open MPI\) (\d+)", _version(program)):
        # Ranks have several threads and there may be more ranks than cores, so none is bound to a core.
        flags += ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            flags.append("--allow-run-as-root")
        if int(match[1]) >= ULFM_SINCE:
            flags += ["--with-ft", "ulfm"]
    return [program, *flags]


def _find_mpirun() -> str:
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.is_file() else shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None:
        raise ConfigurationError(
            "mpirun was not found; type: pip install 'offbeat[mpi]', or put the one of this machine on the PATH"
        )
    return program


def _version(program: str) -> str:
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"{program} does not work ({error}); type: pip install 'offbeat[mpi]'") from None
