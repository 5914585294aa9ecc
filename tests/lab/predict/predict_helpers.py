"""Pictures to predict."""

from pathlib import Path

import numpy as np
from PIL import Image

from kerneq.lab.data import load


def write_digits(folder: Path, count: int) -> list[Path]:
    images = load("digits", "test")
    paths = [folder / f"digit{i}.png" for i in range(count)]
    for path, pixels in zip(paths, images.pixels, strict=False):
        Image.fromarray(pixels[0].numpy()).save(path)
    return paths


def painted(width: int, height: int) -> Image.Image:
    """A smooth colour picture in which no two corners are alike."""
    y, x = np.mgrid[:height, :width] / max(width, height)
    return Image.fromarray((np.stack([x, y, 0.5 * x * y + 0.2], axis=2) * 255).astype(np.uint8))
