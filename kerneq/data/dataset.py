"""What every data set must answer: where is it, is it all there, what does it hold?"""

import abc
import os
from pathlib import Path

from .errors import DataError
from .folder import Folder
from .images import Images
from .layout import Split

VARIABLE = "KERNEQ_DATA"


def data_root(root: str | Path | None = None) -> Path:
    """Where data sets lie: `root`, else $KERNEQ_DATA, else ~/.cache/kerneq."""
    return Path(root or os.environ.get(VARIABLE) or "~/.cache/kerneq").expanduser()


class AbstractDataSet(abc.ABC):
    """A data set that may lie under the data root."""

    get: str  # how to get it
    licence: str  # and whom to cite

    @abc.abstractmethod
    def locate(self, name: str, root: Path) -> Path | None:
        """The folder that holds it, None for a set that needs no files; a DataError where it is missing."""

    @abc.abstractmethod
    def check(self, name: str, root: Path) -> None:
        """A DataError unless the files of both splits are there with the right sizes; opens none of them."""

    @abc.abstractmethod
    def load(self, name: str, split: Split, root: Path, size: int | None) -> Images | Folder:
        """One split; the other split's files are never opened."""


def missing(name: str, root: Path, folders: str, get: str) -> DataError:
    """The error for a data set that is not there."""
    where = f"The data set {name} is not in {root}, which has no folder {folders}"
    return DataError(f"{where}: {get}; or set {VARIABLE} to the folder that holds it.")
