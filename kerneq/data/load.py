"""A data set by its name, and what there is of all of them."""

import dataclasses
import difflib
from pathlib import Path
from typing import final

from .catalogue import DATA_SETS, user_folder
from .dataset import AbstractDataSet, data_root
from .errors import DataError
from .folder import Folder
from .images import Images
from .layout import Split

_FOLDER = "folder:"


def load(name: str, split: Split, root: str | Path | None = None, size: int | None = None) -> Images | Folder:
    """One split, "train" or "test", of a data set of DATA_SETS or of your own pictures, "folder:PATH".

    `root` is where data sets lie (by default $KERNEQ_DATA, else ~/.cache/kerneq); `size` is the side to
    which pictures of a folder are resized. The other split's files are never opened."""
    if split not in ("train", "test"):
        raise DataError(f"There is no split {split!r}: ask for 'train' or 'test'.")
    if size is not None and size < 1:
        raise DataError(f"`size` must be at least 1, got {size}.")
    return find(name).load(name, split, data_root(root), size)


def find(name: str) -> AbstractDataSet:
    """The data set of that name."""
    if name.startswith(_FOLDER):
        path = Path(name.removeprefix(_FOLDER)).expanduser().absolute()
        if not path.is_dir():
            raise DataError(f"There is no folder {path}: put pictures into its train/CLASS and test/CLASS.")
        return user_folder(path)
    if name in DATA_SETS:
        return DATA_SETS[name]
    close = difflib.get_close_matches(name, DATA_SETS, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise DataError(f"There is no data set {name!r}.{hint} There are: {', '.join(DATA_SETS)}, {_FOLDER}PATH.")


@final
@dataclasses.dataclass(frozen=True)
class Description:
    """What was found of a data set."""

    name: str
    found: bool  # whole, as far as names and sizes of files tell
    path: Path | None  # its folder, if there is one
    problem: str | None  # what is wrong with it, a sentence
    get: str  # how to get it
    licence: str  # and whom to cite


def describe(root: str | Path | None = None) -> list[Description]:
    """A row for every data set of DATA_SETS; looks at names and sizes of files only, so it is quick."""
    return [_describe(name, data_set, data_root(root)) for name, data_set in DATA_SETS.items()]


def _describe(name: str, data_set: AbstractDataSet, root: Path) -> Description:
    path: Path | None = None
    problem: str | None = None
    try:
        path = data_set.locate(name, root)
        data_set.check(name, root)
    except DataError as error:
        problem = str(error)
    return Description(name, problem is None, path, problem, data_set.get, data_set.licence)
