"""Data sets by name: published sets packed into a few files, scikit-learn's digits, and folders of pictures.

The known ones are the tables of catalogue.toml. A file format that is new also needs a parser in `readers`.
"""

import abc
import dataclasses
import hashlib
import importlib.util
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import final

import numpy as np
import torch

from ...loading import read_small
from ...settings import build, suggestion
from .images import DataError, ImageFiles, Images
from .readers import Release, Split

SUFFIXES = frozenset((".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"))
_CLASS_LIST = "classes.txt"
OWN = "folder:"  # before the path of a folder of one's own pictures
_SPLITS = {"train": ("train", "training"), "test": ("test", "testing", "val", "validation")}  # the preferred name first


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractDataSet(abc.ABC):
    """A data set that may lie under the data root, and what is known of its images without reading them.

    `mean` and `std` per channel are those of the training images scaled to [0, 1], by default ImageNet's."""

    name: str
    size: int  # side of its images; pictures in folders can be resized to another
    get: str  # how to get it
    licence: str  # and whom to cite
    folders: tuple[str, ...] = ()  # under the data root, that may hold it, the preferred one first; (): it needs none
    class_names: tuple[str, ...] | None = None  # in the order of the labels; None: its files say
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    @abc.abstractmethod
    def check(self, root: Path) -> None:
        """A DataError unless the files of both splits are there with the right sizes; opens none of them."""

    @abc.abstractmethod
    def load(self, split: Split, root: Path, size: int) -> Images:
        """One split in pictures of side `size`; the other split's files are never opened."""

    def locate(self, root: Path) -> str:
        """The first of `folders` that exists; a DataError where none does."""
        for folder in self.folders:
            if (root / folder).is_dir():
                return folder
        where = f"The data set {self.name} is not in {root}, which has no folder {' or '.join(self.folders)}"
        raise DataError(f"{where}: {self.get}; or set KERNEQ_DATA to the folder that holds it.")


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedDataSet(AbstractDataSet):
    """A published data set of small images, packed into a few files, in one or several releases."""

    releases: tuple[Release, ...]  # one for each of `folders`
    labels: str = "labels"  # which of the labels that its files hold
    class_names: tuple[str, ...]

    def check(self, root: Path) -> None:
        folder = self.locate(root)
        self.releases[self.folders.index(folder)].check(root / folder)

    def load(self, split: Split, root: Path, size: int) -> Images:
        folder = self.locate(root)
        release, shape = self.releases[self.folders.index(folder)], (len(self.mean), size, size)
        pixels, labels = release.read(root / folder, split, shape, self.labels, len(self.class_names))
        return Images(torch.from_numpy(pixels), torch.from_numpy(labels), self.class_names, self.mean, self.std)


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitsDataSet(AbstractDataSet):
    """scikit-learn's 1797 handwritten digits, 8×8, always there; every fifth image of each class is for testing."""

    class_names: tuple[str, ...]

    def check(self, root: Path) -> None:
        """Nothing to check: the images are part of an installed package."""

    def load(self, split: Split, root: Path, size: int) -> Images:
        # The file itself, since importing scikit-learn takes seconds.
        package = importlib.util.find_spec("sklearn")
        assert package is not None and package.origin is not None
        file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        table = np.loadtxt(file, delimiter=",")  # 64 pixels from 0 to 16, and the label
        pixels = torch.from_numpy(np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8))
        labels = torch.from_numpy(table[:, -1].astype(np.int64))
        test = torch.zeros(len(labels), dtype=torch.bool)
        for label in range(len(self.class_names)):
            test[torch.nonzero(labels == label)[4::5]] = True
        images = Images(pixels[:, None], labels, self.class_names, self.mean, self.std)
        return images.select(torch.nonzero(test if split == "test" else ~test).flatten())


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderDataSet(AbstractDataSet):
    """A data set of picture files: train/CLASS/FILE for training, test/CLASS/FILE or else val/CLASS/FILE for testing.

    Training/, Testing/ and Validation/ do as well. Pictures may lie in folders inside that of their class, too. Where
    there is no train/, the folder itself holds the classes, and a fifth of each class's pictures, chosen by the hash of
    their names, is for testing. The classes are those of `class_folders`, or of a file classes.txt (a folder name on
    each line, then optionally the name to show), or else the folders found in train/, sorted."""

    class_folders: tuple[str, ...] | None = None  # one for each of `class_names`
    class_list: str | None = None  # another place for classes.txt, under the data root; there must be one then …
    class_count: int | None = None  # … of so many classes

    def check(self, root: Path) -> None:
        self._split(root, "train")
        self._split(root, "test")

    def load(self, split: Split, root: Path, size: int) -> Images:
        place, classes = self._split(root, split)
        cut = self.is_cut(root)
        files: list[tuple[Path, int]] = []  # with their labels
        for label, entry in enumerate(classes):
            found = pictures_in(place / entry)
            if cut:
                found = _split_by_hash(place / entry, found, split)
            if not found and split == "train":
                raise DataError(f"{place / entry} holds no pictures: put some there or remove the class.")
            files += [(path, label) for path in found]
        if not files:
            raise DataError(f"{place} holds no pictures: put some into its folders of classes.")
        paths, labels = zip(*files, strict=True)
        return Images(ImageFiles(paths, size), torch.tensor(labels), tuple(classes.values()), self.mean, self.std)

    def is_cut(self, root: Path) -> bool:
        """Whether there is no train/, so that the splits are cut from one set of files."""
        folder = root / self.locate(root)
        return _find_split(folder, "train") == folder

    def _split(self, root: Path, split: Split) -> tuple[Path, dict[str, str]]:
        """The folder that holds the split's classes, all of them, and the classes as `_classes` gives them."""
        folder = root / self.locate(root)
        classes = self._classes(folder, root)
        place = _find_split(folder, split)
        there = {path.name for path in _list_entries(place) if path.is_dir()}
        if absent := sorted(classes.keys() - there):
            raise DataError(f"{place} has no folder {absent[0]} for that class: add it, or correct the classes.")
        listed = self.class_folders is not None or self.class_list is not None or (folder / _CLASS_LIST).exists()
        if not listed and (strange := sorted(there - classes.keys())):
            raise DataError(f"{place} has a folder {strange[0]} that train/ has not: remove it, or add the class.")
        return place, classes

    def _classes(self, folder: Path, root: Path) -> dict[str, str]:
        """The folder of each class and the name to show, in the order of the labels."""
        if self.class_folders is not None and self.class_names is not None:
            return dict(zip(self.class_folders, self.class_names, strict=True))
        lists = [folder / _CLASS_LIST] + ([root / self.class_list] if self.class_list is not None else [])
        for path in lists:
            if path.exists():
                return _read_class_list(path, self.class_count)
        if self.class_list is not None:
            wanted = " or ".join(map(str, lists))
            raise DataError(f"There is no list of the {self.class_count} classes of {folder}: write {wanted}.")
        place = _find_split(folder, "train")
        found = [path.name for path in _list_entries(place) if path.is_dir()]
        if len(found) < 2:
            raise DataError(f"{place} holds {len(found)} folders of classes: put one there for each class.")
        return {entry: entry for entry in found}


