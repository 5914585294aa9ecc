"""Reading CIFAR's pickles without running anything that they ask for.

A pickle is a program. Here it runs on Python's own machine cut down twice: only the opcodes that the published files
use exist, and the three names that those files import (NumPy's array constructor) all stand for one inert record, so
that the worst a hostile file can do is to be refused.
"""

import io
import pickle
from pathlib import Path
from typing import Any, final

import numpy as np

from .images import DataError

# The opcodes found in the published files (read with pickletools), and no other.
_OPCODES = (
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.BINSTRING, pickle.SHORT_BINSTRING),
    *(pickle.EMPTY_DICT, pickle.SETITEMS, pickle.EMPTY_LIST, pickle.APPENDS),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.GLOBAL, pickle.REDUCE, pickle.BUILD),
)
_NAMES = (("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"))


@final
class _Inert:
    """Stands for an array or a dtype being rebuilt: keeps what NumPy would have been given, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


@final
class _Machine(pickle._Unpickler):  # the Python one: its memo is a dictionary, so a wild index costs nothing
    dispatch = {opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _OPCODES}

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a CIFAR file.")
        return _Inert


def unpickle(path: Path, content: bytes) -> dict[bytes, Any]:
    """The dictionary in the content of a CIFAR file; arrays become NumPy arrays of unsigned bytes, (rows, columns)."""
    try:
        value = _Machine(io.BytesIO(content), encoding="bytes").load()
    except Exception:  # bytes of any kind reach this machine, and they can break it in any way
        raise DataError(f"{path} is not a CIFAR file in the python version: download it again.") from None
    if type(value) is not dict or not all(type(key) is bytes for key in value):
        raise DataError(f"{path} does not hold the dictionary of a CIFAR file: download it again.")
    return {key: _array(path, item) if type(item) is _Inert else item for key, item in value.items()}


def _array(path: Path, item: _Inert) -> np.ndarray:
    """The array of unsigned bytes whose state NumPy would have been given: (version, shape, dtype, order, bytes)."""
    match item.state:
        case (int(), (int() as rows, int() as columns), _Inert(arguments=(b"u1", *_)), False, bytes() as content):
            if rows >= 0 and columns >= 0 and rows * columns == len(content):
                return np.frombuffer(content, np.uint8).reshape(rows, columns)
    raise DataError(f"{path} does not hold a table of bytes where its pictures should be: download it again.")
