"""What a layout of files on disk must answer: are they all there, and what do they hold?"""

import abc
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, final

import numpy as np

from .errors import DataError

Split = Literal["train", "test"]


@final
@dataclasses.dataclass(frozen=True)
class Arrays:
    """What was read: pixels (count, channels, height, width) of unsigned bytes, labels (count)."""

    pixels: np.ndarray
    labels: np.ndarray


class AbstractLayout(abc.ABC):
    """One way in which a data set is published; it lives in one of `folders` under the data root."""

    folders: tuple[str, ...]

    @abc.abstractmethod
    def check(self, folder: Path, split: Split) -> None:
        """Raise a DataError unless the split's files are there with the right sizes; opens none of them."""

    @abc.abstractmethod
    def read(self, folder: Path, split: Split) -> Arrays:
        """The checked content of the split; the other split's files are never opened."""


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
