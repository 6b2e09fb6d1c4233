"""Environments of other libraries, each in a directory of its own in the cache of offbeat."""

from __future__ import annotations

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import torch

from offbeat.lab.data.cache import cache_directory

MARKER = "installed.txt"
INSTALL_SECONDS_MAX = 1800
WORDS_MAX = 160
"""Characters of pip's error that a sentence quotes."""


class NotInstallable(Exception):
    """A library cannot be installed here; the message is a sentence for the user."""


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    name: that of its environment
    requirement: what pip installs, with its version
    """

    name: str
    requirement: str

    def python(self) -> Path:
        """The interpreter of its environment, which is made first where it is missing.

        It has the version of torch that runs here. Raises `NotInstallable`.
        """
        directory = cache_directory() / "bench-simulators" / self.name
        python = directory / "bin" / "python"
        # First, so that pip does not choose another version, or one for accelerators, to suit the library.
        requirements = [f"torch=={torch.__version__.split('+')[0]}", self.requirement]
        marker, wanted = directory / MARKER, "\n".join([sys.version, *requirements])
        if marker.exists() and marker.read_text() == wanted:
            return python
        try:
            venv.create(directory, clear=True, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotInstallable(f"{self.requirement} is left out: no environment can be made ({error})") from None
        for requirement in requirements:
            self._install(python, requirement)
        marker.write_text(wanted)
        return python

    def _install(self, python: Path, requirement: str) -> None:
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            reason = f"pip took longer than {INSTALL_SECONDS_MAX} s"
        else:
            if done.returncode == 0:
                return
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = (errors or done.stderr.splitlines() or ["pip failed"])[-1][:WORDS_MAX]
        raise NotInstallable(f"{self.requirement} is left out: {requirement} cannot be installed ({reason})")


PEERS = {
    "pfl": Peer("pfl", "pfl[pytorch]==0.6.0"),
    "flower": Peer("flower", "flwr[simulation]==1.41.0"),
}
