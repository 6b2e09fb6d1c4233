"""Where a file of a Python package can be downloaded: from the package index that pip uses on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from offbeat.lab.data.download import SourceFailed, read_page

PUBLIC_INDEX = "https://pypi.org/simple"
PAGE_BYTES_MAX = 1 << 25
PIP_SECONDS = 20.0


def file_urls(project: str, name: str) -> tuple[str, ...]:
    """The URLs of a file of a project. Raises `SourceFailed` where the index has none."""
    page = f"{index_url().rstrip('/')}/{re.sub(r'[-_.]+', '-', project).lower()}/"
    address, content = read_page(page, PAGE_BYTES_MAX)
    links = _Links()
    links.feed(content.decode(errors="replace"))
    targets = (urldefrag(urljoin(address, link)).url for link in links.found)
    urls = tuple(url for url in targets if unquote(urlsplit(url).path).rpartition("/")[2] == name)
    if not urls:
        raise SourceFailed(f"the package index at {urlsplit(page).hostname} has no {name}")
    return urls


def index_url() -> str:
    """The package index of pip's settings, or the public one."""
    if url := os.environ.get("PIP_INDEX_URL"):
        return url
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PIP_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return PUBLIC_INDEX
    return answer.stdout.strip() or PUBLIC_INDEX


class _Links(HTMLParser):
    """Collects the targets of links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for key, value in attrs if key == "href" and value]
