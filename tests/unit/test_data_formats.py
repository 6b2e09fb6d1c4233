"""Archives and folders of every known format decode to the same arrays; everything else is refused in a sentence."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_data import (
    FORMS,
    SIDE,
    Made,
    cifar_binary,
    cifar_npm,
    cifar_pickles,
    cinic,
    folder,
    idx_files,
    imagenet_batches,
    imagenet_pickles,
    made,
    npz,
    pickled,
    planes,
    png,
    tar,
)

from offbeat.errors import ConfigurationError, MissingDependency, OffbeatError
from offbeat.lab.data.acquisition import get
from offbeat.lab.data.arrays import load_images
from offbeat.lab.data.cache import Manifest, cache_directory
from offbeat.lab.data.pickles import read_pickle


class Listener:
    """Records the progress."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[tuple[str, int, int | None]] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def step(self, what: str, done: int, total: int | None) -> None:
        self.steps.append((what, done, total))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "cache"))


def got(one: Made, path: Path) -> Manifest:
    return get(one.entry, Listener(), path=path)


def nothing_is_left() -> bool:
    """A failed attempt leaves nothing but a lock file behind."""
    return all(path.name.endswith(".lock") for path in cache_directory().iterdir())


@pytest.mark.parametrize("form", list(FORMS))
def test_every_format_decodes_to_the_same_arrays(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, write = FORMS[form]
    one = made(name, monkeypatch)
    listener = Listener()
    manifest = get(one.entry, listener, path=write(one, tmp_path))
    loaded = load_images(name)
    for file, array in loaded.arrays().items():
        assert isinstance(array, np.memmap)
        assert array.dtype == one.arrays[file].dtype
        assert np.array_equal(array, one.arrays[file]), file
        assert not array.flags.writeable
    assert manifest.means == pytest.approx(one.entry.means)
    assert manifest.arrays == one.entry.sha256
    what, done, total = listener.steps[-1]
    assert (what, done >= (total or 0)) == (f"decoding {name}", True)


@pytest.mark.parametrize("form", list(FORMS))
def test_a_changed_byte_is_detected_at_any_position(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is changed: either it does not matter for the arrays, or a sentence says that something is wrong."""
    name, write = FORMS[form]
    one = made(name, monkeypatch)
    path = write(one, tmp_path)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    draw = np.random.default_rng(0)
    for file in [files[int(index)] for index in draw.integers(0, len(files), 25)]:
        whole = file.read_bytes()
        place = int(draw.integers(0, len(whole)))
        file.write_bytes(whole[:place] + bytes([whole[place] ^ int(draw.integers(1, 256))]) + whole[place + 1 :])
        check_harmless_or_refused(one, path)
        file.write_bytes(whole)


@pytest.mark.parametrize("form", list(FORMS))
def test_a_file_that_was_cut_off_is_noticed(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, write = FORMS[form]
    one = made(name, monkeypatch)
    path = write(one, tmp_path)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for file in files[-3:]:
        whole = file.read_bytes()
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:length])
            check_harmless_or_refused(one, path)
        file.write_bytes(whole)


def check_harmless_or_refused(one: Made, path: Path) -> None:
    try:
        got(one, path)
    except OffbeatError:
        assert nothing_is_left()
        return
    for file, array in load_images(one.entry.name).arrays().items():
        assert np.array_equal(array, one.arrays[file])
    for file in (cache_directory() / one.entry.name).iterdir():
        file.unlink()
    (cache_directory() / one.entry.name).rmdir()


# What is not known, not whole, or not what it is said to be


KNOWN = {
    "mnist": "IDX files such as train-images-idx3-ubyte",
    "cifar10": "cifar-10-python.tar.gz, cifar-10-binary.tar.gz",
    "cinic10": "CINIC-10.tar.gz, or its folder",
    "imagenet32": "train_data_batch_1 to 10 and val_data",
}


@pytest.mark.parametrize("name", list(KNOWN))
def test_what_is_nothing_known_is_answered_with_what_was_expected(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(name, monkeypatch)
    letter = folder(tmp_path / "letters", {"letter.txt": b"Dear Sir", "empty": b""})
    for path in (letter, letter / "letter.txt", tar(tmp_path / "x.tar.gz", {"a": b"b"})):
        with pytest.raises(
            ConfigurationError, match=f"holds nothing that {name} could be read from; expected {KNOWN[name]}"
        ):
            got(one, path)
    assert nothing_is_left()


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="nowhere does not exist; name an archive or a folder that does"):
        got(made("mnist", monkeypatch), tmp_path / "nowhere")


def without(files: dict[str, bytes], *names: str) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if Path(name).name not in names}


@pytest.mark.parametrize(
    ("name", "files", "missing"),
    [
        (
            "mnist",
            lambda one: without(idx_files(one, False), "t10k-labels-idx1-ubyte"),
            "lacks test-labels.npy of mnist",
        ),
        ("cifar10", lambda one: without(cifar_pickles(one), "data_batch_3"), "lacks data_batch_3 of cifar10"),
        ("cifar10", lambda one: without(cifar_npm(one), "test_lables.json"), "lacks test_labels of cifar10"),
        ("cinic10", lambda one: without(cinic(one), "000.png"), "lacks 1 test images, 1 train images of cinic10"),
        ("imagenet32", lambda one: without(imagenet_pickles(one), "val_data"), "lacks val_data"),
        (
            "imagenet32",
            lambda one: without(imagenet_pickles(one), "train_data_batch_11"),
            "lacks 8 of its 50 training images",
        ),
    ],
)
def test_what_is_missing_is_named(
    name: str, files: Callable[[Made], Any], missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(name, monkeypatch)
    with pytest.raises(ConfigurationError, match=missing):
        got(one, folder(tmp_path / "part", files(one)))
    assert nothing_is_left()


def test_another_data_set_of_the_same_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = made("mnist", monkeypatch), made("fashion-mnist", monkeypatch)
    with pytest.raises(
        ConfigurationError, match="the images from file: raw are not those of mnist: the means of their"
    ):
        got(one, folder(tmp_path / "raw", idx_files(other, False)))


def test_the_same_images_in_another_order_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("mnist", monkeypatch)
    turned = Made(one.entry, {file: array[::-1].copy() for file, array in one.arrays.items()})
    with pytest.raises(ConfigurationError, match=r"is not mnist: train-images.npy has another checksum than expected"):
        got(one, folder(tmp_path / "raw", idx_files(turned, False)))


def test_labels_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("cifar10", monkeypatch, pinned=False)
    one.arrays["test-labels.npy"][3] = 10
    with pytest.raises(
        ConfigurationError, match="the test labels from file: c are not those of cifar10: expected every"
    ):
        got(one, folder(tmp_path / "c", cifar_binary(one)))


@pytest.mark.parametrize("labels", [b"[1, 2]", b"nonsense", b"[" + b"1.5," * 49 + b"1]", b'["a"]', b"\xff"])
def test_labels_that_are_no_whole_numbers_are_refused(
    labels: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made("cifar10", monkeypatch)
    files = {**cifar_npm(one), "package/train_lables.json": labels}
    with pytest.raises(ConfigurationError, match=r"the labels in package/train_lables.json are not 50 whole numbers"):
        got(one, tar(tmp_path / "c.tgz", files))


def test_a_picture_of_another_size_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made("cifar10", monkeypatch)
    large = bytearray(png(np.zeros((10, SIDE * SIDE, 3), np.uint8)))
    for width in (7, 20_000):
        large[16:24] = width.to_bytes(4, "big") + (20_000).to_bytes(4, "big")
        with pytest.raises(ConfigurationError, match=r"is a picture of 7 × 20000, but|is no PNG, or a damaged one"):
            got(one, tar(tmp_path / "c.tgz", {**cifar_npm(one), "package/data_batch_2.png": bytes(large)}))


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("cifar10", monkeypatch)
    path = folder(tmp_path / "c", cifar_pickles(one))
    os.truncate(path / "cifar-10-batches-py/data_batch_4", 1 << 40)  # takes no room on the disk
    with pytest.raises(ConfigurationError, match=r"data_batch_4 has 1,099,511,627,776 bytes, but can have .* at most"):
        got(one, path)


def test_an_npz_that_announces_more_than_it_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("imagenet32", monkeypatch)
    files = imagenet_batches(one, npz, ".npz")
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (1 << 40, 48)})
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.npy", head.getvalue())
        archive.writestr("labels.npy", head.getvalue())
    files["train_data_batch_2.npz"] = file.getvalue()
    with pytest.raises(
        ConfigurationError, match=r"train_data_batch_2.npz is damaged: data is not as large as its head says"
    ):
        got(one, folder(tmp_path / "i", files))


def test_names_in_an_archive_are_never_used_as_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("mnist", monkeypatch)
    files = {f"../../../{name}": data for name, data in idx_files(one, False).items()}
    path = tmp_path / "deep/er/m.tar"
    path.parent.mkdir(parents=True)
    tar(path, {**files, str(tmp_path / "absolute"): b"x"}, "w")
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    got(one, path)
    after = {file for file in tmp_path.rglob("*") if cache_directory() not in (file, *file.parents)}
    assert after == set(before)


def test_without_pillow_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("cifar10", monkeypatch)
    path = tar(tmp_path / "c.tgz", cifar_npm(one))
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(MissingDependency, match=r"decoding pictures needs pillow, .* pip install 'offbeat\[data\]'"):
        got(one, path)


# Pickles


class Trap:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (pickle.dumps({"data": Trap(os.mkdir, "trapped")}), r"names posix.mkdir"),
        (pickle.dumps({"data": Trap(eval, "1")}), r"names builtins.eval"),
        (pickle.dumps(Made), "names made_data.Made"),
        (pickle.dumps(np.array([None])), "holds an array of 'O8'"),
        (pickle.dumps(np.array(["text"])), "holds an array of"),
        (pickle.dumps(np.ma.zeros(3)), "names numpy.ma"),
        (b"cnumpy\nndarray\n)R.", "makes an array in an unknown way"),
        (b"cnumpy\ndtype\n}b.", "changes what it is read with"),
        (b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf16\x86R.", "codes bytes in an unknown way"),
        (b"(iposix\nsystem\n.", "uses the instruction INST"),
        (b"cnumpy\ndtype\n)\x81.", "uses the instruction NEWOBJ"),
        (b"Pname\n.", "uses the instruction PERSID"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "numbers what it holds in a way that needs too much memory"),
    ],
)
def test_a_pickle_that_does_anything_else_than_hold_data_is_refused(
    data: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigurationError, match=f"a batch is a pickle that {why}.*; only arrays and plain data are read"
    ):
        read_pickle(data, "a batch")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"\x80\x02}", b"nonsense", b"\x80\x02.", pickle.dumps([1, 2])[:-1], b"0."]
)
def test_a_damaged_pickle_is_an_error_that_says_so(data: bytes) -> None:
    with pytest.raises(ConfigurationError, match="a batch is a damaged pickle"):
        read_pickle(data, "a batch")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", ["u1", "i4", "i8", ">i8", "f4", "<f8"])
def test_arrays_survive_being_pickled(protocol: int, kind: str) -> None:
    for array in (np.arange(12).astype(kind).reshape(3, 4), np.arange(12).astype(kind).reshape(3, 4, order="F")):
        read = read_pickle(pickle.dumps({"a": array, "n": [1, -2, 300], "t": "text"}, protocol), "a batch")
        assert np.array_equal(read["a"], array)
        assert read["a"].dtype == array.dtype
        assert (read["n"], read["t"]) == ([1, -2, 300], "text")


def test_a_pickle_without_images_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("cifar10", monkeypatch)
    files = {**cifar_pickles(one), "cifar-10-batches-py/data_batch_1": pickle.dumps({"labels": [1]}, 2)}
    with pytest.raises(ConfigurationError, match="data_batch_1 is a pickle without images and labels"):
        got(one, folder(tmp_path / "c", files))


def test_images_of_another_shape_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("cifar10", monkeypatch)
    images, labels = one.part("train")
    files = {**cifar_pickles(one), "cifar-10-batches-py/data_batch_1": pickled(images[:9], labels[:9], 2)}
    with pytest.raises(ConfigurationError, match=r"the images in .*data_batch_1 have shape \(9, 48\) and type uint8"):
        got(one, folder(tmp_path / "c", files))
    assert planes(images).shape == (50, 48)


def test_the_manifest_names_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made("mnist", monkeypatch)
    got(one, folder(tmp_path / "raw", idx_files(one, False)))
    written = json.loads((cache_directory() / "mnist/manifest.json").read_text())
    assert written["source"] == "file: raw"
    assert sorted(written["files"]) == sorted(one.arrays)
