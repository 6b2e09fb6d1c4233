"""Pickles that hold arrays, lists, dictionaries, numbers and text, read without running anything that they name.

CIFAR-10 and ImageNet32 come as pickles. A pickle can name any function and have it called, so here the few names that
arrays need stand for functions of our own, and every other one is refused. What a pickle is made of is looked at before
it is loaded, since a few bytes of it can also ask for any amount of memory.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError

KINDS = {"u1": np.uint8, "i4": np.int32, "i8": np.int64, "f4": np.float32, "f8": np.float64}
REFUSED = {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER"}
"""Instructions that make objects of other kinds, or that need something from outside the pickle."""


def read_pickle(data: bytes, what: str) -> Any:
    """What a pickle holds. Text of Python 2 comes as bytes."""
    try:
        _check_instructions(data)
        return _plain(_Reader(io.BytesIO(data), encoding="bytes").load())
    except _Refused as refused:
        raise ConfigurationError(f"{what} is a pickle that {refused}; only arrays and plain data are read") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise ConfigurationError(
            f"{what} is a damaged pickle ({type(error).__name__}: {error}); get it again"
        ) from None


class _Refused(Exception):
    """Something that no pickle of arrays needs."""


def _check_instructions(data: bytes) -> None:
    for count, (code, argument, _) in enumerate(pickletools.genops(data), start=1):
        if code.name in REFUSED:
            raise _Refused(f"uses the instruction {code.name}")
        # The table of things to refer back to is as long as the largest number in it.
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
            raise _Refused("numbers what it holds in a way that needs too much memory")


class _Kind:
    """Stands for numpy.dtype."""

    def __init__(self, code: Any, *_: Any) -> None:
        code = code.decode("ascii") if isinstance(code, bytes) else code
        if code not in KINDS:
            raise _Refused(f"holds an array of {code!r}")
        self.kind = np.dtype(KINDS[code])

    def __setstate__(self, state: Any) -> None:
        if state[1] in (">", b">"):
            self.kind = self.kind.newbyteorder(">")


class _Array:
    """Stands for numpy.ndarray."""

    value: NDArray[Any]

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        self.value = _array(content, kind, shape, "F" if fortran else "C")


def _array(content: Any, kind: Any, shape: Any, order: Any) -> NDArray[Any]:
    if not isinstance(kind, _Kind) or not isinstance(content, bytes | bytearray) or order not in ("C", "F"):
        raise _Refused("describes an array in an unknown way")
    return np.frombuffer(content, kind.kind).reshape(shape, order=order)


def _new_array(*_: Any) -> _Array:
    return _Array()


def _array_of_buffer(content: Any, kind: Any, shape: Any, order: Any) -> _Array:
    made = _Array()
    made.value = _array(content, kind, shape, order)
    return made


def _bytes(text: Any, coding: Any) -> bytes:
    if not isinstance(text, str) or coding not in ("latin1", b"latin1"):
        raise _Refused("codes bytes in an unknown way")
    return text.encode("latin1")


def _nothing(*_: Any) -> None:
    raise _Refused("makes an array in an unknown way")


class _Call:
    """A function of ours that a pickle may have called, and nothing else be done to."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise _Refused("changes what it is read with")


ALLOWED = {
    "numpy.ndarray": _Call(_nothing),  # only ever an argument
    "numpy.dtype": _Call(_Kind),
    "numpy.core.multiarray._reconstruct": _Call(_new_array),
    "numpy._core.multiarray._reconstruct": _Call(_new_array),
    "numpy.core.numeric._frombuffer": _Call(_array_of_buffer),
    "numpy._core.numeric._frombuffer": _Call(_array_of_buffer),
    "_codecs.encode": _Call(_bytes),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if f"{module}.{name}" not in ALLOWED:
            raise _Refused(f"names {module}.{name}")
        return ALLOWED[f"{module}.{name}"]


def _plain(value: Any) -> Any:
    """A dictionary with arrays in the place of what stood for them; nothing deeper is needed."""
    if isinstance(value, dict):
        return {key: item.value if isinstance(item, _Array) else item for key, item in value.items()}
    return value.value if isinstance(value, _Array) else value