def _find_split(folder: Path, split: Split) -> Path:
    """train/, or test/ or else val/, of the folder, in upper or lower case; the folder itself if it has neither."""
    there = {path.name.lower(): path for path in _list_entries(folder) if path.is_dir()}
    places = {split: [there[name] for name in names if name in there] for split, names in _SPLITS.items()}
    if places[split]:
        return places[split][0]
    others = [path.name for paths in places.values() for path in paths]
    if not others:
        return folder
    wanted = "train/" if split == "train" else "test/ nor val/"
    raise DataError(f"{folder} has no {wanted} beside {'/, '.join(others)}/: put that split's pictures there.")


def _split_by_hash(folder: Path, files: list[Path], split: Split) -> list[Path]:
    """Four fifths of a class's pictures or the other fifth, by the hash of their names, in order of name."""
    if len(files) < 2:
        found = f"{folder} holds {len(files)} pictures, and a class needs two to split"
        raise DataError(f"{found}: add some, remove the class, or make train/ and test/.")
    ranked = sorted(files, key=lambda path: hashlib.sha256(path.name.encode(errors="surrogateescape")).digest())
    held = max(1, len(files) // 5)
    return sorted(ranked[:held] if split == "test" else ranked[held:])


def _read_class_list(path: Path, count: int | None) -> dict[str, str]:
    """The folder and the name to show on each line of a class list; `#` begins a comment line."""
    try:
        lines = [line.split(maxsplit=1) for line in read_small(path).decode("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError):
        raise DataError(f"{path} is not a readable text file: write one folder name on each line.") from None
    rows = [row for row in lines if row and not row[0].startswith("#")]
    classes = {row[0]: row[-1].strip() for row in rows}
    problem = None
    if any(set(entry) & {"/", "\\"} or entry == ".." for entry in classes):
        problem = "names folders elsewhere"
    elif len(classes) != len(rows):
        problem = "names a class twice"
    elif len(classes) < 2 or count not in (None, len(classes)):
        problem = f"names {len(classes)} classes, not {count or 'at least two'}"
    if problem:
        raise DataError(f"{path} {problem}: write one plain folder name on each line.")
    return classes


def pictures_in(folder: Path, unlisted: bool = False) -> list[Path]:
    """The picture files of a folder and of the folders in it, sorted, without hidden ones.

    A folder in it that cannot be listed is a `DataError`, or with `unlisted` one of the paths returned."""
    found: list[Path] = []
    for path in _list_entries(folder):
        if path.is_dir():  # whatever its name
            try:
                found += [] if path.is_symlink() else pictures_in(path, unlisted)  # a link may lead back here
            except DataError:
                if not unlisted:
                    raise
                found.append(path)
        elif path.suffix.lower() in SUFFIXES and (path.is_file() or not path.exists()):
            found.append(path)  # also a broken link: reading it raises an error that names it
    return found


def _list_entries(folder: Path) -> list[Path]:
    """What a folder holds, sorted by name, hidden entries left out."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} could not be listed ({error.strerror}): check it and its permissions.") from None


_KINDS: dict[str, type[AbstractDataSet]] = {"packed": PackedDataSet, "digits": DigitsDataSet, "folder": FolderDataSet}


def _read_catalogue() -> Mapping[str, AbstractDataSet]:
    """The data sets of catalogue.toml by their names."""
    tables = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
    releases = {name: build(Release, table) for name, table in tables.pop("release").items()}
    found: dict[str, AbstractDataSet] = {}
    for name, table in tables.items():
        kind = _KINDS[table.pop("kind")]
        if kind is PackedDataSet:
            table["releases"] = [releases[release] for release in table["releases"]]
        found[name] = build(kind, {"name": name, **table})
    return MappingProxyType(found)


DATA_SETS = _read_catalogue()


def data_root(root: str | Path | None = None) -> Path:
    """Where data sets lie: `root`, else $KERNEQ_DATA, else ~/.cache/kerneq."""
    # Path.expanduser would raise for the ~NAME of a user who does not exist.
    return Path(os.path.expanduser(root or os.environ.get("KERNEQ_DATA") or "~/.cache/kerneq"))


def find(name: str) -> AbstractDataSet:
    """The data set of that name, a key of DATA_SETS or "folder:PATH"; looks at no file."""
    if name.startswith(OWN):
        path = str(Path(os.path.expanduser(name.removeprefix(OWN))).absolute())
        get = f"put pictures into {path}/train/CLASS and {path}/test/CLASS"
        return FolderDataSet(name=name, folders=(path,), size=224, get=get, licence="your own")
    if name in DATA_SETS:
        return DATA_SETS[name]
    hint = f" Did you mean `{OWN}{name}`?" if Path(name).is_dir() else suggestion(name, DATA_SETS)
    raise DataError(f"There is no data set {name!r}.{hint} There are: {', '.join(DATA_SETS)}, {OWN}PATH.")


def is_cut(name: str) -> bool:
    """Whether its splits are cut from one set of files, so that a file more or less moves others between them."""
    data_set = find(name)
    return isinstance(data_set, FolderDataSet) and data_set.is_cut(data_root())


def fingerprint(name: str) -> str | None:
    """A hash of a folder's training pictures: their labels and paths inside the split's folder; None of other sets."""
    data_set, root = find(name), data_root()
    if not isinstance(data_set, FolderDataSet):
        return None
    images = data_set.load("train", root, data_set.size)
    assert isinstance(images.pixels, ImageFiles)
    rows = zip(images.labels.tolist(), images.pixels.paths, strict=True)
    depth = len(_find_split(root / data_set.locate(root), "train").parts) + 1  # of the folder of a class
    lines = "".join(f"{label} {'/'.join(path.parts[depth:])}\n" for label, path in rows)
    return hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()


def load(name: str, split: Split, root: str | Path | None = None, size: int | None = None) -> Images:
    """One split, "train" or "test", of a data set of DATA_SETS or of your own pictures, "folder:PATH".

        images = load("cifar10", "train")
        images = load("folder:~/birds", "test", size=64)

    `root` is where data sets lie (see `data_root`), `size` the side to which pictures of a folder are resized.
    Published sets are read into memory, every file checked by its size and MD5; pictures in folders are only listed.
    The other split's files are never opened. A missing or damaged file is a DataError that says what to do."""
    if split not in ("train", "test"):
        raise DataError(f"There is no split {split!r}: ask for 'train' or 'test'.")
    if size is not None and size < 1:
        raise DataError(f"`size` must be at least 1, got {size}.")
    data_set = find(name)
    if name.startswith(OWN) and not Path(data_set.folders[0]).is_dir():
        raise DataError(
            f"There is no folder {data_set.folders[0]} (a relative folder:PATH counts from where kerneq is started): "
            "put pictures into its train/CLASS and test/CLASS."
        )
    side = data_set.size
    if size not in (None, side) and not isinstance(data_set, FolderDataSet):
        raise DataError(f"The pictures of {name} are {side}×{side}, not {size}×{size}: leave `size` out.")
    return data_set.load(split, data_root(root), size or side)


@final
@dataclasses.dataclass(frozen=True)
class Description:
    """The state of a data set on the disk."""

    name: str
    found: bool  # complete, judged by names and sizes of files
    path: Path | None  # its folder, if there is one
    problem: str | None  # what is wrong with it, a sentence
    get: str  # how to get it
    licence: str  # and whom to cite


def describe(root: str | Path | None = None) -> list[Description]:
    """A row for every data set of DATA_SETS. Only names and sizes of files are checked; `load` checks MD5s."""
    found, place = [], data_root(root)
    for entry in DATA_SETS.values():
        path, problem = None, None
        try:
            path = place / entry.locate(place) if entry.folders else None
            entry.check(place)
        except DataError as error:
            problem = str(error)
        found.append(Description(entry.name, problem is None, path, problem, entry.get, entry.licence))
    return found
