"""A data set of picture files, one folder for each class."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import final

import torch

from .dataset import AbstractDataSet, missing
from .errors import DataError
from .folder import Folder
from .layout import Split

_ENDINGS = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"))
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LIST = "classes.txt"


@final
@dataclasses.dataclass(frozen=True)
class Pictures(AbstractDataSet):
    """train/CLASS/FILE for training, test/CLASS/FILE or else val/CLASS/FILE for testing.

    Where there is no train/, the folder itself holds the classes, and a fifth of each class's pictures,
    chosen by the hash of their names, is for testing. The classes are those of `classes`, or of a file
    classes.txt (a folder name on each line, then optionally the name to show), or else the folders found
    in train/, sorted. Normalisation is ImageNet's, as is usual for photographs."""

    folders: tuple[str, ...]
    classes: Mapping[str, str] | None  # folder → name to show
    count: int | None  # of classes, where a class list must be given
    lists: tuple[str, ...]  # further places of the class list, under the data root
    size: int
    get: str
    licence: str

    def locate(self, name: str, root: Path) -> Path:
        for folder in self.folders:
            if (root / folder).is_dir():
                return root / folder
        raise missing(name, root, " or ".join(self.folders), self.get)

    def check(self, name: str, root: Path) -> None:
        folder = self.locate(name, root)
        classes = self._classes(folder, root)
        for split in ("train", "test"):
            self._place(folder, split, classes)

    def load(self, name: str, split: Split, root: Path, size: int | None) -> Folder:
        folder = self.locate(name, root)
        classes = self._classes(folder, root)
        place = self._place(folder, split, classes)
        paths: list[Path] = []
        labels: list[int] = []
        for label, entry in enumerate(classes):
            files = [path for path in listing(place / entry) if path.suffix.lower() in _ENDINGS]
            if place == folder:
                files = _part(files, split)
            if not files and split == "train":
                raise DataError(f"{place / entry} holds no pictures: put some there or remove the class.")
            paths += files
            labels += [label] * len(files)
        if not paths:
            raise DataError(f"{place} holds no pictures: put some into its folders of classes.")
        shown = tuple(classes.values())
        side = self.size if size is None else size
        return Folder(tuple(paths), torch.tensor(labels), shown, side, IMAGENET_MEAN, IMAGENET_STD)

    def _place(self, folder: Path, split: str, classes: Mapping[str, str]) -> Path:
        """The folder that holds the split's classes, all of them."""
        place = _split_folder(folder, split)
        there = {path.name for path in listing(place) if path.is_dir()}
        absent = sorted(classes.keys() - there)
        if absent:
            raise DataError(f"{place} has no folder {absent[0]} for that class: add it, or correct the classes.")
        strange = sorted(there - classes.keys())
        if strange and self.classes is None and not (folder / LIST).exists() and self.count is None:
            raise DataError(f"{place} has a folder {strange[0]} that train/ has not: remove it, or add the class.")
        return place

    def _classes(self, folder: Path, root: Path) -> Mapping[str, str]:
        if self.classes is not None:
            return self.classes
        for path in (folder / LIST, *(root / place for place in self.lists)):
            if path.exists():
                return _class_list(path, self.count)
        if self.count is not None:
            wanted = " or ".join(str(path) for path in (folder / LIST, *(root / p for p in self.lists)))
            raise DataError(f"There is no list of the {self.count} classes of {folder}: write {wanted}.")
        place = _split_folder(folder, "train")
        found = [path.name for path in listing(place) if path.is_dir()]
        if len(found) < 2:
            raise DataError(f"{place} holds {len(found)} folders of classes: put one there for each class.")
        return {entry: entry for entry in found}


def _split_folder(folder: Path, split: str) -> Path:
    places = {name: folder / name for name in ("train", "test", "val") if (folder / name).is_dir()}
    if not places:
        return folder
    for name in ("train",) if split == "train" else ("test", "val"):
        if name in places:
            return places[name]
    wanted = "train/" if split == "train" else "test/ nor val/"
    raise DataError(f"{folder} has no {wanted} beside {'/, '.join(places)}/: put that split's pictures there.")


def _part(files: list[Path], split: Split) -> list[Path]:
    """Four fifths of a class's pictures or the other fifth, by the hash of their names, in order of name."""
    if len(files) < 2:
        raise DataError(
            f"Each class needs two pictures to split, got {len(files)}: add some, or make train/ and test/."
        )
    ranked = sorted(files, key=lambda path: hashlib.sha256(path.name.encode(errors="surrogateescape")).digest())
    held = max(1, len(files) // 5)
    return sorted(ranked[:held] if split == "test" else ranked[held:])


def _class_list(path: Path, count: int | None) -> dict[str, str]:
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


def listing(folder: Path) -> list[Path]:
    """What a folder holds, sorted by name, hidden entries left out."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} could not be listed ({error.strerror}): check it and its permissions.") from None
