"""The random resized crop: a part of the picture, blown up to the size of the whole."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .randomness import Place, Purpose
from .transfer import to_device


def boxes(place: Place, area: float) -> np.ndarray:
    """For each picture left, top, right, bottom, as shares of its sides, of a part of it.

    The part has `area` … 1 of the surface and is up to 4:3 out of the picture's own proportions."""
    surface, ratio, y, x = place.uniform(Purpose.AREA, 4)
    side = np.sqrt(area + (1 - area) * surface)
    stretch = np.exp((ratio - 0.5) * np.log(4 / 3))  # (3/4)^½ … (4/3)^½, of width to √surface
    width, height = np.minimum(side * stretch, 1), np.minimum(side / stretch, 1)
    left, top = x * (1 - width), y * (1 - height)
    return np.stack([left, top, left + width, top + height], axis=1)


def zoom(pixels: Tensor, parts: np.ndarray) -> Tensor:
    """Each picture's part, by bilinear interpolation at the picture's own size."""
    left, top, right, bottom = 2 * parts.T - 1  # grid_sample's corners are ±1
    zero = np.zeros_like(left)
    rows = [[(right - left) / 2, zero, (right + left) / 2], [zero, (bottom - top) / 2, (bottom + top) / 2]]
    theta = np.stack([np.stack(row, axis=1) for row in rows], axis=1).astype(np.float32)
    grid = functional.affine_grid(to_device(theta, pixels.device), list(pixels.shape), align_corners=False)
    found = functional.grid_sample(pixels.float(), grid, padding_mode="border", align_corners=False)
    return found.round_().to(torch.uint8)
