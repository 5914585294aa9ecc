"""Published files to arrays: read whole, checked by size and MD5, and then parsed.

A parser takes the files of a split as (path, content), the shape of the images and the name of their labels. It yields
(path to blame, pixels, as many labels) or raises a DataError, whatever the bytes are.
"""

import dataclasses
import gzip
import hashlib
import io
import math
import pickle
import struct
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, final

import numpy as np

from .images import DataError

Split = Literal["train", "test"]
Contents = Iterable[tuple[Path, bytes]]
Shape = tuple[int, int, int]  # channels, height, width
Parts = Iterator[tuple[Path, np.ndarray, np.ndarray]]  # path, pixels, labels


@final
@dataclasses.dataclass(frozen=True)
class File:
    """A published file with its size and MD5s; NAME.gz is read where there is no NAME."""

    name: str
    size: int = dataclasses.field(metadata={"high": 10**12})  # bytes, unpacked
    md5: str | None = None  # of the unpacked content
    gz_md5: str | None = None  # of NAME.gz

    def check(self, folder: Path) -> Path:
        """The path of the file in `folder`, present and of the right size; the content is not opened."""
        path, packed = folder / self.name, folder / f"{self.name}.gz"
        try:
            if packed.exists() and not path.exists():
                path = packed
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
        if (got := len(content)) != self.size:
            raise DataError(f"{path} holds {got} bytes, the published file holds {self.size}: download it again.")
        _check_md5(path, content, self.md5)
        return path, content


def _check_md5(path: Path, content: bytes, md5: str | None) -> None:
    if md5 is not None and (got := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
        raise DataError(f"{path} is not the published file, its MD5 is {got} and not {md5}: download it again.")


def _gunzip(path: Path, content: bytes, limit: int) -> bytes:
    """Unpack gzip content of at most `limit` bytes, so that a small hostile file cannot fill the memory."""
    try:
        plain = gzip.GzipFile(fileobj=io.BytesIO(content)).read(limit + 1)
    except (EOFError, OSError, zlib.error):
        raise DataError(f"{path} is not a whole gzip file: download it again.") from None
    if len(plain) > limit:
        raise DataError(f"{path} unpacks to more than the {limit} bytes it should hold: download it again.")
    return plain


@final
@dataclasses.dataclass(frozen=True)
class Release:
    """One form in which a data set is published: the files of each split, and how to parse them."""

    format: Literal["idx", "cifar-python", "cifar-binary"]
    train: tuple[File, ...]
    test: tuple[File, ...]

    def check(self, folder: Path) -> None:
        """A DataError unless the files of both splits are there with the right sizes; opens none of them."""
        for file in (*self.train, *self.test):
            file.check(folder)

    def read(self, folder: Path, split: Split, shape: Shape, key: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Pixels, uint8 (count, *shape), and labels, int64 (count) within 0 … classes − 1, of the split.

        `key` is the name of the labels, where files hold several. The other split's files are never opened."""
        files = self.train if split == "train" else self.test
        pixels: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        with ThreadPoolExecutor(len(files)) as pool:  # reads and hashes files in parallel
            contents = pool.map(lambda file: file.read(folder), files)
            for path, rows, numbers in _PARSERS[self.format](contents, shape, key):
                values = numbers.astype(np.int64)
                if len(values) and not 0 <= values.min() <= values.max() < classes:
                    found = f"{values.min()} … {values.max()}"
                    raise DataError(f"{path} holds labels {found}, not 0 … {classes - 1}: download it again.")
                pixels.append(rows.reshape(-1, *shape))
                labels.append(values)
        return np.concatenate(pixels), np.concatenate(labels)


def parse_idx(contents: Contents, shape: Shape, key: str) -> Parts:
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


def parse_cifar_binary(contents: Contents, shape: Shape, key: str) -> Parts:
    """CIFAR's binary version: records of one label byte, or in CIFAR-100 a coarse and a fine one, and 3072 pixels."""
    names = ("labels",) if key == "labels" else ("coarse_labels", "fine_labels")
    record = len(names) + math.prod(shape)
    for path, content in contents:
        if len(content) == 0 or len(content) % record:
            raise DataError(f"{path} is not a whole number of records of {record} bytes: download it again.")
        table = np.frombuffer(content, np.uint8).reshape(-1, record)
        yield path, table[:, len(names) :], table[:, names.index(key)]


def parse_cifar_python(contents: Contents, shape: Shape, key: str) -> Parts:
    """CIFAR's python version (Krizhevsky, 2009): pickled dictionaries.

    Pictures are a table of bytes (count, 3072) under `data`, labels a list of whole numbers under their name."""
    for path, content in contents:
        try:
            table = RestrictedUnpickler(io.BytesIO(content), encoding="bytes").load()
            rows = np.frombuffer(table[b"data"].content, np.uint8).reshape(-1, math.prod(shape))
            labels = np.array(table[key.encode()], dtype=np.int64)
        except Exception:  # of every kind, whatever damage makes of the pickle's instructions
            raise DataError(f"{path} is not a CIFAR file in the python version: download it again.") from None
        if labels.shape != (len(rows),):
            raise DataError(f"{path} has no label for each of its {len(rows)} pictures: download it again.")
        yield path, rows, labels


@final
class PickledArray:
    """Stands for the functions and types of NumPy that a CIFAR file names, and keeps the bytes of its array.

    NumPy's own would trust the file: they would allocate an array of whatever size it asks for.
    """

    def __init__(self, *arguments: object):
        self.content: object = None

    def __setstate__(self, state: tuple[object, ...]) -> None:
        self.content = state[-1]  # of an array: version, shape, type, order, bytes


@final
class RestrictedUnpickler(pickle._Unpickler):
    """An unpickler to which no function is known but the three names of NumPy in CIFAR's files.

    It is Python's own rather than C's, whose memo grows to whatever index a damaged file names.
    """

    def find_class(self, module: str, name: str) -> type[PickledArray]:
        if (module, name) in (("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")):
            return PickledArray
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a CIFAR file.")


_PARSERS = {"idx": parse_idx, "cifar-binary": parse_cifar_binary, "cifar-python": parse_cifar_python}
