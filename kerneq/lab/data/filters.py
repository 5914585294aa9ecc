"""The building blocks of corruptions: random numbers for each picture, linear filters, trails, clouds and drops.

Pictures x are float32 (n, channels, h, w) with values in [0, 1]. Blurs, enlargements and changes of size are matrix
products AxBᵀ, which allow any border and are fast on every device."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .operations import fetch

MARGIN = 1e-3  # of a level: rounding error of float32 that must not lower a value by a level


@final
@dataclasses.dataclass(frozen=True)
class Draws:
    """The random numbers of pictures `first`, `first` + 1, …: number j of stream s of picture i hashes (key, i, s, j).

    The hash is SplitMix64 (Steele, Lea and Flood, 2014) in wrapping int64, the same on every device."""

    key: int
    first: int
    count: int
    device: torch.device

    def uniform(self, stream: int, *shape: int) -> Tensor:
        """Numbers in the open interval (0, 1), float32 (count, *shape); no stream may be asked for twice."""
        place = torch.arange(math.prod(shape), device=self.device) + (stream << 24)
        picture = torch.arange(self.first, self.first + self.count, device=self.device) << 32
        bits = (picture[:, None] + place).mul_(-0x61C8864680B583EB).add_(self.key)
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << 64 - shift) - 1)).mul_(factor)  # >> copies the sign
        bits.bitwise_xor_(bits >> 31)
        return bits.bitwise_and_(0x7FFFFF).to(torch.float32).add_(0.5).div_(2**23).view(self.count, *shape)

    def normal(self, stream: int, *shape: int) -> Tensor:
        """Standard normal numbers, float32 (count, *shape), by the inverse of their distribution."""
        return self.uniform(stream, *shape).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))

    def between(self, low: float, high: float, stream: int, *shape: int) -> Tensor:
        """Uniform numbers between two bounds."""
        return low + (high - low) * self.uniform(stream, *shape)


def to_bytes(x: Tensor) -> Tensor:
    """Levels 0 to 255, truncated as in the published program."""
    return x.clamp(0, 1).mul(255).add(MARGIN).to(torch.uint8)


def quantise(x: Tensor) -> Tensor:
    """x rounded down to a level of a byte."""
    return to_bytes(x).to(x) / 255


def round_levels(x: Tensor) -> Tensor:
    """x at the nearest level, halves up."""
    return (x * 255 + 0.5 + MARGIN).floor() / 255


def apply_matrices(x: Tensor, rows: Sequence[np.ndarray], columns: Sequence[np.ndarray]) -> Tensor:
    """Σₖ Aₖ x Bₖᵀ for Aₖ (h′, h), which works along the columns of a picture, and Bₖ (w′, w), in two products."""
    height, width = rows[0].shape[0], columns[0].shape[0]
    right = torch.from_numpy(np.concatenate(columns)).to(x)  # (kw′, w)
    left = torch.from_numpy(np.stack(rows, 2).reshape(height, -1)).to(x)  # (h′, hk)
    return left @ (x @ right.mT).reshape(*x.shape[:2], -1, width)


def blur(x: Tensor, sigma: float, truncate: float = 4.0, border: Literal["nearest", "reflect"] = "nearest") -> Tensor:
    """Gaussian blur, cut off at `truncate` σ; the border pixel is repeated, or the picture mirrored beyond it."""
    radius = int(truncate * sigma + 0.5)
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    matrices = []
    for side in x.shape[2:]:
        taps = np.arange(side)[:, None] + offsets
        if border == "reflect":
            taps = taps % (2 * side)
            taps = np.minimum(taps, 2 * side - 1 - taps)
        matrix = np.zeros((side, side))
        np.add.at(matrix, (np.arange(side)[:, None], taps.clip(0, side - 1)), weights / weights.sum())
        matrices.append([matrix])
    return apply_matrices(x, *matrices)


def zoom_sum(x: Tensor, *factors: float) -> Tensor:
    """The sum of enlargements of the centre, linear, corner pixels on corner pixels, cut to the picture's size."""
    matrices = []
    for side in x.shape[2:]:
        crops = [math.ceil(side / factor) for factor in factors]
        sizes = [round(crop * factor) for crop, factor in zip(crops, factors, strict=True)]
        sources = [
            (np.arange(side) + (size - side) // 2) * ((crop - 1) / (size - 1)) + (side - crop) // 2
            for crop, size in zip(crops, sizes, strict=True)
        ]
        matrices.append([np.maximum(0, 1 - np.abs(source[:, None] - np.arange(side))) for source in sources])
    return apply_matrices(x, *matrices)


def box_matrix(before: int, after: int) -> np.ndarray:
    """Pillow's box filter from `before` to `after` pixels: the mean of those whose centre lies under a new one."""
    scale = before / after
    centre = (np.arange(after)[:, None] + 0.5) * scale
    distance = np.arange(before) + 0.5 - centre
    under = (distance > -max(scale, 1) / 2) & (distance <= max(scale, 1) / 2)
    return under / under.sum(1, keepdims=True)


def trail(x: Tensor, radius: int, sigma: float, degrees: Tensor) -> Tensor:
    """ImageMagick's motion blur: half a Gaussian of 2 · radius + 1 pixels in the direction `degrees` (n), rounded."""
    offsets = np.arange(2 * radius + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    weights /= weights.sum()
    height, width = x.shape[2:]
    angle = torch.deg2rad(degrees.to(torch.float64))
    blurred = torch.zeros_like(x)
    for offset, weight in zip(offsets.tolist(), weights.tolist(), strict=True):
        if weight > 1e-5:  # the others together are less than a hundredth of a level
            down, right = (torch.ceil(offset * part - 0.5).long()[:, None] for part in (angle.sin(), angle.cos()))
            rows = (torch.arange(height, device=x.device) + down).clamp(0, height - 1)
            columns = (torch.arange(width, device=x.device) + right).clamp(0, width - 1)
            blurred += weight * fetch(x, rows[:, :, None], columns[:, None, :])
    return round_levels(blurred)


def plasma(draws: Draws, side: int, decay: float) -> Tensor:
    """Clouds between 0 and 1 on a torus by the diamond-square algorithm, (n, 1, 2ᵏ, 2ᵏ) with 2ᵏ ≥ side.

    A new point is the mean of four, plus w · U(−w, w); w is 100 at first and divided by `decay` at every halving."""
    step = size = max(2, 1 << (side - 1).bit_length())
    height = torch.zeros((draws.count, size, size), device=draws.device)
    wobble, stream = 100.0, 0
    while step >= 2:
        half, points = step // 2, size // step
        noise = [draws.between(-wobble, wobble, stream + i, points, points) * wobble for i in range(3)]
        corners = height[:, ::step, ::step]
        centres = (corners + corners.roll(-1, 1) + corners.roll(-1, 2) + corners.roll((-1, -1), (1, 2))) / 4 + noise[0]
        right = (corners + corners.roll(-1, 2) + centres + centres.roll(1, 1)) / 4 + noise[1]
        below = (corners + corners.roll(-1, 1) + centres + centres.roll(1, 2)) / 4 + noise[2]
        height[:, half::step, half::step] = centres
        height[:, ::step, half::step] = right
        height[:, half::step, ::step] = below
        step, wobble, stream = half, wobble / decay, stream + 3
    height -= height.amin((1, 2), keepdim=True)
    return (height / height.amax((1, 2), keepdim=True))[:, None]


def distance(points: Tensor) -> Tensor:
    """From each pixel to the nearest of some points, bool (n, 1, h, w); about 1000 where there are none.

    Squared distances are separable: the least along the rows, then the least along the columns."""
    squares = torch.where(points, 0.0, 1e6)
    for _ in range(2):
        side = torch.arange(squares.shape[3], device=points.device)
        squares = (squares[..., None, :] + (side[:, None] - side).square()).amin(-1).mT
    return squares.sqrt()


def relief(drops: Tensor) -> Tensor:
    """Drops, bool (n, 1, h, w), as a relief lit from one side: the distance to a rim, levelled and embossed."""
    wet = functional.pad(drops, (1, 1, 1, 1), value=True)
    inside = wet[..., 1:-1, :-2] & wet[..., 1:-1, 2:] & wet[..., :-2, 1:-1] & wet[..., 2:, 1:-1]
    depth = _smooth(distance(drops & ~inside).clamp(max=20)).floor()
    levels = functional.pad(_equalise(depth), (1, 1, 1, 1), mode="reflect")
    light = levels.new_tensor([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
    return _smooth(functional.conv2d(levels, light[None, None]).clamp(0, 255))


def _equalise(x: Tensor) -> Tensor:
    """OpenCV's equalisation of a histogram: 255 times the share of the pixels that are no higher, those of the lowest
    level left out. (Pillow's counts in whole steps of n/255 pixels, too coarse for small pictures.)"""
    flat = x.flatten(1)
    up_to = torch.searchsorted(flat.sort(1).values, flat, right=True)
    lowest = up_to.amin(1, keepdim=True)
    return ((up_to - lowest) * 255 / (flat.shape[1] - lowest).clamp(min=1)).round().view_as(x)


def _smooth(x: Tensor) -> Tensor:
    """The mean of 3×3 pixels (n, 1, h, w); the border is mirrored in its last pixel."""
    return functional.avg_pool2d(functional.pad(x, (1, 1, 1, 1), mode="reflect"), 3, stride=1)
