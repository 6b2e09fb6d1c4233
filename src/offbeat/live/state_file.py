"""The file format of checkpoints: nested plain values and tensors in one file, without pickle.

A file is a header of fixed size, a tree, the bytes of the tensors, and a SHA-256 digest of all that. The tree is
msgpack: plain values directly, everything else as an array that begins with its kind, so that tuples stay tuples and
tensors keep their dtype, shape and memory order. Nothing in a file can be executed.

A file is replaced atomically and only after it was synced to disk, so a complete one exists whenever a process is
killed or the power fails. Reading checks the claimed sizes against the file size before it allocates memory, and the
digest before it returns anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import struct
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from torch import Tensor

from offbeat.core.device_transfer import to_host
from offbeat.errors import ConfigurationError, ContractViolation, OffbeatError, RunFailed
from offbeat.failpoints import failpoint

PARTIAL = ".partial"

MAGIC = b"offbeat!"
VERSION = 1
HEAD = struct.Struct("<8sB7xQQ")
"""Magic, format version, bytes of the tree, bytes of the tensors."""

CHUNK_BYTES = 1 << 20
"""Hashed and copied at a time, so that a chunk is still in the cache when it is copied."""

_SAVING = threading.Lock()
"""Serializes `save`: partial files share one name, so that killed processes leave at most one behind."""

LIST, TUPLE, DICT, TENSOR, BIG_INTEGER = range(5)
"""The kind of an array in the tree, its first item."""

DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).removeprefix("torch.").startswith("q")
}
"""All but the quantized ones, whose scale is not part of their bytes."""

DIMENSIONS_MAX = 64
"""Most operations of torch accept no more dimensions; with a limit, damaged shapes are refused in no time."""

DTYPE_NAMES = {value: name for name, value in DTYPES.items()}


def save(path: Path, state: Any, replacing: Callable[[], None] = lambda: None) -> None:
    """Write nested dictionaries, lists, tuples, plain values and tensors, atomically.

    `replacing` is called when the new file is complete, just before it takes the place of the old one.

    Raises `ContractViolation` for any other type in `state`, and `RunFailed` if the file cannot be written.
    """
    parts = _parts(state)
    partial = path.with_name(path.name + PARTIAL)
    try:
        with _SAVING:
            try:
                with partial.open("wb", buffering=0) as file:
                    failpoint("checkpoint.write")
                    _write_all(file, parts)
                failpoint("checkpoint.replace")
                replacing()
                os.replace(partial, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
                raise
            _sync_directory(path.parent)
    except OSError as error:
        raise RunFailed(
            f"cannot write the checkpoint {path} ({error.strerror or error}); "
            "make room there, or name another place with --out"
        ) from None


def dumps(state: Any) -> bytes:
    """What `save` writes, as bytes; raises `ContractViolation` for other types."""
    parts = _parts(state)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join([*parts, digest.digest()])


def _parts(state: Any) -> list[memoryview]:
    """The parts of a file but for the digest: header, tree, and the memory of each tensor."""
    tensors: list[Tensor] = []
    try:
        tree = msgspec.msgpack.encode(_pack(state, "state", tensors))
    except UnicodeEncodeError as error:
        raise ContractViolation(f"a text in the state cannot be written as UTF-8: {error}") from None
    head = HEAD.pack(MAGIC, VERSION, len(tree), sum(tensor.nbytes for tensor in tensors))
    return [memoryview(head), memoryview(tree), *map(_raw, tensors)]


def _pack(value: Any, where: str, tensors: list[Tensor] | None) -> Any:
    """The tree of a value. Its tensors are appended to `tensors`; where that is None, tensors are not allowed."""
    if value is None or isinstance(value, bool | bytes):
        return value
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 64 else [BIG_INTEGER, hex(value)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list | tuple):
        kind = LIST if isinstance(value, list) else TUPLE
        return [kind, *(_pack(item, f"{where}[{index}]", tensors) for index, item in enumerate(value))]
    if isinstance(value, dict):
        packed: list[Any] = [DICT]
        for key, item in value.items():
            packed += _pack(key, f"a key of {where}", None), _pack(item, f"{where}[{key!r}]", tensors)
        return packed
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and value.dtype in DTYPE_NAMES
    if is_dense and tensors is not None and value.ndim <= DIMENSIONS_MAX:
        stored, order = _in_memory_order(to_host(value.detach().resolve_conj().resolve_neg()))
        tensors.append(stored)
        return [TENSOR, DTYPE_NAMES[value.dtype], list(stored.shape), order]
    name = f"{value.layout} tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    raise ContractViolation(
        f"{where} is a {name}, which a checkpoint cannot hold; "
        "expected dictionaries, lists, tuples, numbers, texts, bytes, None and dense tensors "
        f"of at most {DIMENSIONS_MAX} dimensions"
    )


def _in_memory_order(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """The tensor with its dimensions permuted into memory order, hence contiguous, and that permutation.

    Fused optimizers need a momentum to have the strides of its parameter, channels-last ones included.
    """
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    ordered = tensor.permute(order)
    if ordered.is_contiguous():
        return ordered, order
    return tensor.contiguous(), list(range(tensor.ndim))


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    # A contiguous tensor of one element or none may have a last stride other than 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _chunks(part: memoryview) -> Iterator[memoryview]:
    return (part[start : start + CHUNK_BYTES] for start in range(0, len(part), CHUNK_BYTES))


def _write_all(file: FileIO, parts: list[memoryview]) -> None:
    digest = hashlib.sha256()
    for part in parts:
        for chunk in _chunks(part):
            digest.update(chunk)
            _write(file, chunk)
    _write(file, memoryview(digest.digest()))
    os.fsync(file.fileno())


def _write(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _sync_directory(directory: Path) -> None:
    """Sync a directory: a renamed file is on disk only once its directory is."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Reading


