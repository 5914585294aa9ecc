"""scikit-learn's 1797 handwritten digits, 8×8: the set that is always there."""

import dataclasses
from pathlib import Path
from typing import final

import numpy as np

from .layout import AbstractLayout, Arrays, Split


@final
@dataclasses.dataclass(frozen=True)
class Digits(AbstractLayout):
    """Comes inside scikit-learn, so there is no folder; every fifth picture of each class is for testing."""

    folders: tuple[str, ...] = ()

    def check(self, folder: Path, split: Split) -> None:
        """Nothing to check: the pictures are part of an installed package."""

    def read(self, folder: Path, split: Split) -> Arrays:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]

        content = load_digits()
        pixels = np.rint(content.images * (255 / 16)).astype(np.uint8)[:, None]
        labels = content.target.astype(np.int64)
        test = np.zeros(len(labels), dtype=bool)
        for label in range(10):
            test[np.flatnonzero(labels == label)[4::5]] = True
        keep = test if split == "test" else ~test
        return Arrays(pixels[keep], labels[keep])
