"""The cache: which checks happen when, which damage is detected, and that data sets are complete or absent."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_data import Made, folder, idx_files, made

from offbeat.errors import ConfigurationError
from offbeat.lab.data.acquisition import get
from offbeat.lab.data.arrays import load_images
from offbeat.lab.data.cache import cache_directory, verified
from offbeat.lab.data.catalogue import IMAGE_FILES, IMAGES


class Listener:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def step(self, what: str, done: int, total: int | None) -> None:
        pass


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A small MNIST, in the cache."""
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "cache"))
    one = made("mnist", monkeypatch)
    again(one, tmp_path)
    return one


def again(one: Made, tmp_path: Path, verify: bool = False) -> list[str]:
    """Get it; returns what was said."""
    listener = Listener()
    get(one.entry, listener, path=folder(tmp_path / "raw", idx_files(one, False)), verify=verify)
    return listener.said


def here() -> Path:
    return cache_directory() / "mnist"


def is_whole(one: Made) -> bool:
    return all(np.array_equal(array, one.arrays[file]) for file, array in load_images("mnist").arrays().items())


def test_the_catalogue_has_shapes_means_and_checksums() -> None:
    assert list(IMAGES) == ["mnist", "fashion-mnist", "cifar10", "cinic10", "imagenet32"]
    for name, entry in IMAGES.items():
        assert entry.name == name
        assert len(entry.means) == entry.image_shape[-1]
        assert all(entry.shape_of(file)[0] in (entry.train, entry.test) for file in IMAGE_FILES)
    assert IMAGES["cifar10"].means == (0.4914, 0.4822, 0.4465)
    assert [len(IMAGES[name].sha256) for name in IMAGES] == [4, 4, 4, 0, 0]


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"OFFBEAT_DATA": "/somewhere", "XDG_CACHE_HOME": "/cache"}, "/somewhere"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/offbeat"),
        ({"HOME": "/home/me"}, "/home/me/.cache/offbeat"),
        ({"OFFBEAT_DATA": "", "XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/offbeat"),
    ],
)
def test_the_directory_of_the_cache(variables: dict[str, str], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OFFBEAT_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(place)


def test_a_missing_data_set_is_an_error_that_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"cifar10 is not on this machine .*; type: offbeat data get cifar10"):
        load_images("cifar10")
    with pytest.raises(ConfigurationError, match="unknown data set 'cifar-10'; did you mean 'cifar10'"):
        load_images("cifar-10")


def test_an_undamaged_data_set_is_not_downloaded_again(mnist: Made, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "raw")
    before = {path.name: path.stat().st_mtime_ns for path in here().iterdir()}
    listener = Listener()
    get(mnist.entry, listener, path=tmp_path / "raw")
    assert listener.said == []
    assert {path.name: path.stat().st_mtime_ns for path in here().iterdir()} == before


# Damage


def flip(place: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 0x20
        written_later(path, bytes(data))

    return change


def cut(count: int) -> Callable[[Path], None]:
    return lambda path: written_later(path, path.read_bytes()[:-count])


def lengthen(path: Path) -> None:
    written_later(path, path.read_bytes() + b"\0")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def written_later(path: Path, data: bytes) -> None:
    """File systems have coarse clocks; a modification by a user is at least one tick later."""
    before = path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=(before + 10**9, before + 10**9))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "its magic": flip(0),
    "its version": flip(6),
    "the length of its head": flip(8),
    "its type": flip(22),
    "the padding of its head": flip(120),
    "its first value": flip(128),
    "its last value": flip(-1),
    "cut by a byte": cut(1),
    "cut to its head": lambda path: written_later(path, path.read_bytes()[:128]),
    "emptied": lambda path: written_later(path, b""),
    "longer": lengthen,
    "gone": Path.unlink,
    "a folder": replace_by_folder,
}


@pytest.mark.parametrize("file", IMAGE_FILES)
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_array_is_detected_and_downloaded_again(damage: str, file: str, mnist: Made, tmp_path: Path) -> None:
    DAMAGES[damage](here() / file)
    assert verified(mnist.entry, everything=False) is None
    assert again(mnist, tmp_path)[0] == "what there is of mnist is damaged; getting it again"
    assert is_whole(mnist)


@pytest.mark.parametrize(
    "damage", ["its magic", "its version", "its type", "cut by a byte", "longer", "gone", "a folder"]
)
def test_load_refuses_what_has_another_size_or_shape(damage: str, mnist: Made) -> None:
    for file in IMAGE_FILES:
        whole = (here() / file).read_bytes()
        DAMAGES[damage](here() / file)
        with pytest.raises(ConfigurationError, match=r"mnist is damaged .*; type: offbeat data get mnist"):
            load_images("mnist")
        if (here() / file).is_dir():
            (here() / file).rmdir()
        (here() / file).write_bytes(whole)
    assert is_whole(mnist)