class _CorruptFile(OffbeatError):
    """The file is truncated or corrupt."""


def load(path: Path) -> Any:
    """Read what `save` has written, each tensor in its own memory; raises `ConfigurationError`."""
    try:
        with path.open("rb") as file:
            return _read(file, os.fstat(file.fileno()).st_size, path)
    except OSError as error:
        raise ConfigurationError(
            f"the checkpoint {path} cannot be read ({error.strerror or error}); "
            "name the directory of a run that has made one, or start anew without --resume"
        ) from None
    except (_CorruptFile, RecursionError):
        raise ConfigurationError(
            f"the checkpoint {path} is cut off or corrupt; restore it from a copy, or start anew without --resume"
        ) from None


def loads(data: bytes, name: str) -> Any:
    """Read what `dumps` has written; raises `ConfigurationError`, which calls the data `name`."""
    try:
        return _read(io.BytesIO(data), len(data), name)
    except (_CorruptFile, RecursionError):
        raise ConfigurationError(f"{name} is cut off or corrupt; start anew without --resume") from None


def _read(file: BinaryIO, size: int, path: Path | str) -> Any:
    head = file.read(HEAD.size)
    if head[: len(MAGIC)] != MAGIC:
        raise ConfigurationError(f"{path} is not a checkpoint of offbeat; name one that a run has made")
    if len(head) < HEAD.size:
        raise _CorruptFile
    _, version, tree_bytes, tensor_bytes = HEAD.unpack(head)
    if version != VERSION:
        raise ConfigurationError(
            f"the checkpoint {path} was written in version {version}, and this version of offbeat reads {VERSION}; "
            "resume with the offbeat that made it, or start anew without --resume"
        )
    digest = hashlib.sha256(head)
    if HEAD.size + tree_bytes + tensor_bytes + digest.digest_size != size:
        raise _CorruptFile
    tree = file.read(tree_bytes)
    digest.update(tree)
    try:
        packed = msgspec.msgpack.decode(tree)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise _CorruptFile from None
    unpacker = _Unpacker(tensor_bytes)
    state = unpacker.value(packed)
    if unpacker.bytes_left:
        raise _CorruptFile
    for raw in unpacker.storages:
        for chunk in _chunks(raw.numpy().data):
            if file.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
                raise _CorruptFile
            digest.update(chunk)
    if file.read() != digest.digest():
        raise _CorruptFile
    return state


class _Unpacker:
    """Turns a tree into its value. Memory of a tensor is allocated only if the file has enough bytes left for it."""

    def __init__(self, tensor_bytes: int) -> None:
        self.bytes_left = tensor_bytes
        self.storages: list[Tensor] = []

    def value(self, packed: Any) -> Any:
        match packed:
            case [kind, *items] if kind in (LIST, TUPLE):
                values = [self.value(item) for item in items]
                return values if kind == LIST else tuple(values)
            case [kind, *items] if kind == DICT and len(items) % 2 == 0:
                try:
                    return {self.value(k): self.value(v) for k, v in zip(items[::2], items[1::2], strict=True)}
                except TypeError:  # an unhashable key
                    raise _CorruptFile from None
            case [kind, str() as dtype, [*shape], [*order]] if kind == TENSOR and dtype in DTYPES:
                return self._tensor(DTYPES[dtype], shape, order)
            case [kind, str() as digits] if kind == BIG_INTEGER:
                try:
                    return int(digits, 16)
                except ValueError:
                    raise _CorruptFile from None
            case None | bool() | int() | float() | str() | bytes():
                return packed
        raise _CorruptFile

    def _tensor(self, dtype: torch.dtype, shape: list[Any], order: list[Any]) -> Tensor:
        dimensions = range(len(shape))
        if len(shape) > DIMENSIONS_MAX or len(order) != len(shape):
            raise _CorruptFile
        if any(type(number) is not int or number < 0 for number in (*shape, *order)):
            raise _CorruptFile
        nbytes = math.prod(shape) * dtype.itemsize
        countable = math.prod(size or 1 for size in shape) < 1 << 63  # strides must not overflow, even of empty tensors
        if sorted(order) != list(dimensions) or nbytes > self.bytes_left or not countable:
            raise _CorruptFile
        self.bytes_left -= nbytes
        raw = torch.empty(nbytes, dtype=torch.uint8)
        self.storages.append(raw)
        return raw.view(dtype).view(shape).permute([order.index(dimension) for dimension in dimensions])
