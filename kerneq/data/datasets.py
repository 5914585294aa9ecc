"""What a data set is: where its files lie, whether they are all there, and how they become images.

There are three kinds: published sets packed into a few files, scikit-learn's digits, and folders of pictures.
"""

import abc
import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import final

import numpy as np
import torch

from .images import DataError, ImageFiles, Images
from .readers import Release, Split

_SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"))
_CLASS_LIST = "classes.txt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractDataSet(abc.ABC):
    """A data set that may lie under the data root, and what is known of its images without reading them.

    `mean` and `std` per channel are those of the training images scaled to [0, 1], so that testing need not read them;
    unless others are given they are ImageNet's, as is usual for photographs."""

    size: int  # side of its images; pictures in folders can be resized to another
    get: str  # how to get it
    licence: str  # and whom to cite
    class_names: tuple[str, ...] | None = None  # in the order of the labels; None: its files say
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    @abc.abstractmethod
    def candidates(self) -> tuple[str, ...]:
        """The folders under the data root that may hold it, the preferred one first; none if it needs no files."""

    @abc.abstractmethod
    def check(self, name: str, root: Path) -> None:
        """A DataError unless the files of both splits are there with the right sizes; opens none of them."""

    @abc.abstractmethod
    def load(self, name: str, split: Split, root: Path, size: int | None) -> Images:
        """One split, resized to `size` where that is possible; the other split's files are never opened."""

    def locate(self, name: str, root: Path) -> str:
        """Which of the candidates is there; a DataError where none is."""
        for folder in self.candidates():
            if (root / folder).is_dir():
                return folder
        where = f"The data set {name} is not in {root}, which has no folder {' or '.join(self.candidates())}"
        raise DataError(f"{where}: {self.get}; or set KERNEQ_DATA to the folder that holds it.")


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedDataSet(AbstractDataSet):
    """A published data set of small images, packed into a few files and read into memory whole.

    It may have been published in several releases, each of which unpacks to a folder of its own."""

    releases: Mapping[str, Release]  # by folder
    class_names: tuple[str, ...]

    def candidates(self) -> tuple[str, ...]:
        return tuple(self.releases)

    def check(self, name: str, root: Path) -> None:
        folder = self.locate(name, root)
        self.releases[folder].check(root / folder)

    def load(self, name: str, split: Split, root: Path, size: int | None) -> Images:
        folder = self.locate(name, root)
        _refuse_resizing(name, self.size, size)
        shape = len(self.mean), self.size, self.size
        pixels, labels = self.releases[folder].read(root / folder, split, shape, len(self.class_names))
        tensors = torch.from_numpy(pixels.copy()), torch.from_numpy(labels)
        return Images(*tensors, self.class_names, self.mean, self.std)


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitsDataSet(AbstractDataSet):
    """scikit-learn's 1797 handwritten digits, 8×8: the set that is always there.

    It comes inside scikit-learn, so there is no folder; every fifth image of each class is for testing."""

    class_names: tuple[str, ...]

    def candidates(self) -> tuple[str, ...]:
        return ()

    def check(self, name: str, root: Path) -> None:
        """Nothing to check: the images are part of an installed package."""

    def load(self, name: str, split: Split, root: Path, size: int | None) -> Images:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]

        _refuse_resizing(name, self.size, size)
        content = load_digits()
        pixels = torch.from_numpy(np.rint(content.images * (255 / 16)).astype(np.uint8))
        labels = torch.from_numpy(content.target.astype(np.int64))
        test = torch.zeros(len(labels), dtype=torch.bool)
        for label in range(len(self.class_names)):
            test[torch.nonzero(labels == label)[4::5]] = True
        images = Images(pixels[:, None], labels, self.class_names, self.mean, self.std)
        return images.select(torch.nonzero(test if split == "test" else ~test).flatten())


