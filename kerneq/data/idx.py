"""MNIST's idx files (LeCun et al., 1998), plain or gzipped: a magic number, the sizes, the bytes."""

import dataclasses
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import final

import numpy as np

from .errors import DataError
from .files import File, gunzip, verify
from .layout import AbstractLayout, Arrays, Split, check_labels

_PREFIX = {"train": "train", "test": "t10k"}


@final
@dataclasses.dataclass(frozen=True)
class Idx(AbstractLayout):
    """Four files: pictures and labels of each split, each either NAME or NAME.gz."""

    folders: tuple[str, ...]
    train: int  # pictures
    test: int
    md5: Mapping[str, str]  # by file name; of NAME.gz, or of NAME however it is packed
    side: int = 28
    classes: int = 10

    def check(self, folder: Path, split: Split) -> None:
        for name, shape in self._files(split):
            self._find(folder, name, shape)

    def read(self, folder: Path, split: Split) -> Arrays:
        images, labels = (self._read(folder, name, shape) for name, shape in self._files(split))
        path = folder / self._files(split)[1][0]
        return Arrays(images[:, None], check_labels(path, labels, self.classes))

    def _files(self, split: Split) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
        count, prefix = (self.train if split == "train" else self.test), _PREFIX[split]
        return (
            (f"{prefix}-images-idx3-ubyte", (count, self.side, self.side)),
            (f"{prefix}-labels-idx1-ubyte", (count,)),
        )

    def _find(self, folder: Path, name: str, shape: tuple[int, ...]) -> File:
        if (folder / f"{name}.gz").exists() and not (folder / name).exists():
            file = File(f"{name}.gz", None, self.md5.get(f"{name}.gz"))
        else:
            file = File(name, _size(shape), None)
        file.check(folder)
        return file

    def _read(self, folder: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
        file = self._find(folder, name, shape)
        path, content = folder / file.name, file.read(folder)
        if file.name.endswith(".gz"):
            content = gunzip(path, content, _size(shape))
        verify(path, content, _size(shape), self.md5.get(name))
        header = struct.unpack(f">{1 + len(shape)}I", content[: 4 + 4 * len(shape)])
        if header != (0x0800 + len(shape), *shape):  # 0x08: unsigned bytes
            raise DataError(f"{path} is not the idx file of {' × '.join(map(str, shape))} bytes: download it again.")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def _size(shape: tuple[int, ...]) -> int:
    return 4 + 4 * len(shape) + math.prod(shape)
