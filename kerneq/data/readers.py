"""Published files to arrays: whole, checked by size and MD5 before anything looks inside, and then parsed.

A parser takes the files of a split, one after another as (path, content), the shape (channels, height, width) of the
images and the number of classes. It trusts no file: whatever the bytes, it returns pixels, uint8 (count, *shape), and
labels, int64 (count) within 0 … classes − 1, or raises a DataError.
"""

import dataclasses
import hashlib
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, final

import numpy as np

from .images import DataError
from .unpickle import unpickle

Split = Literal["train", "test"]
Contents = Iterable[tuple[Path, bytes]]
Shape = tuple[int, int, int]  # channels, height, width
Arrays = tuple[np.ndarray, np.ndarray]  # pixels, labels


@final
@dataclasses.dataclass(frozen=True)
class File:
    """A published file and what is known of it.

    Where the size is known, NAME.gz does as well if there is no NAME. The size on disk of a packed file says nothing,
    but no more than `size` bytes of it are ever unpacked."""

    name: str
    size: int | None = None  # bytes, unpacked
    md5: str | None = None  # of the unpacked content
    gz_md5: str | None = None  # of NAME.gz

    def check(self, folder: Path) -> Path:
        """The path of the file in `folder`, present and of the right size; the content is not opened."""
        path, packed = folder / self.name, folder / f"{self.name}.gz"
        if self.size is not None and packed.exists() and not path.exists():
            path = packed
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise DataError(f"{path} is missing: download it again.") from None
        except OSError as error:
            raise DataError(f"{path} could not be read ({error.strerror}): check its permissions.") from None
        if not path.is_file():
            raise DataError(f"{path} is not a file: remove it and put the published file there.")
        if self.size not in (None, size) and path != packed:
            raise DataError(f"{path} has {size} bytes, the published file has {self.size}: download it again.")
        return path

    def read(self, folder: Path) -> tuple[Path, bytes]:
        """The path and the whole content, unpacked and checked."""
        path = self.check(folder)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} could not be read ({error.strerror}): check its permissions.") from None
        if self.size is not None and path.name != self.name:
            _check_md5(path, content, self.gz_md5)
            content = _gunzip(path, content, self.size)
        if self.size not in (None, len(content)):
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
    """One form in which a data set is published: the files of each split, and their parser."""

    train: tuple[File, ...]
    test: tuple[File, ...]
    parse: Callable[[Contents, Shape, int], Arrays]

    def check(self, folder: Path) -> None:
        """A DataError unless the files of both splits are there with the right sizes; opens none of them."""
        for file in (*self.train, *self.test):
            file.check(folder)

    def read(self, folder: Path, split: Split, shape: Shape, classes: int) -> Arrays:
        """The checked content of the split; the other split's files are never opened."""
        files = self.train if split == "train" else self.test
        return self.parse((file.read(folder) for file in files), shape, classes)


def parse_idx(contents: Contents, shape: Shape, classes: int) -> Arrays:
    """MNIST's idx files (LeCun et al., 1998), pictures then labels: a magic number, the sizes, the bytes."""
    (path, pixels), (label_path, labels) = contents
    count = max(0, len(labels) - 8)
    table = _idx_array(path, pixels, (count, *shape[1:]))
    return table[:, None], check_labels(label_path, _idx_array(label_path, labels, (count,)), classes)


def _idx_array(path: Path, content: bytes, shape: tuple[int, ...]) -> np.ndarray:
    """The bytes after a header of big-endian words: 0x08 for unsigned bytes with the number of sizes, the sizes."""
    header = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
    if not content.startswith(header) or len(content) != len(header) + math.prod(shape):
        raise DataError(f"{path} is not the idx file of {' × '.join(map(str, shape))} bytes: download it again.")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)


def parse_cifar_python(contents: Contents, shape: Shape, classes: int, key: bytes) -> Arrays:
    """CIFAR's python version (Krizhevsky, 2009): pickled dictionaries, unpickled by a machine that runs nothing.

    Pictures are a table of bytes (count, 3072) under `data`, labels a list of whole numbers under `key`."""
    parts: list[Arrays] = []
    for path, content in contents:
        table = unpickle(path, content)
        pixels, labels = table.get(b"data"), table.get(key)
        if not isinstance(pixels, np.ndarray) or pixels.shape[1] != math.prod(shape):
            raise DataError(f"{path} has no table of 32×32 colour pictures: download it again.")
        if type(labels) is not list or len(labels) != len(pixels) or any(type(label) is not int for label in labels):
            raise DataError(f"{path} has no label for each of its {len(pixels)} pictures: download it again.")
        parts.append((pixels, check_labels(path, labels, classes)))
    return _join(parts, shape)


def parse_cifar_binary(
    contents: Contents, shape: Shape, classes: int, label_bytes: int = 1, label_byte: int = 0
) -> Arrays:
    """CIFAR's binary version: records of a few label bytes and 3072 pixels.

    CIFAR-10 has one label byte, CIFAR-100 two: the coarse label (`label_byte` 0) and the fine one (1)."""
    record = label_bytes + math.prod(shape)
    parts: list[Arrays] = []
    for path, content in contents:
        if len(content) == 0 or len(content) % record:
            raise DataError(f"{path} is not a whole number of records of {record} bytes: download it again.")
        table = np.frombuffer(content, np.uint8).reshape(-1, record)
        parts.append((table[:, label_bytes:], check_labels(path, table[:, label_byte], classes)))
    return _join(parts, shape)


def _join(parts: list[Arrays], shape: Shape) -> Arrays:
    """The rows of pixels and the labels of several files as one."""
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return pixels.reshape(-1, *shape), labels


def check_labels(path: Path, labels: Sequence[int] | np.ndarray, classes: int) -> np.ndarray:
    """The labels as int64, all within 0 … classes − 1."""
    try:
        values = np.asarray(labels, dtype=np.int64)
    except OverflowError:
        raise DataError(f"{path} holds a label far beyond {classes - 1}: download it again.") from None
    if len(values) and not 0 <= values.min() <= values.max() < classes:
        found = f"{values.min()} … {values.max()}"
        raise DataError(f"{path} holds labels {found}, not 0 … {classes - 1}: download it again.")
    return values
