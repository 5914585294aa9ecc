"""A data set by its name."""

import difflib
import os
from pathlib import Path

import torch

from .catalogue import DATA_SETS, DataSet
from .errors import DataError
from .folder import Folder
from .images import Images
from .layout import AbstractLayout, Split

VARIABLE = "KERNEQ_DATA"


def data_root(root: str | Path | None = None) -> Path:
    """Where data sets lie: `root`, else $KERNEQ_DATA, else ~/.cache/kerneq."""
    return Path(root or os.environ.get(VARIABLE) or Path("~/.cache/kerneq")).expanduser()


def load(name: str, split: Split, root: str | Path | None = None, size: int | None = None) -> Images | Folder:
    """One split of a data set; the other split's files are never opened."""
    if split not in ("train", "test"):
        raise DataError(f"There is no split {split!r}: ask for 'train' or 'test'.")
    if name not in DATA_SETS:
        close = difflib.get_close_matches(name, DATA_SETS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise DataError(f"There is no data set {name!r}.{hint} There are: {', '.join(DATA_SETS)}.")
    found = DATA_SETS[name]
    layout, folder = locate(name, found, data_root(root))
    arrays = layout.read(folder, split)
    pixels, labels = torch.from_numpy(arrays.pixels.copy()), torch.from_numpy(arrays.labels)
    if size is not None and (size, size) != pixels.shape[2:]:
        own = f"{pixels.shape[2]}×{pixels.shape[3]}"
        raise DataError(
            f"The pictures of {name} are {own} and `size` {size} would change them: leave it out."
        )
    return Images(pixels, labels, found.classes, found.mean, found.std)


def locate(name: str, data_set: DataSet, root: Path) -> tuple[AbstractLayout, Path]:
    """The first layout of the data set whose folder is there, and that folder."""
    for layout in data_set.layouts:
        if not layout.folders:
            return layout, root
        for folder in layout.folders:
            if (root / folder).is_dir():
                return layout, root / folder
    wanted = " or ".join(folder for layout in data_set.layouts for folder in layout.folders)
    raise DataError(
        f"The data set {name} is not in {root}, which has no folder {wanted}: {data_set.get}; "
        f"or set {VARIABLE} to the folder that holds it."
    )
