"""Images with their labels, in memory or in files: values that can be selected, moved, decoded and split."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .randomness import Purpose, generator

Convert = Callable[[Image.Image], Image.Image]
Box = tuple[float, float, float, float]  # left, top, right, bottom, as shares of the width and height


@final
class DataError(Exception):
    """Data could not be read; the message says which file, what was wrong and what to do."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ImageFiles:
    """Pixels that lie in picture files and stand for a tensor uint8 (count, 3, size, size).

    They are decoded when a batch needs them. Indexing with int64 (n) selects n files and opens none."""

    paths: tuple[Path, ...]
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"`size` must be at least 1, got {self.size}.")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the decoded pixels will have."""
        return len(self.paths), 3, self.size, self.size

    def __getitem__(self, index: Tensor | np.ndarray) -> "ImageFiles":
        return ImageFiles(tuple(self.paths[i] for i in index.tolist()), self.size)

    def decode(self, boxes: Sequence[Box] | None = None) -> Tensor:
        """All of them in memory, each cut to its box, or to its largest central square where there are no boxes."""
        pixels = torch.empty(self.shape, dtype=torch.uint8)
        for i, path in enumerate(self.paths):
            pixels[i] = decode(path, self.size, None if boxes is None else boxes[i])
        return pixels


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Labelled images, in memory or, if they are too many or too large for it, in files.

    A value: `to`, `select` and `split_validation` give new ones, and copy no picture file. Pixels are bytes until a
    batch normalises them, (pixels / 255 − mean) / std.

    `mean` and `std` per channel, for pixels scaled to [0, 1], are those of the whole training split."""

    pixels: Tensor | ImageFiles  # uint8 (count, channels, height, width)
    labels: Tensor  # int64 (count)
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if isinstance(self.pixels, Tensor) and (self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4):
            got = f"{self.pixels.dtype} {tuple(self.pixels.shape)}"
            raise ValueError(f"`pixels` must be uint8 (count, channels, height, width), got {got}.")
        count, channels = self.pixels.shape[:2]
        if self.labels.dtype != torch.int64 or self.labels.shape != (count,):
            got = f"{self.labels.dtype} {tuple(self.labels.shape)}"
            raise ValueError(f"`labels` must be int64 ({count},), got {got}.")
        if not len(self.mean) == len(self.std) == channels:
            got = f"{len(self.mean)} and {len(self.std)}"
            raise ValueError(f"`mean` and `std` must have {channels} entries, got {got}.")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        where = "in memory" if isinstance(self.pixels, Tensor) else "in files"
        return f"Images({len(self)} of shape {self.shape} {where}, {len(self.classes)} classes)"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def to(self, device: torch.device) -> "Images":
        """The same on `device`; pixels in files get there when they are decoded."""
        pixels = self.pixels.to(device) if isinstance(self.pixels, Tensor) else self.pixels
        return dataclasses.replace(self, pixels=pixels, labels=self.labels.to(device))

    def select(self, index: Tensor) -> "Images":
        """The images at `index`, int64, in that order."""
        return dataclasses.replace(self, pixels=self.pixels[index], labels=self.labels[index])

    def decode(self) -> Tensor:
        """The pixels in memory, uint8 (count, channels, height, width)."""
        return self.pixels if isinstance(self.pixels, Tensor) else self.pixels.decode()


def decode(path: Path, size: int, box: Box | None = None, convert: Convert | None = None) -> Tensor:
    """One picture file as uint8 (3, size, size): the part in `box`, by default its largest central square.

    Pictures of every mode become RGB, by `convert` or as Pillow does it; the part is resized by bilinear interpolation.
    A file that is not a readable picture, or one made to fill the memory, is a DataError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata, say, which do not matter here
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # made to fill the memory
            with Image.open(path) as picture:
                if box is None:  # a JPEG decodes straight to the smallest sufficient size
                    picture.draft("RGB", (size, size))
                pixels = picture.convert("RGB") if convert is None else convert(picture)
                resized = pixels.resize((size, size), Image.Resampling.BILINEAR, _corners(pixels.size, box))
    except DataError:
        raise
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


def split_validation(images: Images, count: int, seed: int) -> tuple[Images, Images]:
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
    """Images to take of each class: proportional to its size, whole, summing to `count`.

    The method of largest remainders: every quota is within 1 of the exact share."""
    exact = sizes * (count / sizes.sum())
    quotas = np.floor(exact).astype(np.int64)
    order = np.argsort(quotas - exact, kind="stable")  # largest remainder first, the lower label on a tie
    quotas[order[: count - quotas.sum()]] += 1
    return quotas
