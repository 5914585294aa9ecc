"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) from the published files, python and binary versions."""

import abc
import dataclasses
from pathlib import Path
from typing import Any, final

import numpy as np

from .errors import DataError
from .files import File
from .layout import AbstractLayout, Arrays, Split, check_labels
from .pickled import unpickle

_PIXELS = 3 * 32 * 32


class AbstractForm(abc.ABC):
    """How one file's content splits into a table of pictures (count, 3072) and labels."""

    @abc.abstractmethod
    def split(self, path: Path, content: bytes, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """The pictures and the checked labels; a DataError where the content has another form."""


@final
@dataclasses.dataclass(frozen=True)
class Pickled(AbstractForm):
    """A pickled dictionary with the pictures under `data` and a list of labels under `key`."""

    key: bytes

    def split(self, path: Path, content: bytes, classes: int) -> tuple[np.ndarray, np.ndarray]:
        table = unpickle(path, content)
        pixels, labels = table.get(b"data"), table.get(self.key)
        if not isinstance(pixels, np.ndarray) or pixels.shape[1] != _PIXELS:
            raise DataError(f"{path} has no table of 32×32 colour pictures: download it again.")
        if type(labels) is not list or not _are_whole(labels) or len(labels) != len(pixels):
            raise DataError(f"{path} has no label for each of its {len(pixels)} pictures: download it again.")
        return pixels, check_labels(path, labels, classes)


def _are_whole(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


@final
@dataclasses.dataclass(frozen=True)
class Records(AbstractForm):
    """Records of `marks` label bytes, of which number `mark` counts, and 3072 pixel bytes."""

    marks: int = 1
    mark: int = 0

    def split(self, path: Path, content: bytes, classes: int) -> tuple[np.ndarray, np.ndarray]:
        record = self.marks + _PIXELS
        if len(content) == 0 or len(content) % record:
            raise DataError(f"{path} is not a whole number of records of {record} bytes: download it again.")
        table = np.frombuffer(content, np.uint8).reshape(-1, record)
        return table[:, self.marks :], check_labels(path, table[:, self.mark], classes)


@final
@dataclasses.dataclass(frozen=True)
class Cifar(AbstractLayout):
    """The files of each split, all of one form."""

    folders: tuple[str, ...]
    train: tuple[File, ...]
    test: tuple[File, ...]
    form: AbstractForm
    classes: int

    def check(self, folder: Path, split: Split) -> None:
        for file in self.train if split == "train" else self.test:
            file.check(folder)

    def read(self, folder: Path, split: Split) -> Arrays:
        parts = [
            self.form.split(folder / file.name, file.read(folder), self.classes)
            for file in (self.train if split == "train" else self.test)
        ]
        pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Arrays(pixels.reshape(-1, 3, 32, 32), labels)
