"""Pictures that fit in memory, with their labels and what is needed to normalise them."""

import dataclasses
from typing import final

import torch
from torch import Tensor


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """`mean` and `std` per channel, for pixels scaled to [0, 1], are those of the whole training split."""

    pixels: Tensor  # uint8 (count, channels, height, width)
    labels: Tensor  # int64 (count)
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4:
            got = f"{self.pixels.dtype} {tuple(self.pixels.shape)}"
            raise ValueError(f"`pixels` must be uint8 (count, channels, height, width), got {got}.")
        if self.labels.dtype != torch.int64 or self.labels.shape != self.pixels.shape[:1]:
            got = f"{self.labels.dtype} {tuple(self.labels.shape)}"
            raise ValueError(f"`labels` must be int64 ({len(self.pixels)},), got {got}.")
        if not len(self.mean) == len(self.std) == self.pixels.shape[1]:
            got = f"{len(self.mean)} and {len(self.std)}"
            raise ValueError(f"`mean` and `std` must have {self.pixels.shape[1]} entries, got {got}.")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every picture."""
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def to(self, device: torch.device) -> "Images":
        """The same with pixels and labels on `device`."""
        return dataclasses.replace(self, pixels=self.pixels.to(device), labels=self.labels.to(device))

    def select(self, index: Tensor) -> "Images":
        """The pictures at `index`, in that order."""
        return dataclasses.replace(self, pixels=self.pixels[index], labels=self.labels[index])
