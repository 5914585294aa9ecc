"""Pictures too many or too large for memory: their paths and labels; a stream decodes them when needed."""

import dataclasses
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from .decode import decode
from .errors import DataError
from .images import Images


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Folder:
    """Plays the part of Images; every picture is decoded to (3, size, size)."""

    paths: tuple[Path, ...]
    labels: Tensor  # int64 (count)
    classes: tuple[str, ...]
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"`size` must be at least 1, got {self.size}.")
        if self.labels.dtype != torch.int64 or self.labels.shape != (len(self.paths),):
            got = f"{self.labels.dtype} {tuple(self.labels.shape)}"
            raise ValueError(f"`labels` must be int64 ({len(self.paths)},), got {got}.")

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every decoded picture."""
        return 3, self.size, self.size

    def to(self, device: torch.device) -> "Folder":
        """The same with the labels on `device`; pictures get there when they are decoded."""
        return dataclasses.replace(self, labels=self.labels.to(device))

    def select(self, index: Tensor) -> "Folder":
        """The pictures at `index`, in that order."""
        paths = tuple(self.paths[i] for i in index.tolist())
        return dataclasses.replace(self, paths=paths, labels=self.labels[index])

    def decode(self) -> Images:
        """All pictures decoded into memory, for a folder small enough to live on the device."""
        pixels = torch.empty((len(self), *self.shape), dtype=torch.uint8)
        for i, path in enumerate(self.paths):
            found = decode(path, self.size)
            if isinstance(found, str):
                raise DataError(found)
            pixels[i] = found
        return Images(pixels, self.labels, self.classes, self.mean, self.std)
