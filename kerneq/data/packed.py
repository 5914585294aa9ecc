"""A published data set of small pictures, packed into a few files."""

import dataclasses
from pathlib import Path
from typing import final

import torch

from .dataset import AbstractDataSet, missing
from .errors import DataError
from .images import Images
from .layout import AbstractLayout, Split


@final
@dataclasses.dataclass(frozen=True)
class Packed(AbstractDataSet):
    """`mean` and `std` are those of the training split, so that testing need not read it."""

    layouts: tuple[AbstractLayout, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    get: str
    licence: str

    def locate(self, name: str, root: Path) -> Path | None:
        return self._find(name, root)[1]

    def check(self, name: str, root: Path) -> None:
        layout, folder = self._find(name, root)
        layout.check(folder or root, "train")
        layout.check(folder or root, "test")

    def load(self, name: str, split: Split, root: Path, size: int | None) -> Images:
        layout, folder = self._find(name, root)
        arrays = layout.read(folder or root, split)
        height, width = arrays.pixels.shape[2:]
        if size is not None and (size, size) != (height, width):
            raise DataError(f"The pictures of {name} are {height}×{width}, not {size}×{size}: leave `size` out.")
        pixels = torch.from_numpy(arrays.pixels.copy())
        return Images(pixels, torch.from_numpy(arrays.labels), self.classes, self.mean, self.std)

    def _find(self, name: str, root: Path) -> tuple[AbstractLayout, Path | None]:
        """The first layout whose folder is there, and that folder."""
        for layout in self.layouts:
            if not layout.folders:
                return layout, None
            for folder in layout.folders:
                if (root / folder).is_dir():
                    return layout, root / folder
        raise missing(name, root, " or ".join(f for layout in self.layouts for f in layout.folders), self.get)
