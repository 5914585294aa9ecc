"""RandAugment (Cubuk et al., 2020) and TrivialAugmentWide (Müller and Hutter, 2021), picture by picture.

By hand, since Pillow and torchvision take pictures one by one. The host sorts the pictures by operation, and the device
works on contiguous groups of known size, without masks and without waiting; the five geometric operations form one
group. Results equal Pillow's to the bit (autocontrast: to one level). Pixels are uint8 (batch, channels, height,
width), amounts of colour operations float32 (batch, 1, 1, 1).
"""

import dataclasses
import enum
from typing import final

import numpy as np
import torch
from torch import Tensor


@final
class Operation(enum.IntEnum):
    """The fourteen operations, equally likely: identity, five geometric ones, eight changes of levels."""

    IDENTITY = 0
    SHEAR_X = 1
    SHEAR_Y = 2
    TRANSLATE_X = 3
    TRANSLATE_Y = 4
    ROTATE = 5
    BRIGHTNESS = 6
    COLOUR = 7
    CONTRAST = 8
    SHARPNESS = 9
    POSTERIZE = 10
    SOLARIZE = 11
    AUTOCONTRAST = 12
    EQUALIZE = 13


@final
@dataclasses.dataclass(frozen=True)
class Ranges:
    """The amount of each operation at full level, to which other levels are proportional; two operations have none."""

    shear: float
    pixels: float  # translation in pixels …
    share: float  # … plus a share of the side
    degrees: float
    factor: float  # of brightness, colour, contrast, sharpness: 1 ± factor
    bits: int  # taken away by posterize

    def amounts(self, operation: np.ndarray, level: np.ndarray, sign: np.ndarray, sides: tuple[int, int]) -> np.ndarray:
        """The amount of each picture's operation, for levels in [0, 1], signs ±1 and sides (height, width)."""
        table = np.zeros((len(Operation), len(level)))
        table[[Operation.SHEAR_X, Operation.SHEAR_Y]] = sign * level * self.shear
        for kind, side in zip((Operation.TRANSLATE_Y, Operation.TRANSLATE_X), sides, strict=True):
            table[kind] = sign * np.trunc(level * (self.pixels + self.share * side))
        table[Operation.ROTATE] = sign * level * self.degrees
        table[Operation.BRIGHTNESS : Operation.SHARPNESS + 1] = 1 + sign * level * self.factor
        table[Operation.POSTERIZE] = 8 - np.rint(level * self.bits)
        table[Operation.SOLARIZE] = 256 * (1 - level)
        return np.take_along_axis(table, operation[None], axis=0)[0]


RANDAUGMENT = Ranges(shear=0.3, pixels=0.0, share=150 / 331, degrees=30.0, factor=0.9, bits=4)
TRIVIAL_WIDE = Ranges(shear=0.99, pixels=32.0, share=0.0, degrees=135.0, factor=0.99, bits=6)


def operate(pixels: Tensor, operation: np.ndarray, amount: np.ndarray) -> Tensor:
    """Apply operation[b] with amount[b] to picture b; both are host arrays (batch)."""
    order = np.argsort(operation, kind="stable")[np.count_nonzero(operation == Operation.IDENTITY) :]
    operation, amount = operation[order], amount[order]
    index = to_device(order, pixels.device)
    amounts = to_device(amount.astype(np.float32), pixels.device)[:, None, None, None]
    work = pixels[index]
    first = int(np.count_nonzero(operation <= Operation.ROTATE))
    parts = [transform(work[:first], operation[:first], amount[:first])]
    for kind, function in enumerate(_COLOUR_FUNCTIONS, start=Operation.BRIGHTNESS):
        last = first + int(np.count_nonzero(operation == kind))
        if last > first:
            parts.append(function(work[first:last], amounts[first:last]))
        first = last
    return pixels.index_copy(0, index, torch.cat(parts))


def transform(pixels: Tensor, operation: np.ndarray, amount: np.ndarray) -> Tensor:
    """The geometric operations, rotation about the centre, by nearest-neighbour resampling.

    Each fetches from (ax + by + c, dx + ey + f), at pixel centres in 16.16 fixed point as Pillow's Image.transform;
    whole numbers give the same result on every device."""
    height, width = pixels.shape[2:]
    maps = np.tile(np.array([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]), (len(operation), 1))
    entries = {Operation.SHEAR_X: 1, Operation.SHEAR_Y: 3, Operation.TRANSLATE_X: 2, Operation.TRANSLATE_Y: 5}
    for kind, column in entries.items():
        maps[operation == kind, column] = amount[operation == kind]
    turned = operation == Operation.ROTATE
    angle = np.deg2rad(-amount[turned])
    cos, sin, x, y = np.cos(angle).round(15), np.sin(angle).round(15), width / 2, height / 2
    maps[turned] = np.stack([cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y], axis=1)
    maps[:, [2, 5]] += (maps[:, [0, 3]] + maps[:, [1, 4]]) / 2
    fixed = to_device(np.floor(maps * 65536 + 0.5).astype(np.int64), pixels.device)
    a, b, c, d, e, f = fixed.T[:, :, None, None]
    rows = torch.arange(height, device=pixels.device)[:, None]
    columns = torch.arange(width, device=pixels.device)
    return fetch(pixels, (d * columns + e * rows + f) >> 16, (a * columns + b * rows + c) >> 16)


