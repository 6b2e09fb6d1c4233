"""Whatever an archive or a folder holds: a data set is decoded from it, or it is refused in a sentence."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from made_data import (
    Files,
    Made,
    cifar_binary,
    cifar_npm,
    cifar_pickles,
    cifar_pickles_of_python_3,
    cinic,
    folder,
    idx_files,
    imagenet_batches,
    imagenet_pickles,
    made,
    npz,
)
from malformed import DIGITS, EDITS, PLAIN, Edit, edited, malformed, refused_in_a_sentence

from offbeat.errors import ConfigurationError
from offbeat.lab.data.acquisition import get
from offbeat.lab.data.arrays import load_images
from offbeat.lab.data.catalogue import IMAGES
from offbeat.lab.data.pickles import read_pickle


class NoProgress:
    def say(self, sentence: str) -> None: ...
    def step(self, what: str, done: int, total: int | None) -> None: ...


def small(name: str) -> Made:
    with pytest.MonkeyPatch.context() as patch:
        return made(name, patch)


SETS = {name: small(name) for name in ("mnist", "cifar10", "cinic10", "imagenet32")}
FORMATS: dict[str, tuple[str, Files]] = {
    "IDX": ("mnist", idx_files(SETS["mnist"], compressed=False)),
    "IDX, compressed": ("mnist", idx_files(SETS["mnist"], compressed=True)),
    "CIFAR-10, pickled": ("cifar10", cifar_pickles(SETS["cifar10"])),
    "CIFAR-10, pickled by Python 3": ("cifar10", cifar_pickles_of_python_3(SETS["cifar10"])),
    "CIFAR-10, binary": ("cifar10", cifar_binary(SETS["cifar10"])),
    "CIFAR-10, PNG and JSON": ("cifar10", cifar_npm(SETS["cifar10"])),
    "CINIC-10": ("cinic10", cinic(SETS["cinic10"])),
    "ImageNet32, pickled": ("imagenet32", imagenet_pickles(SETS["imagenet32"])),
    "ImageNet32, .npz": ("imagenet32", imagenet_batches(SETS["imagenet32"], npz, ".npz")),
}
LONG_NAME = "long/" * 30 + "é"
"""Needs a header of its own in a .tar."""


def tarred(files: Files, kind: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as archive:
        for name, data in {LONG_NAME: b"nothing", **files}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def zipped(files: Files, method: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in {LONG_NAME: b"nothing", **files}.items():
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return file.getvalue()


PACKED: dict[str, Callable[[Files], bytes]] = {
    ".tar, PAX": lambda files: tarred(files, tarfile.PAX_FORMAT),
    ".tar, GNU": lambda files: tarred(files, tarfile.GNU_FORMAT),
    ".zip, stored": lambda files: zipped(files, zipfile.ZIP_STORED),
    ".zip": lambda files: zipped(files, zipfile.ZIP_DEFLATED),
}


def check(name: str, write: Callable[[Path], Path]) -> None:
    """What is decoded is the data set, and what is refused leaves nothing behind."""
    one = SETS[name]
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        cache = Path(place) / "cache"
        patch.setenv("OFFBEAT_DATA", str(cache))
        patch.setitem(IMAGES, name, one.entry)
        path = write(Path(place))
        with refused_in_a_sentence():
            get(one.entry, NoProgress(), path=path)
            for file, array in load_images(name).arrays().items():
                assert np.array_equal(array, one.arrays[file])
            return
        assert all(left.name.endswith(".lock") for left in cache.iterdir())


@malformed("data", st.sampled_from(sorted(FORMATS)), st.integers(0, 99), EDITS, count=50)
def test_a_damaged_file_of_a_data_set_is_harmless_or_refused(form: str, number: int, edits: list[Edit]) -> None:
    name, files = FORMATS[form]
    file = sorted(files)[number % len(files)]
    check(name, lambda place: folder(place / "raw", {**files, file: edited(files[file], edits, files[file])}))


@malformed(
    "data",
    st.sampled_from(sorted(FORMATS)),
    st.sampled_from(sorted(PACKED)),
    EDITS,
    st.booleans(),
    count=50,
    examples=[
        ("IDX", ".zip", [("set", 30, 1, b"\x80")], False),
        ("CIFAR-10, PNG and JSON", ".zip, stored", [("set", 261, 1, b"\0\0\0\0\0\0\0\x0b")], False),
    ],
)
def test_a_damaged_archive_of_a_data_set_is_harmless_or_refused(
    form: str, pack: str, edits: list[Edit], is_compressed: bool
) -> None:
    """Compressed after the damage, too: then all checksums of the compression fit."""
    name, files = FORMATS[form]
    whole = PACKED[pack](files)
    raw = edited(whole, edits, whole)

    def write(place: Path) -> Path:
        (place / "archive").write_bytes(gzip.compress(raw, 1) if is_compressed else raw)
        return place / "archive"

    check(name, write)


PICKLES = [files[file] for _, files in FORMATS.values() for file in sorted(files)[:2] if "batch" in file]
PICKLES += [pickle.dumps({"data": np.zeros(3, np.uint8), "labels": [1, 2]}, protocol) for protocol in range(6)]


@malformed("data", st.integers(0, len(PICKLES) - 1), EDITS, count=50, examples=[(2, [("set", 23, 1, b"\n")])])
def test_a_damaged_pickle_is_read_as_plain_data_or_refused(number: int, edits: list[Edit]) -> None:
    with refused_in_a_sentence(ConfigurationError):
        read_pickle(edited(PICKLES[number], edits, PICKLES[-1]), "a batch")


# Files that are whole, and lie


LABELS = PLAIN | st.sampled_from(["shared lists", "nested lists", "digits"])


def pickled_labels(labels: Any) -> bytes:
    if labels == "shared lists":  # ten to the power of thirty numbers in a few hundred bytes
        labels = [1] * 10
        for _ in range(30):
            labels = [labels] * 10
    elif labels == "nested lists":
        labels = [1]
        for _ in range(100):
            labels = [labels]
    elif labels == "digits":
        labels = [1 << 4 * DIGITS] * 10
    return pickle.dumps({"data": np.zeros((10, 48), np.uint8), "labels": labels}, 2)


@malformed("data", LABELS, count=20, examples=[("shared lists",), ("nested lists",)])
def test_pickled_labels_that_are_no_list_of_numbers_are_refused(labels: Any) -> None:
    """However many numbers a few bytes stand for."""
    files = {**FORMATS["CIFAR-10, pickled"][1], "cifar-10-batches-py/data_batch_1": pickled_labels(labels)}
    check("cifar10", lambda place: folder(place / "raw", files))


JSON_LABELS = {"deep": b"[" * 1300, "digits": b"[" + b"9" * DIGITS + b"]", "no UTF-8": b'["\xff"]', "huge": b"[1e999]"}


@malformed("data", st.sampled_from(sorted(JSON_LABELS)), count=4, examples=[("deep",)])
def test_labels_in_json_that_are_no_list_of_numbers_are_refused(labels: str) -> None:
    files = {**FORMATS["CIFAR-10, PNG and JSON"][1], "package/test_lables.json": JSON_LABELS[labels]}
    check("cifar10", lambda place: folder(place / "raw", files))


NPY_HEADERS = st.tuples(
    st.sampled_from(["|u1", "<i8", "|O", "<f8", "|V0", "|S0", "<U999999999", ">u2", "x"]) | st.text(max_size=5),
    st.booleans(),
    st.lists(st.integers(-2, 60) | st.sampled_from([2**31, 2**40, 2**62]), max_size=3).map(tuple),
)
NPY_TEXTS = NPY_HEADERS.map(lambda parts: repr(dict(zip(("descr", "fortran_order", "shape"), parts, strict=True))))
ODD_TEXTS = ["", "{", "'" * 3, "\0", "(" * 3000, "{'descr': '<u1', 'fortran_order': False, 'shape': (1L,), }", "\t\n 1"]


def npy(text: str, version: int, body: int) -> bytes:
    head = text.encode("latin1", errors="replace") + b"\n"
    size = struct.pack("<H", len(head)) if version == 1 else struct.pack("<I", len(head))
    return b"\x93NUMPY" + bytes([version, 0]) + size + head + bytes(body)


@malformed(
    "data",
    NPY_TEXTS | st.sampled_from(ODD_TEXTS),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 100),
    st.none() | st.sampled_from([0, 2**31, 2**40]),
    count=40,
    examples=[
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (1099511627776,)}", 1, 0, 2**40),
        ("{'descr': '<u1', 'fortran_order': False, 'shape': (1L,), }", 1, 1, None),  # as Python 2 wrote it
    ],
)
def test_an_array_that_lies_about_its_type_or_size_is_refused(
    text: str, version: int, body: int, file_size: int | None
) -> None:
    """Even where the archive tells the same lie."""
    data = npy(text, version, body)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("labels.npy", data)
        archive.writestr("data.npy", data)
        if file_size is not None:
            head_bytes = len(data) - body
            for info in archive.infolist():
                info.file_size = file_size + head_bytes
    files = {**FORMATS["ImageNet32, .npz"][1], "train_data_batch_1.npz": file.getvalue()}
    check("imagenet32", lambda place: folder(place / "raw", files))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


CHUNKS = [b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"iCCP", b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"acTL", b"fcTL", b"fdAT",
          b"pHYs", b"PLTE", b"IHDR", b"IEND", b"IDAT", b"abcd"]  # fmt: skip
CHUNK_BYTES = st.binary(max_size=40) | st.sampled_from(
    [
        b"",
        b"a\0\0" + zlib.compress(bytes(1 << 22)),
        b"a\0\1\0\0\0" + zlib.compress(bytes(1 << 22)),
        b"a\0\0" + b"\xff" * 9,
    ]
)
BEFORE_DATA = 33
"""The length of the signature and the first chunk."""


@malformed(
    "data",
    st.lists(st.tuples(st.sampled_from(CHUNKS), CHUNK_BYTES), min_size=1, max_size=3),
    st.sampled_from([BEFORE_DATA, -12]),
    count=40,
    examples=[([(b"iCCP", b"")], -12)],
)
def test_a_picture_with_chunks_that_do_not_belong_there_is_decoded_or_refused(
    chunks: list[tuple[bytes, bytes]], at: int
) -> None:
    (name, files), file = FORMATS["CIFAR-10, PNG and JSON"], "package/test_batch.png"
    added = b"".join(chunk(*one) for one in chunks)
    check(name, lambda place: folder(place / "raw", {**files, file: files[file][:at] + added + files[file][at:]}))


BOMB_BYTES = 5 << 28
"""More than the memory that a decoder may take."""


def bomb(size: int) -> bytes:
    return gzip.compress(bytes(size), 9)


def pax_bomb() -> bytes:
    """A .tar.gz of a few MB whose first header announces, and has, more memory than there should be."""
    info = tarfile.TarInfo("header")
    info.type, info.size = tarfile.XHDTYPE, BOMB_BYTES
    file = io.BytesIO()
    with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) as out:
        out.write(info.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(BOMB_BYTES >> 24):
            out.write(bytes(1 << 24))
    return file.getvalue()


def negative_tar() -> bytes:
    """A member of a size below 0, in the notation for sizes beyond eight octal digits."""
    buffer = bytearray(tarfile.TarInfo("a").tobuf(tarfile.GNU_FORMAT))
    buffer[124:136] = b"\xff" * 10 + b"\xfe\x00"
    buffer[148:156] = b" " * 8
    buffer[148:156] = b"%06o\0 " % sum(buffer)
    return bytes(buffer) * 3 + bytes(1024)


def zip_bomb(method: int) -> bytes:
    """A batch that the archive says is small, and is not."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method, compresslevel=9) as archive:
        with archive.open("data_batch_1", "w") as member:
            for _ in range(BOMB_BYTES >> 24):
                member.write(bytes(1 << 24))
        archive.infolist()[0].file_size = 490
    return file.getvalue()


BOMBS = {
    "IDX": lambda: bomb(BOMB_BYTES),
    ".tar": negative_tar,
    ".tar, PAX": pax_bomb,
    ".zip": lambda: zip_bomb(zipfile.ZIP_DEFLATED),
    ".zip, bzip2": lambda: zip_bomb(zipfile.ZIP_BZIP2),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOMBS)
def test_an_archive_that_decompresses_to_far_more_than_a_data_set_is_refused_in_bounded_memory(kind: str) -> None:
    raw = BOMBS[kind]()

    def write(place: Path) -> Path:
        (place / "archive").write_bytes(raw)
        return place / "archive"

    check("cifar10" if "zip" in kind else "mnist", write)
