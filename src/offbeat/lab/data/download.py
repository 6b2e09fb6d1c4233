"""Fetch a file over HTTP, from the first place that answers, and go on where an earlier attempt stopped.

What has arrived is kept in NAME.part. Only a file that is complete and has the right checksum gets its name.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from offbeat.errors import RunFailed
from offbeat.lab.data.catalogue import OfficialFile

SILENCE_SECONDS = 8.0
"""How long to wait for a connection, or for the next bytes."""
BLOCK_BYTES = 1 << 18


class DownloadProgress(Protocol):
    """Is told what is done, and how far it is."""

    def say(self, sentence: str, /) -> None: ...
    def step(self, what: str, done: int, total: int | None, /) -> None: ...


class SourceFailed(RunFailed):
    """A place that does not give what was asked for; another one may."""


def fetch(wanted: OfficialFile, folder: Path, progress: DownloadProgress) -> Path:
    """The file, in this folder."""
    path = folder / wanted.name
    if path.exists() and _md5(path) == wanted.md5:
        return path
    part = folder / f"{wanted.name}.part"
    reasons = []
    for url in wanted.urls:
        try:
            _fetch_from(url, wanted, part, progress)
        except SourceFailed as failed:
            reasons.append(str(failed))
        else:
            os.replace(part, path)
            return path
    raise SourceFailed("; ".join(reasons))


def _fetch_from(url: str, wanted: OfficialFile, part: Path, progress: DownloadProgress) -> None:
    """Fill the part from one place. Tries again as long as each connection brings something."""
    while True:
        there = _size(part)
        try:
            complete = _receive(url, wanted.name, part, progress)
        except _Broken as broken:
            if _size(part) > there:
                continue
            raise SourceFailed(f"{_host(url)} cannot be reached ({broken})") from None
        if complete and _md5(part) == wanted.md5:
            return
        if complete:
            part.unlink()
            if not there:
                raise SourceFailed(f"{wanted.name} from {_host(url)} has a wrong checksum and was deleted")
        elif _size(part) <= there:
            kept = f"{_size(part):,} bytes of {wanted.name} are kept for next time"
            raise SourceFailed(f"the connection to {_host(url)} broke; {kept}")


class _Broken(Exception):
    """A connection that could not be made, or that ended."""


def _receive(url: str, name: str, part: Path, progress: DownloadProgress) -> bool:
    """Append what one connection brings; True where that is all of it."""
    there = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={there}-"} if there else {})
    with _network():
        try:
            response = _answer(request)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and there:
                return True  # nothing is missing, or all of it is wrong: the checksum tells
            raise
    with response:
        if there and response.status != http.client.PARTIAL_CONTENT:
            there = 0
        length = response.headers.get("Content-Length")
        total = there + int(length) if length is not None and length.isdecimal() else None
        with part.open("ab" if there else "wb") as file:
            for block in _blocks(response):
                file.write(block)
                there += len(block)
                progress.step(f"fetching {name}", there, total)
    return total is None or there >= total


def _answer(request: urllib.request.Request) -> Any:
    """The answer to a request, or an error after a few seconds.

    A host can have many addresses, each with a time limit of its own, and looking them up has none; so this is done
    in a thread that is not waited for any longer.
    """
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urllib.request.urlopen(request, timeout=SILENCE_SECONDS))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True, name="offbeat-fetch").start()
    try:
        answer = answers.get(timeout=SILENCE_SECONDS)
    except queue.Empty:
        raise TimeoutError(f"no answer within {SILENCE_SECONDS:g} seconds") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _blocks(response: Any) -> Iterator[bytes]:
    while True:
        with _network():
            block = response.read1(BLOCK_BYTES)  # what there is, and not only when there is so much
        if not block:
            return
        yield block


@contextmanager
def _network() -> Iterator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise _Broken(str(getattr(reason, "strerror", None) or reason)) from None


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _host(url: str) -> str:
    return url.split("/")[2]