def fetch(pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """pixels[b, :, rows[b, i, j], columns[b, i, j]], black where that lies outside the picture.

    `rows` and `columns` are int64 and broadcast to (batch, height, width)."""
    batch, channels, height, width = pixels.shape
    y, x = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    inside = (y == rows) & (x == columns)
    source = (y * width + x).view(batch, 1, height * width)
    found = pixels.flatten(2).gather(2, source.expand(-1, channels, -1)).view_as(pixels)
    return found * inside.unsqueeze(1)


def enhance_brightness(pixels: Tensor, amount: Tensor) -> Tensor:
    """Away from black by the factor `amount`."""
    return (pixels * amount).clamp_(max=255).to(torch.uint8)


def enhance_colour(pixels: Tensor, amount: Tensor) -> Tensor:
    """Away from the grey picture by the factor `amount`."""
    return _blend(grey(pixels), pixels, amount)


def enhance_contrast(pixels: Tensor, amount: Tensor) -> Tensor:
    """Away from the picture's mean grey by the factor `amount`: m + amount (pixels − m)."""
    total = grey(pixels).sum(dim=(1, 2, 3), keepdim=True, dtype=torch.int64)
    count = pixels[0, 0].numel()
    return _blend((2 * total + count) // (2 * count), pixels, amount)  # the mean rounded, halves up


def enhance_sharpness(pixels: Tensor, amount: Tensor) -> Tensor:
    """Away from the smoothed picture by the factor `amount`; the border is never smoothed.

    Smoothing is Pillow's 3×3 filter: weight 5 for the pixel, 1 for each neighbour, over 13."""
    wide = pixels.to(torch.int16)
    rows = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    smooth = wide.clone()
    smooth[:, :, 1:-1, 1:-1] = (2 * box + 8 * wide[:, :, 1:-1, 1:-1] + 13) // 26
    return _blend(smooth, pixels, amount)


def posterize(pixels: Tensor, amount: Tensor) -> Tensor:
    """Keep the `amount` highest bits of every level."""
    mask = torch.bitwise_left_shift(255, 8 - amount.to(torch.int32))
    return (pixels & mask).to(torch.uint8)


def solarize(pixels: Tensor, amount: Tensor) -> Tensor:
    """Invert the levels from `amount` up."""
    return torch.where(pixels < amount, pixels, 255 - pixels)


def autocontrast(pixels: Tensor, amount: Tensor) -> Tensor:
    """Stretch each channel to 0 … 255; `amount` is unused.

    Floor of the exact quotient, where Pillow truncates a rounded one: at most one level apart."""
    wide = pixels.to(torch.int32)
    low, high = wide.amin(dim=(2, 3), keepdim=True), wide.amax(dim=(2, 3), keepdim=True)
    stretched = (wide - low) * 255 // (high - low).clamp_(min=1)
    return torch.where(high > low, stretched, wide).to(torch.uint8)


def equalize(pixels: Tensor, amount: Tensor) -> Tensor:
    """Equalise the histogram of each channel; `amount` is unused.

    A level v becomes (s / 2 + count of levels below v) / s, where s is a 255th of the pixels without the brightest
    ones; a channel with s = 0 stays as it is."""
    flat = pixels.flatten(2).long()
    counts = flat.new_zeros((*flat.shape[:2], 256))
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    brightest = counts.gather(2, flat.amax(dim=2, keepdim=True))
    step = (flat.shape[2] - brightest) // 255
    table = (step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)
    level = table.gather(2, flat).clamp_(max=255)
    return torch.where(step > 0, level, flat).to(torch.uint8).view_as(pixels)


# In the order of Operation, from BRIGHTNESS on.
_COLOUR_FUNCTIONS = (
    enhance_brightness,
    enhance_colour,
    enhance_contrast,
    enhance_sharpness,
    posterize,
    solarize,
    autocontrast,
    equalize,
)


def grey(pixels: Tensor) -> Tensor:
    """ITU-R 601 luma in Pillow's fixed point, int32 (batch, 1, height, width), of grey or RGB pictures."""
    if pixels.shape[1] == 1:
        return pixels.to(torch.int32)
    red, green, blue = pixels.to(torch.int32).unbind(1)
    luma = (red * 19595).add_(green, alpha=38470).add_(blue, alpha=7471).add_(32768) >> 16
    return luma.unsqueeze(1)


def _blend(start: Tensor, end: Tensor, amount: Tensor) -> Tensor:
    """start + amount (end − start), cut to a whole level."""
    return (start + amount * (end - start)).clamp_(0, 255).to(torch.uint8)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on `device`; the host does not wait for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":  # from pinned memory the copy is asynchronous
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