def _refuse_resizing(name: str, side: int, size: int | None) -> None:
    """Small images come in the size in which they were published."""
    if size not in (None, side):
        raise DataError(f"The pictures of {name} are {side}×{side}, not {size}×{size}: leave `size` out.")


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderDataSet(AbstractDataSet):
    """A data set of picture files: train/CLASS/FILE for training, test/CLASS/FILE or else val/CLASS/FILE for testing.

    Where there is no train/, the folder itself holds the classes, and a fifth of each class's pictures, chosen by the
    hash of their names, is for testing. The classes are those of `class_folders`, or of a file classes.txt (a folder
    name on each line, then optionally the name to show), or else the folders found in train/, sorted."""

    folders: tuple[str, ...]  # that may hold it
    class_folders: tuple[str, ...] | None = None  # one for each of `class_names`
    class_count: int | None = None  # where a class list must be given
    class_lists: tuple[str, ...] = ()  # further places of the class list, under the data root

    def candidates(self) -> tuple[str, ...]:
        return self.folders

    def check(self, name: str, root: Path) -> None:
        folder = root / self.locate(name, root)
        classes = self._classes(folder, root)
        self._split_folder(folder, "train", classes)
        self._split_folder(folder, "test", classes)

    def load(self, name: str, split: Split, root: Path, size: int | None) -> Images:
        folder = root / self.locate(name, root)
        classes = self._classes(folder, root)
        place = self._split_folder(folder, split, classes)
        paths: list[Path] = []
        labels: list[int] = []
        for label, entry in enumerate(classes):
            found = [path for path in _entries(place / entry) if path.suffix.lower() in _SUFFIXES]
            if place == folder:
                found = _split_by_hash(found, split)
            if not found and split == "train":
                raise DataError(f"{place / entry} holds no pictures: put some there or remove the class.")
            paths += found
            labels += [label] * len(found)
        if not paths:
            raise DataError(f"{place} holds no pictures: put some into its folders of classes.")
        files = ImageFiles(tuple(paths), self.size if size is None else size)
        return Images(files, torch.tensor(labels), tuple(classes.values()), self.mean, self.std)

    def _classes(self, folder: Path, root: Path) -> dict[str, str]:
        """The folder of each class and the name to show, in the order of the labels."""
        if self.class_folders is not None and self.class_names is not None:
            return dict(zip(self.class_folders, self.class_names, strict=True))
        lists = (folder / _CLASS_LIST, *(root / path for path in self.class_lists))
        for path in lists:
            if path.exists():
                return _read_class_list(path, self.class_count)
        if self.class_count is not None:
            wanted = " or ".join(map(str, lists))
            raise DataError(f"There is no list of the {self.class_count} classes of {folder}: write {wanted}.")
        place = _find_split(folder, "train")
        found = [path.name for path in _entries(place) if path.is_dir()]
        if len(found) < 2:
            raise DataError(f"{place} holds {len(found)} folders of classes: put one there for each class.")
        return {entry: entry for entry in found}

    def _split_folder(self, folder: Path, split: Split, classes: Mapping[str, str]) -> Path:
        """The folder that holds the split's classes, all of them."""
        place = _find_split(folder, split)
        there = {path.name for path in _entries(place) if path.is_dir()}
        absent = sorted(classes.keys() - there)
        if absent:
            raise DataError(f"{place} has no folder {absent[0]} for that class: add it, or correct the classes.")
        strange = sorted(there - classes.keys())
        listed = self.class_folders is not None or self.class_count is not None or (folder / _CLASS_LIST).exists()
        if strange and not listed:
            raise DataError(f"{place} has a folder {strange[0]} that train/ has not: remove it, or add the class.")
        return place


def _find_split(folder: Path, split: Split) -> Path:
    """train/, or test/ or else val/, of the folder; the folder itself if it has none of them."""
    places = {name: folder / name for name in ("train", "test", "val") if (folder / name).is_dir()}
    if not places:
        return folder
    for name in ("train",) if split == "train" else ("test", "val"):
        if name in places:
            return places[name]
    wanted = "train/" if split == "train" else "test/ nor val/"
    raise DataError(f"{folder} has no {wanted} beside {'/, '.join(places)}/: put that split's pictures there.")


def _split_by_hash(files: list[Path], split: Split) -> list[Path]:
    """Four fifths of a class's pictures or the other fifth, by the hash of their names, in order of name."""
    if len(files) < 2:
        found = f"Each class needs two pictures to split, got {len(files)}"
        raise DataError(f"{found}: add some, or make train/ and test/.")
    ranked = sorted(files, key=lambda path: hashlib.sha256(path.name.encode(errors="surrogateescape")).digest())
    held = max(1, len(files) // 5)
    return sorted(ranked[:held] if split == "test" else ranked[held:])


def _read_class_list(path: Path, count: int | None) -> dict[str, str]:
    """The folder and the name to show on each line of a class list; `#` begins a comment line."""
    try:
        lines = [line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        raise DataError(f"{path} is not a readable text file: write one folder name on each line.") from None
    rows = [row for row in lines if row and not row[0].startswith("#")]
    classes = {row[0]: row[-1].strip() for row in rows}
    if any("/" in entry or "\\" in entry or entry == ".." for entry in classes):
        raise DataError(f"{path} names folders elsewhere: write plain folder names, one on each line.")
    if len(classes) != len(rows):
        raise DataError(f"{path} names a class twice: write each folder name once.")
    if len(classes) < 2 or (count is not None and len(classes) != count):
        wanted = "at least two" if count is None else str(count)
        raise DataError(f"{path} names {len(classes)} classes, not {wanted}: write one folder name on each line.")
    return classes


def _entries(folder: Path) -> list[Path]:
    """What a folder holds, sorted by name, hidden entries left out."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} could not be listed ({error.strerror}): check it and its permissions.") from None
