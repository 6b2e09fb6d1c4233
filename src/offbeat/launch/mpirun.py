"""mpirun, called by us: which one, and with which flags.

The one beside this Python comes first, since `pip install 'offbeat[mpi]'` puts it there together with its library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from offbeat.errors import ConfigurationError

ULFM_SINCE = 5
"""The first version of Open MPI whose mpirun lets the others go on when one process is lost."""


def mpirun_command(processes: int) -> list[str]:
    """The words that start a program so many times on this machine; the program follows them."""
    program = _found()
    said = _version(program)
    flags = ["-n", str(processes)]
    if match := re.search(r"\(Open MPI\) (\d+)", said):
        # Ranks have several threads and there may be more ranks than cores, so nobody is bound to one.
        flags += ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            flags.append("--allow-run-as-root")
        if int(match[1]) >= ULFM_SINCE:
            flags += ["--with-ft", "ulfm"]
    return [program, *flags]


def _found() -> str:
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.is_file() else shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None:
        raise ConfigurationError(
            "there is no mpirun here; type: pip install 'offbeat[mpi]', or put the one of this machine on the PATH"
        )
    return program


def _version(program: str) -> str:
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"{program} does not work ({error}); type: pip install 'offbeat[mpi]'") from None
