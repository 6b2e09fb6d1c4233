"""Download a file over HTTP from the first URL that answers; an interrupted download is resumed.

Incomplete content is kept in NAME.part. Only a complete file with the right checksum gets its name.
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
"""Time limit of a connection attempt, and between received bytes."""
BLOCK_BYTES = 1 << 18
SHA256_DIGITS = 64


class DownloadProgress(Protocol):
    """Receives progress: sentences, and bytes done of a total that may be unknown."""

    def say(self, sentence: str, /) -> None: ...
    def step(self, what: str, done: int, total: int | None, /) -> None: ...


class SourceFailed(RunFailed):
    """A source or URL failed; another one may work."""


def fetch(file: OfficialFile, folder: Path, progress: DownloadProgress) -> Path:
    """Download a file into a folder, unless it is there. Raises `SourceFailed` if no URL works."""
    path = folder / file.name
    if path.exists() and _is_right(path, file):
        return path
    part = folder / f"{file.name}.part"
    reasons = []
    for url in file.urls:
        try:
            _fetch_from(url, file, part, progress)
        except SourceFailed as failed:
            reasons.append(str(failed))
        else:
            os.replace(part, path)
            return path
    raise SourceFailed("; ".join(reasons))


def _fetch_from(url: str, file: OfficialFile, part: Path, progress: DownloadProgress) -> None:
    """Download from one URL. A broken connection is retried as long as each attempt received something."""
    while True:
        before = _size(part)
        try:
            complete = _receive(url, file.name, part, progress)
        except _ConnectionFailed as failed:
            if _size(part) > before:
                continue
            raise SourceFailed(f"{_host(url)} cannot be reached ({failed})") from None
        if complete and _is_right(part, file):
            return
        if complete:
            part.unlink()
            if not before:
                raise SourceFailed(f"{file.name} from {_host(url)} has a wrong checksum and was deleted")
        elif _size(part) <= before:
            kept = f"{_size(part):,} bytes of {file.name} are kept for next time"
            raise SourceFailed(f"the connection to {_host(url)} broke; {kept}")


class _ConnectionFailed(Exception):
    """A connection could not be made, or broke."""


def _receive(url: str, name: str, part: Path, progress: DownloadProgress) -> bool:
    """Append what one connection delivers. Returns whether the file is complete."""
    received = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={received}-"} if received else {})
    with _network_errors():
        try:
            response = _open_url(request)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and received:
                return True  # complete or wrong: the checksum decides
            raise
    with response:
        if received and response.status != http.client.PARTIAL_CONTENT:
            received = 0
        length = response.headers.get("Content-Length")
        total = received + int(length) if length is not None and length.isdecimal() else None
        with part.open("ab" if received else "wb") as output:
            for block in _blocks(response):
                output.write(block)
                received += len(block)
                progress.step(f"fetching {name}", received, total)
    return total is None or received >= total


def _open_url(request: urllib.request.Request) -> Any:
    """The response to a request, or an error after `SILENCE_SECONDS`.

    urllib's time limit holds for each address of a host and not for name resolution, so the request runs in a thread
    that is abandoned after the limit.
    """
    responses: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def open_url() -> None:
        try:
            responses.put(urllib.request.urlopen(request, timeout=SILENCE_SECONDS))
        except Exception as error:
            responses.put(error)

    threading.Thread(target=open_url, daemon=True, name="offbeat-fetch").start()
    try:
        response = responses.get(timeout=SILENCE_SECONDS)
    except queue.Empty:
        raise TimeoutError(f"no answer within {SILENCE_SECONDS:g} seconds") from None
    if isinstance(response, Exception):
        raise response
    return response


def _blocks(response: Any) -> Iterator[bytes]:
    while True:
        with _network_errors():
            block = response.read1(BLOCK_BYTES)  # returns what has arrived
        if not block:
            return
        yield block


@contextmanager
def _network_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        raise _ConnectionFailed(str(getattr(reason, "strerror", None) or reason)) from None


def read_page(url: str, bytes_max: int) -> tuple[str, bytes]:
    """The address after redirections, and the content of a page. Raises `SourceFailed`."""
    try:
        with _network_errors():
            response = _open_url(urllib.request.Request(url, headers={"Accept": "text/html"}))
        content = bytearray()
        with response:
            for block in _blocks(response):
                content += block
                if len(content) > bytes_max:
                    raise SourceFailed(f"a page of {_host(url)} has more than {bytes_max:,} bytes")
            return response.geturl(), bytes(content)
    except _ConnectionFailed as failed:
        raise SourceFailed(f"{_host(url)} cannot be reached ({failed})") from None


def _is_right(path: Path, file: OfficialFile) -> bool:
    """Whether a file has the checksum that is known; whether it could have if none is."""
    if file.checksum is None:
        return True
    with path.open("rb") as opened:
        if len(file.checksum) == SHA256_DIGITS:
            return hashlib.file_digest(opened, "sha256").hexdigest() == file.checksum
        return hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == file.checksum


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _host(url: str) -> str:
    return url.split("/")[2].rpartition("@")[2]  # without a password
