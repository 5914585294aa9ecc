"""RandAugment (Cubuk et al., 2020) and TrivialAugmentWide (Müller and Hutter, 2021), picture by picture.

Which picture gets which operation is drawn on the host. The pictures are sorted by operation there, so the
device gathers once, works on contiguous groups of known size and puts the result back: no masks, no
operation computed for a picture that does not get it, and nothing the host must wait for. The five
geometric operations are one group, since each is a matrix.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import final

import numpy as np
import torch
from torch import Tensor

from . import colour
from .geometry import affine
from .randomness import Place, Purpose
from .transfer import to_device


@final
class Operation(enum.IntEnum):
    """The fourteen operations, equally likely."""

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


_COLOUR: dict[Operation, Callable[[Tensor, Tensor], Tensor]] = {
    Operation.BRIGHTNESS: colour.brightness,
    Operation.COLOUR: colour.colour,
    Operation.CONTRAST: colour.contrast,
    Operation.SHARPNESS: colour.sharpness,
    Operation.POSTERIZE: colour.posterize,
    Operation.SOLARIZE: colour.solarize,
    Operation.AUTOCONTRAST: colour.autocontrast,
    Operation.EQUALIZE: colour.equalize,
}


@final
@dataclasses.dataclass(frozen=True)
class Ranges:
    """What each operation does at full level; at level 0 it does nothing."""

    shear: float
    pixels: float  # translation in pixels …
    share: float  # … plus a share of the side
    degrees: float
    factor: float  # of brightness, colour, contrast, sharpness: 1 ± factor
    bits: int  # taken away by posterize

    def amounts(self, operation: np.ndarray, level: np.ndarray, sign: np.ndarray, sides: tuple[int, int]) -> np.ndarray:
        """The number that each operation takes, for levels in [0, 1], signs ±1 and (height, width)."""
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


def rand_augment(pixels: Tensor, count: int, magnitude: float, share: float, place: Place) -> Tensor:
    """`count` operations after one another at level magnitude / 30, on about `share` of the pictures."""
    chosen, *draws = place.uniform(Purpose.POLICY, 1 + 2 * count)
    level = np.full(len(chosen), magnitude / 30)
    for which, sign in zip(draws[::2], draws[1::2], strict=True):
        pixels = _round(pixels, RANDAUGMENT, chosen < share, which, level, sign)
    return pixels


def trivial_augment(pixels: Tensor, share: float, place: Place) -> Tensor:
    """One operation at one of 31 levels, both drawn for each picture, on about `share` of the pictures."""
    chosen, which, sign, level = place.uniform(Purpose.POLICY, 4)
    return _round(pixels, TRIVIAL_WIDE, chosen < share, which, np.floor(level * 31) / 30, sign)


def _round(
    pixels: Tensor, ranges: Ranges, chosen: np.ndarray, which: np.ndarray, level: np.ndarray, sign: np.ndarray
) -> Tensor:
    operation = np.where(chosen, np.floor(which * len(Operation)).astype(np.int64), Operation.IDENTITY)
    amount = ranges.amounts(operation, level, np.where(sign < 0.5, -1.0, 1.0), (pixels.shape[2], pixels.shape[3]))
    return operate(pixels, operation, amount)


def operate(pixels: Tensor, operation: np.ndarray, amount: np.ndarray) -> Tensor:
    """Apply operation[b] with amount[b] to picture b."""
    order = np.argsort(operation, kind="stable")[np.count_nonzero(operation == Operation.IDENTITY) :]
    operation, amount = operation[order], amount[order]
    index = to_device(order, pixels.device)
    amounts = to_device(amount.astype(np.float32), pixels.device)[:, None, None, None]
    moved = int(np.count_nonzero(operation <= Operation.ROTATE))
    work = pixels[index]
    parts = [affine(work[:moved], matrices(operation[:moved], amount[:moved], *pixels.shape[2:]))]
    first = moved
    for kind, function in _COLOUR.items():
        last = first + int(np.count_nonzero(operation == kind))
        if last > first:
            parts.append(function(work[first:last], amounts[first:last]))
        first = last
    return pixels.index_copy(0, index, torch.cat(parts))


def matrices(operation: np.ndarray, amount: np.ndarray, height: int, width: int) -> np.ndarray:
    """The inverse map (a, b, c, d, e, f) of each geometric operation; rotation is about the centre."""
    table = np.tile(np.array([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]), (len(operation), 1))
    entries = {
        Operation.SHEAR_X: 1,
        Operation.SHEAR_Y: 3,
        Operation.TRANSLATE_X: 2,
        Operation.TRANSLATE_Y: 5,
    }
    for kind, entry in entries.items():
        table[operation == kind, entry] = amount[operation == kind]
    turned = operation == Operation.ROTATE
    angle = np.deg2rad(-amount[turned])
    cos, sin, x, y = np.cos(angle).round(15), np.sin(angle).round(15), width / 2, height / 2
    table[turned] = np.stack([cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y], axis=1)
    return table