def test_a_manifest_is_checked_letter_by_letter(mnist: Made) -> None:
    path = here() / "manifest.json"
    text = path.read_text()
    noticed = 0
    for place in [place for place, letter in enumerate(text) if letter.isalnum()][::3]:
        letter = text[place]
        path.write_text(text[:place] + ("1" if letter != "1" else "2") + text[place + 1 :])
        if verified(mnist.entry, everything=False) is None:
            noticed += 1
        else:
            # A number written in another way is the same number.
            assert float(json.loads(path.read_text())["means"][0]) == json.loads(text)["means"][0]
    assert noticed > 200


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", "\ufffd", '{"format": 2}'])
def test_a_manifest_that_is_none_counts_as_damage(text: str, mnist: Made, tmp_path: Path) -> None:
    (here() / "manifest.json").write_text(text)
    with pytest.raises(ConfigurationError, match="mnist is damaged"):
        load_images("mnist")
    again(mnist, tmp_path)
    assert is_whole(mnist)


def test_files_that_were_only_touched_or_copied_are_kept_and_noted(mnist: Made, tmp_path: Path) -> None:
    shutil.copytree(here(), tmp_path / "copy")
    shutil.rmtree(here())
    shutil.copytree(tmp_path / "copy", here())
    os.utime(here() / IMAGE_FILES[0], ns=(1, 1))
    assert again(mnist, tmp_path) == []
    noted = json.loads((here() / "manifest.json").read_text())["files"][IMAGE_FILES[0]]
    assert noted["modified_ns"] == 1
    assert noted["inode"] == (here() / IMAGE_FILES[0]).stat().st_ino


def test_a_change_that_kept_size_time_and_inode_is_detected_by_verify(mnist: Made, tmp_path: Path) -> None:
    path = here() / IMAGE_FILES[0]
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(200)
        file.write(bytes([255 - path.read_bytes()[200]]))
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert again(mnist, tmp_path) == []
    assert again(mnist, tmp_path, verify=True) == [
        "what there is of mnist is damaged; getting it again",
        "mnist came from file: raw",
    ]
    assert is_whole(mnist)
    assert again(mnist, tmp_path, verify=True) == []


def test_a_process_that_has_mapped_the_old_arrays_keeps_them(mnist: Made, tmp_path: Path) -> None:
    loaded = load_images("mnist")
    (here() / "manifest.json").unlink()
    again(mnist, tmp_path)
    assert np.array_equal(loaded.train.images, mnist.arrays[IMAGE_FILES[0]])


# What the disk says


def test_a_full_disk_is_a_sentence_and_leaves_nothing(
    mnist: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shutil.rmtree(here())
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ConfigurationError, match=r"cannot write .*cache \(No space left on device\); mend that, or name"
    ):
        again(mnist, tmp_path)
    assert [path.name for path in cache_directory().iterdir()] == [".mnist.lock"]


def test_a_cache_that_cannot_be_made_is_a_sentence(
    mnist: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigurationError, match=r"cannot write .*file/cache \(Not a directory\); .* OFFBEAT_DATA"):
        again(mnist, tmp_path)


def test_a_cache_that_may_only_be_read_can_be_used(
    mnist: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "here")

    os.utime(here() / IMAGE_FILES[0], ns=(1, 1))
    monkeypatch.setattr("tempfile.mkstemp", forbidden)
    assert again(mnist, tmp_path) == []
    monkeypatch.setattr("tempfile.mkdtemp", forbidden)
    shutil.rmtree(here())
    with pytest.raises(ConfigurationError, match=r"cannot write here \(Permission denied\)"):
        again(mnist, tmp_path)


def test_a_file_that_may_not_be_read_is_named(mnist: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(here())
    secret = tmp_path / "raw" / "train-labels-idx1-ubyte"
    opened = Path.open

    def refusing(self: Path, *arguments: Any, **more: Any) -> Any:
        if self == secret:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return opened(self, *arguments, **more)

    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(ConfigurationError, match=r"cannot read .*train-labels-idx1-ubyte \(Permission denied\)"):
        get(mnist.entry, Listener(), path=tmp_path / "raw")


def test_what_a_killed_process_left_behind_is_removed(mnist: Made, tmp_path: Path) -> None:
    (here() / "manifest.json").unlink()
    folder(cache_directory() / ".mnist-abc", {"train-images.npy": b"half"})
    again(mnist, tmp_path)
    assert sorted(path.name for path in cache_directory().iterdir()) == [".mnist.lock", "mnist"]
