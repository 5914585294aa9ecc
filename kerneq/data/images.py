"""Images with their labels, in memory or in files: values that can be selected, moved, decoded and split."""

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, final

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .randomness import Purpose, generator

Box = tuple[float, float, float, float]  # left, top, right, bottom, as shares of the width and height


@final
class DataError(Exception):
    """Data could not be read; the message says which file, what was wrong and what to do."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Images in memory, with what is needed to normalise them.

    `mean` and `std` per channel, for pixels scaled to [0, 1], are those of the whole training split."""

    pixels: Tensor  # uint8 (count, channels, height, width)
    labels: Tensor  # int64 (count)
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4:
            got = f"{self.pixels.dtype} {tuple(self.pixels.shape)}"
            raise ValueError(f"`pixels` must be uint8 (count, channels, height, width), got {got}.")
        _check_labels(self.labels, len(self.pixels))
        if not len(self.mean) == len(self.std) == self.pixels.shape[1]:
            got = f"{len(self.mean)} and {len(self.std)}"
            raise ValueError(f"`mean` and `std` must have {self.pixels.shape[1]} entries, got {got}.")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def to(self, device: torch.device) -> "Images":
        """The same with pixels and labels on `device`."""
        return dataclasses.replace(self, pixels=self.pixels.to(device), labels=self.labels.to(device))

    def select(self, index: Tensor) -> "Images":
        """The images at `index` (int64), in that order."""
        return dataclasses.replace(self, pixels=self.pixels[index], labels=self.labels[index])


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ImageFolder:
    """Images too many or too large for memory: their paths and labels.

    Plays the part of Images. Every file is decoded to uint8 (3, size, size) when a batch needs it, or all of them at
    once by `decode`, if they are few."""

    paths: tuple[Path, ...]
    labels: Tensor  # int64 (count)
    classes: tuple[str, ...]
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"`size` must be at least 1, got {self.size}.")
        _check_labels(self.labels, len(self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every decoded image."""
        return 3, self.size, self.size

    def to(self, device: torch.device) -> "ImageFolder":
        """The same with the labels on `device`; pixels get there when they are decoded."""
        return dataclasses.replace(self, labels=self.labels.to(device))

    def select(self, index: Tensor) -> "ImageFolder":
        """The images at `index` (int64), in that order."""
        paths = tuple(self.paths[i] for i in index.tolist())
        return dataclasses.replace(self, paths=paths, labels=self.labels[index])

    def decode(self) -> Images:
        """All images decoded into memory, for a folder small enough to live on the device."""
        pixels = decode_batch(self.paths, self.size, [None] * len(self))
        return Images(pixels, self.labels, self.classes, self.mean, self.std)


def _check_labels(labels: Tensor, count: int) -> None:
    if labels.dtype != torch.int64 or labels.shape != (count,):
        raise ValueError(f"`labels` must be int64 ({count},), got {labels.dtype} {tuple(labels.shape)}.")


def decode_batch(paths: Sequence[Path], size: int, boxes: Sequence[Box | None]) -> Tensor:
    """The pictures at `paths`, each cut to its box, as uint8 (count, 3, size, size)."""
    pixels = torch.empty((len(paths), 3, size, size), dtype=torch.uint8)
    for row, (path, box) in enumerate(zip(paths, boxes, strict=True)):
        pixels[row] = decode(path, size, box)
    return pixels


def decode(path: Path, size: int, box: Box | None = None) -> Tensor:
    """One picture file as uint8 (3, size, size): the part in `box`, by default its largest central square.

    Pictures of every mode become RGB; the part is resized by bilinear interpolation. A file that is not a readable
    picture, or one made to fill the memory, is a DataError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata, say, which do not matter here
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # made to fill the memory
            with Image.open(path) as picture:
                if box is None:  # a JPEG decodes straight to the smallest sufficient size
                    picture.draft("RGB", (size, size))
                pixels = picture.convert("RGB")
                resized = pixels.resize((size, size), Image.Resampling.BILINEAR, _corners(pixels.size, box))
    except Exception as error:  # Pillow's decoders raise errors of every kind on damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} is not a readable picture ({reason}): replace or remove it.") from None
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def _corners(shape: tuple[int, int], box: Box | None) -> Box:
    """The box in pixels of a picture of `shape` (width, height)."""
    width, height = shape
    if box is None:
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side
    left, top, right, bottom = box
    return left * width, top * height, right * width, bottom * height


Source = TypeVar("Source", Images, ImageFolder)


def split_validation(images: Source, count: int, seed: int) -> tuple[Source, Source]:
    """The training and the validation part, the latter of `count` images, class by class in proportion.

    Which images go where depends on the labels, `count` and `seed` alone. Both parts keep the order of the
    original."""
    labels = images.labels.cpu().numpy()
    if not 0 < count < len(labels):
        raise ValueError(f"`count` must lie between 1 and {len(labels) - 1} for this data set, got {count}.")
    rng = generator(Purpose.VALIDATION, seed)
    held = np.zeros(len(labels), dtype=bool)
    for label, quota in enumerate(_quotas(np.bincount(labels), count)):
        held[rng.permutation(np.flatnonzero(labels == label))[:quota]] = True
    train, validation = (torch.from_numpy(np.flatnonzero(mask)) for mask in (~held, held))
    return images.select(train), images.select(validation)


def _quotas(sizes: np.ndarray, count: int) -> np.ndarray:
    """Images to take of each class: proportional, whole, summing to `count` (largest remainders)."""
    exact = sizes * (count / sizes.sum())
    quotas = np.floor(exact).astype(np.int64)
    order = np.argsort(quotas - exact, kind="stable")  # largest remainder first, the lower label on a tie
    quotas[order[: count - quotas.sum()]] += 1
    return quotas
