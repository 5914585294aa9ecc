"""Moving pixels: every output pixel says where it comes from, and one gather fetches all of them."""

import numpy as np
import torch
from torch import Tensor

from .transfer import to_device


def fetch(pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """pixels[b, :, rows[b, i, j], columns[b, i, j]], black where that lies outside the picture.

    `rows` and `columns` are int64 and broadcast to (batch, height, width)."""
    batch, channels, height, width = pixels.shape
    y, x = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    inside = (y == rows) & (x == columns)
    source = (y * width + x).view(batch, 1, height * width)
    found = pixels.flatten(2).gather(2, source.expand(-1, channels, -1)).view_as(pixels)
    return found * inside.unsqueeze(1)


def crop_and_flip(pixels: Tensor, down: np.ndarray, right: np.ndarray, flip: np.ndarray, reflect: bool) -> Tensor:
    """Shift each picture by (down, right) whole pixels, as pad-and-crop does, then mirror it where `flip`.

    What comes in from outside is the picture's reflection or black."""
    height, width = pixels.shape[2:]
    moves = to_device(np.stack([down, right, flip]).astype(np.int64), pixels.device)[:, :, None]  # (3, batch, 1)
    rows = torch.arange(height, device=pixels.device) + moves[0]
    columns = torch.arange(width, device=pixels.device)
    columns = torch.where(moves[2] > 0, width - 1 - columns, columns) + moves[1]
    if reflect:
        rows, columns = _reflect(rows, height), _reflect(columns, width)
    return fetch(pixels, rows[:, :, None], columns[:, None, :])


def _reflect(index: Tensor, size: int) -> Tensor:
    """Fold an index within one picture of the border back inside; the border pixel is not repeated."""
    return (size - 1) - (index.abs() - (size - 1)).abs()


def affine(pixels: Tensor, matrices: np.ndarray) -> Tensor:
    """Nearest-neighbour resampling; row (a, b, c, d, e, f) fetches from (ax + by + c, dx + ey + f).

    As in Pillow's Image.transform, the coordinates are those of pixel centres in 16.16 fixed point. Whole
    numbers make the result exact and the same on every device, which a float grid_sample would not."""
    height, width = pixels.shape[2:]
    a, b, c, d, e, f = matrices.T
    table = np.stack([a, b, c + (a + b) / 2, d, e, f + (d + e) / 2], axis=1)
    fixed = to_device(np.floor(table * 65536 + 0.5).astype(np.int64), pixels.device)
    a, b, c, d, e, f = fixed.T[:, :, None, None]
    y = torch.arange(height, device=pixels.device)[:, None]
    x = torch.arange(width, device=pixels.device)
    return fetch(pixels, (d * x + e * y + f) >> 16, (a * x + b * y + c) >> 16)
