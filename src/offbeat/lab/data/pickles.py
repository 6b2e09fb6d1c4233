"""A restricted unpickler for arrays, lists, dictionaries, numbers and text; it calls no function named in a pickle.

CIFAR-10 and ImageNet32 are published as pickles. The few names that pickled arrays need are replaced by functions of
this module; every other name is refused. Instructions are checked before loading, since a few bytes of a pickle can
allocate any amount of memory.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError, shortened

DTYPES = {"u1": np.uint8, "i4": np.int32, "i8": np.int64, "f4": np.float32, "f8": np.float64}
REFUSED_OPCODES = {"INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER"}
"""Instructions that build objects of other types, or need data from outside the pickle."""


def read_pickle(data: bytes, what: str) -> Any:
    """The object in a pickle; strings of Python 2 become bytes. `what` names the pickle in errors."""
    try:
        _check_instructions(data)
        return _plain(_Reader(io.BytesIO(data), encoding="bytes").load())
    except _Refused as refused:
        raise ConfigurationError(
            f"{what} is a pickle that {shortened(refused)}; only arrays and plain data are read"
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise ConfigurationError(
            f"{what} is a damaged pickle ({type(error).__name__}: {shortened(error)}); get it again"
        ) from None


class _Refused(Exception):
    """The pickle uses something that pickled arrays do not need."""


def _check_instructions(data: bytes) -> None:
    for count, (code, argument, _) in enumerate(pickletools.genops(data), start=1):
        if code.name in REFUSED_OPCODES:
            raise _Refused(f"uses the instruction {code.name}")
        # The memo table is as long as its largest index.
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
            raise _Refused("numbers what it holds in a way that needs too much memory")


class _Dtype:
    """The replacement of `numpy.dtype`."""

    def __init__(self, code: Any, *_: Any) -> None:
        code = code.decode("ascii") if isinstance(code, bytes) else code
        if code not in DTYPES:
            raise _Refused(f"holds an array of {code!r}")
        self.dtype = np.dtype(DTYPES[code])

    def __setstate__(self, state: Any) -> None:
        if state[1] in (">", b">"):
            self.dtype = self.dtype.newbyteorder(">")


class _Array:
    """The replacement of `numpy.ndarray`."""

    value: NDArray[Any]

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        self.value = _array(content, dtype, shape, "F" if fortran else "C")


def _array(content: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    if not isinstance(dtype, _Dtype) or not isinstance(content, bytes | bytearray) or order not in ("C", "F"):
        raise _Refused("describes an array in an unknown way")
    return np.frombuffer(content, dtype.dtype).reshape(shape, order=order)


def _array_of_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.value = _array(content, dtype, shape, order)
    return array


def _encode(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise _Refused("codes bytes in an unknown way")
    return text.encode("latin1")


def _refuse_call(*_: Any) -> None:
    raise _Refused("makes an array in an unknown way")


class _Call:
    """A function of this module that a pickle may call, and cannot change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise _Refused("changes what it is read with")


ALLOWED = {
    "numpy.ndarray": _Call(_refuse_call),  # only an argument
    "numpy.dtype": _Call(_Dtype),
    "numpy.core.multiarray._reconstruct": _Call(lambda *_: _Array()),
    "numpy._core.multiarray._reconstruct": _Call(lambda *_: _Array()),
    "numpy.core.numeric._frombuffer": _Call(_array_of_buffer),
    "numpy._core.numeric._frombuffer": _Call(_array_of_buffer),
    "_codecs.encode": _Call(_encode),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if f"{module}.{name}" not in ALLOWED:
            raise _Refused(f"names {module}.{name}")
        return ALLOWED[f"{module}.{name}"]


def _plain(value: Any) -> Any:
    """The object with `_Array` replaced by its array, in a dictionary too; deeper nesting is not needed."""
    if isinstance(value, dict):
        return {key: item.value if isinstance(item, _Array) else item for key, item in value.items()}
    return value.value if isinstance(value, _Array) else value
