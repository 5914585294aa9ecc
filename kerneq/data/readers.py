"""Published files to arrays: whole, checked by size and MD5 before anything looks inside, and then parsed.

A parser takes the files of a split, one after another as (path, content), the shape (channels, height, width) of the
images and the name of their labels. It trusts no file: whatever the bytes, it yields parts (path to blame, pixels as
bytes, as many labels), or raises a DataError. CIFAR's pickles it reads without running anything that they ask for.
"""

import dataclasses
import hashlib
import io
import math
import pickle
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from .images import DataError

Split = Literal["train", "test"]
Contents = Iterable[tuple[Path, bytes]]
Shape = tuple[int, int, int]  # channels, height, width
Labels = Sequence[int] | np.ndarray
Parts = Iterator[tuple[Path, np.ndarray, Labels]]


@final
@dataclasses.dataclass(frozen=True)
class File:
    """A published file and what is known of it; where there is no NAME, NAME.gz does as well.

    The size on disk of a packed file says nothing, but no more than `size` bytes of it are ever unpacked."""

    name: str
    size: int  # bytes, unpacked
    md5: str | None = None  # of the unpacked content
    gz_md5: str | None = None  # of NAME.gz

    def check(self, folder: Path) -> Path:
        """The path of the file in `folder`, present and of the right size; the content is not opened."""
        path, packed = folder / self.name, folder / f"{self.name}.gz"
        if packed.exists() and not path.exists():
            path = packed
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise DataError(f"{path} is missing: download it again.") from None
        except OSError as error:
            raise DataError(f"{path} could not be read ({error.strerror}): check its permissions.") from None
        if not path.is_file():
            raise DataError(f"{path} is not a file: remove it and put the published file there.")
        if size != self.size and path != packed:
            raise DataError(f"{path} has {size} bytes, the published file has {self.size}: download it again.")
        return path

    def read(self, folder: Path) -> tuple[Path, bytes]:
        """The path and the whole content, unpacked and checked."""
        path = self.check(folder)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} could not be read ({error.strerror}): check its permissions.") from None
        if path.name != self.name:
            _check_md5(path, content, self.gz_md5)
            content = _gunzip(path, content, self.size)
        if len(content) != self.size:
            found = f"{path} holds {len(content)} bytes, the published file holds {self.size}"
            raise DataError(f"{found}: download it again.")
        _check_md5(path, content, self.md5)
        return path, content


def _check_md5(path: Path, content: bytes, md5: str | None) -> None:
    if md5 is None:
        return
    got = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if got != md5:
        raise DataError(f"{path} is not the published file, its MD5 is {got} and not {md5}: download it again.")


def _gunzip(path: Path, content: bytes, limit: int) -> bytes:
    """Unpack gzip content of at most `limit` bytes, so that a small hostile file cannot fill the memory."""
    machine = zlib.decompressobj(wbits=31)  # 31: gzip header and trailing checksum
    try:
        plain = machine.decompress(content, limit + 1)
    except zlib.error:
        raise DataError(f"{path} is not a sound gzip file: download it again.") from None
    if len(plain) > limit:
        raise DataError(f"{path} unpacks to more than the {limit} bytes it should hold: download it again.")
    if not machine.eof:
        raise DataError(f"{path} is cut short: download it again.")
    return plain


@final
@dataclasses.dataclass(frozen=True)
class Release:
    """One form in which a data set is published: the files of each split, and how to parse them."""

    format: Literal["idx", "cifar-python", "cifar-binary"]
    train: tuple[File, ...]
    test: tuple[File, ...]
    labels: str = "labels"  # which of the labels that the files hold

    def check(self, folder: Path) -> None:
        """A DataError unless the files of both splits are there with the right sizes; opens none of them."""
        for file in (*self.train, *self.test):
            file.check(folder)

    def read(self, folder: Path, split: Split, shape: Shape, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Pixels, uint8 (count, *shape), and labels, int64 (count), of the split; the other split is never opened."""
        files = self.train if split == "train" else self.test
        return self.parse((file.read(folder) for file in files), shape, classes)

    def parse(self, contents: Contents, shape: Shape, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """The arrays in the contents of a split's files; labels lie within 0 … classes − 1."""
        pixels: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        for path, rows, numbers in _PARSERS[self.format](contents, shape, self.labels):
            pixels.append(rows.reshape(-1, *shape))
            labels.append(_check_labels(path, numbers, classes))
        return np.concatenate(pixels), np.concatenate(labels)


def _check_labels(path: Path, labels: Labels, classes: int) -> np.ndarray:
    """The labels as int64, all within 0 … classes − 1."""
    try:
        values = np.asarray(labels, dtype=np.int64)
    except OverflowError:
        raise DataError(f"{path} holds a label far beyond {classes - 1}: download it again.") from None
    if len(values) and not 0 <= values.min() <= values.max() < classes:
        found = f"{values.min()} … {values.max()}"
        raise DataError(f"{path} holds labels {found}, not 0 … {classes - 1}: download it again.")
    return values


def _parse_idx(contents: Contents, shape: Shape, labels: str) -> Parts:
    """MNIST's idx files (LeCun et al., 1998), pictures then labels: a magic number, the sizes, the bytes."""
    (path, pixels), (label_path, numbers) = contents
    count = max(0, len(numbers) - 8)
    yield label_path, _idx_array(path, pixels, (count, *shape[1:])), _idx_array(label_path, numbers, (count,))


def _idx_array(path: Path, content: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """The bytes after a header of big-endian words: 0x08 for unsigned bytes with the number of sizes, the sizes."""
    header = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
    if not content.startswith(header) or len(content) != len(header) + math.prod(shape):
        raise DataError(f"{path} is not the idx file of {' × '.join(map(str, shape))} bytes: download it again.")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)


def _parse_cifar_binary(contents: Contents, shape: Shape, labels: str) -> Parts:
    """CIFAR's binary version: records of one label byte, or in CIFAR-100 a coarse and a fine one, and 3072 pixels."""
    names = ("labels",) if labels == "labels" else ("coarse_labels", "fine_labels")
    record = len(names) + math.prod(shape)
    for path, content in contents:
        if len(content) == 0 or len(content) % record:
            raise DataError(f"{path} is not a whole number of records of {record} bytes: download it again.")
        table = np.frombuffer(content, np.uint8).reshape(-1, record)
        yield path, table[:, len(names) :], table[:, names.index(labels)]


def _parse_cifar_python(contents: Contents, shape: Shape, labels: str) -> Parts:
    """CIFAR's python version (Krizhevsky, 2009): pickled dictionaries.

    Pictures are a table of bytes (count, 3072) under `data`, labels a list of whole numbers under their name."""
    for path, content in contents:
        table = unpickle(path, content)
        pixels, numbers = table.get(b"data"), table.get(labels.encode())
        if not isinstance(pixels, np.ndarray) or pixels.shape[1] != math.prod(shape):
            raise DataError(f"{path} has no table of 32×32 colour pictures: download it again.")
        if type(numbers) is not list or len(numbers) != len(pixels) or any(type(label) is not int for label in numbers):
            raise DataError(f"{path} has no label for each of its {len(pixels)} pictures: download it again.")
        yield path, pixels, numbers


_PARSERS = {"idx": _parse_idx, "cifar-binary": _parse_cifar_binary, "cifar-python": _parse_cifar_python}

# A pickle is a program. Here it runs on Python's own machine cut down twice: only the opcodes found in the published
# files (read with pickletools) exist, and the three names that those files import (NumPy's array constructor) all stand
# for one inert record, so that the worst a hostile file can do is to be refused.
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
