"""Checkpoints: what a run needs to go on from, in one file.

A file is a head of fixed size, a tree, the bytes of the tensors, and a digest of all that. The tree is msgpack: plain
values as they are, everything else as an array that begins with its kind, so that a tuple comes back as a tuple and
a tensor as a tensor of the same dtype, shape and order in memory. Nothing in a file can be executed.

A checkpoint replaces the one before in one step, and only once it is on the disk: whenever a process is killed or the
power fails, there is a whole one. Reading checks what a file claims against its size before it allocates, and the
digest before anything is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import struct
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from torch import Tensor

from offbeat.errors import ConfigurationError, ContractViolation, OffbeatError, RunFailed

PARTIAL = ".partial"

MAGIC = b"offbeat!"
VERSION = 1
HEAD = struct.Struct("<8sB7xQQ")
"""The magic, the version, and how many bytes the tree and the tensors take."""

CHUNK_BYTES = 1 << 20
"""Hashed and moved at a time: what was hashed is still in the cache when it is copied."""

_SAVING = threading.Lock()
"""One at a time: the name of what is not finished is always the same, so that killed processes leave at most one."""

LIST, TUPLE, DICT, TENSOR, BIG = range(5)
"""How an array of the tree begins."""

DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).removeprefix("torch.").startswith("q")
}
"""All but the quantised ones, which are more than their bytes."""

NAMES = {value: name for name, value in DTYPES.items()}


def save(path: Path, state: Any) -> None:
    """Write nested dictionaries, lists, tuples, plain values and tensors; `path` holds the old or the new, whole."""
    tensors: list[Tensor] = []
    try:
        tree = msgspec.msgpack.encode(_pack(state, "state", tensors))
    except UnicodeEncodeError as error:
        raise ContractViolation(f"a text in the state cannot be written as UTF-8: {error}") from None
    head = HEAD.pack(MAGIC, VERSION, len(tree), sum(tensor.nbytes for tensor in tensors))
    partial = path.with_name(path.name + PARTIAL)
    try:
        with _SAVING:
            try:
                with partial.open("wb", buffering=0) as file:
                    _write_all(file, [memoryview(head), memoryview(tree), *map(_raw, tensors)])
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


def _pack(value: Any, where: str, tensors: list[Tensor] | None) -> Any:
    """The tree of a value; its tensors, where it may have any, are put aside as they lie in memory, in that order."""
    if value is None or isinstance(value, bool | bytes):
        return value
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 64 else [BIG, hex(value)]
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
    if isinstance(value, Tensor) and tensors is not None and value.layout is torch.strided and value.dtype in NAMES:
        stored, order = _as_it_lies(value.detach().resolve_conj().resolve_neg().cpu())
        tensors.append(stored)
        return [TENSOR, NAMES[value.dtype], list(stored.shape), order]
    found = f"a {value.layout} tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ContractViolation(
        f"{where} is {found}, which a checkpoint cannot hold; "
        "expected dictionaries, lists, tuples, numbers, texts, bytes, None and dense tensors"
    )


def _as_it_lies(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """The tensor with its dimensions in the order of memory, so that it is contiguous, and that order.

    Fused optimizers walk through memory: a momentum must come back in the strides of its parameter, channels last too.
    """
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    lying = tensor.permute(order)
    if lying.is_contiguous():
        return lying, order
    return tensor.contiguous(), list(range(tensor.ndim))


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, where they are."""
    # Contiguous does not mean a last stride of 1 where there is but one element, or none.
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
    """A new name is on the disk only once its directory is."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Reading


class _Corrupt(OffbeatError):
    """The file is not what was written."""


def load(path: Path) -> Any:
    """What `save` was given; each tensor in memory of its own."""
    try:
        with path.open("rb") as file:
            return _read(file, path)
    except OSError as error:
        raise ConfigurationError(
            f"the checkpoint {path} cannot be read ({error.strerror or error}); "
            "name the directory of a run that has made one, or start anew without --resume"
        ) from None
    except (_Corrupt, RecursionError):
        raise ConfigurationError(
            f"the checkpoint {path} is cut off or corrupt; restore it from a copy, or start anew without --resume"
        ) from None


def _read(file: BinaryIO, path: Path) -> Any:
    size = os.fstat(file.fileno()).st_size
    head = file.read(HEAD.size)
    if head[: len(MAGIC)] != MAGIC:
        raise ConfigurationError(f"{path} is not a checkpoint of offbeat; name one that a run has made")
    if len(head) < HEAD.size:
        raise _Corrupt
    _, version, tree_bytes, tensor_bytes = HEAD.unpack(head)
    if version != VERSION:
        raise ConfigurationError(
            f"the checkpoint {path} was written in version {version}, and this version of offbeat reads {VERSION}; "
            "resume with the offbeat that made it, or start anew without --resume"
        )
    digest = hashlib.sha256(head)
    if HEAD.size + tree_bytes + tensor_bytes + digest.digest_size != size:
        raise _Corrupt
    tree = file.read(tree_bytes)
    digest.update(tree)
    try:
        packed = msgspec.msgpack.decode(tree)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise _Corrupt from None
    unpacking = _Unpacking(tensor_bytes)
    state = unpacking.value(packed)
    if unpacking.left:
        raise _Corrupt
    for raw in unpacking.raws:
        for chunk in _chunks(raw.numpy().data):
            if file.readinto(chunk) != len(chunk):  # type: ignore[attr-defined]
                raise _Corrupt
            digest.update(chunk)
    if file.read() != digest.digest():
        raise _Corrupt
    return state


class _Unpacking:
    """From a tree to its value. Tensors get their memory here, once what is left of the file is known to fill it."""

    def __init__(self, tensor_bytes: int) -> None:
        self.left = tensor_bytes
        self.raws: list[Tensor] = []

    def value(self, packed: Any) -> Any:
        match packed:
            case [kind, *items] if kind in (LIST, TUPLE):
                values = [self.value(item) for item in items]
                return values if kind == LIST else tuple(values)
            case [kind, *items] if kind == DICT and len(items) % 2 == 0:
                try:
                    return {self.value(k): self.value(v) for k, v in zip(items[::2], items[1::2], strict=True)}
                except TypeError:  # a key that has no hash
                    raise _Corrupt from None
            case [kind, str() as dtype, [*shape], [*order]] if kind == TENSOR and dtype in DTYPES:
                return self._tensor(DTYPES[dtype], shape, order)
            case [kind, str() as digits] if kind == BIG:
                try:
                    return int(digits, 16)
                except ValueError:
                    raise _Corrupt from None
            case None | bool() | int() | float() | str() | bytes():
                return packed
        raise _Corrupt

    def _tensor(self, dtype: torch.dtype, shape: list[Any], order: list[Any]) -> Tensor:
        dimensions = range(len(shape))
        if any(type(number) is not int or number < 0 for number in (*shape, *order)):
            raise _Corrupt
        nbytes = math.prod(shape) * dtype.itemsize
        countable = math.prod(size or 1 for size in shape) < 1 << 63  # strides are counted even where nothing is
        if sorted(order) != list(dimensions) or nbytes > self.left or not countable:
            raise _Corrupt
        self.left -= nbytes
        raw = torch.empty(nbytes, dtype=torch.uint8)
        self.raws.append(raw)
        return raw.view(dtype).view(shape).permute([order.index(dimension) for dimension in dimensions])
