"""Changing colours as Pillow's ImageEnhance and ImageOps do, on batches of unsigned bytes.

Results are those of Pillow to the bit (autocontrast: to one level), whatever the device. `amount` is
float32 (batch, 1, 1, 1).
"""

import torch
from torch import Tensor


def brightness(pixels: Tensor, amount: Tensor) -> Tensor:
    """Away from black by the factor `amount`."""
    return (pixels * amount).clamp_(max=255).to(torch.uint8)


def contrast(pixels: Tensor, amount: Tensor) -> Tensor:
    """Away from the picture's mean grey by the factor `amount`."""
    total = grey(pixels).sum(dim=(1, 2, 3), keepdim=True, dtype=torch.int64)
    count = pixels[0, 0].numel()
    return _blend((2 * total + count) // (2 * count), pixels, amount)  # the mean rounded, halves up


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
    """Level the histogram of each channel; `amount` is unused."""
    flat = pixels.flatten(2).long()
    counts = flat.new_zeros((*flat.shape[:2], 256))
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    brightest = counts.gather(2, flat.amax(dim=2, keepdim=True))
    step = (flat.shape[2] - brightest) // 255
    table = (step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)
    level = table.gather(2, flat).clamp_(max=255)
    return torch.where(step > 0, level, flat).to(torch.uint8).view_as(pixels)


def colour(pixels: Tensor, amount: Tensor) -> Tensor:
    """Away from the grey picture by the factor `amount`."""
    return _blend(grey(pixels), pixels, amount)


def sharpness(pixels: Tensor, amount: Tensor) -> Tensor:
    """Away from the smoothed picture by the factor `amount`; the border is never smoothed."""
    wide = pixels.to(torch.int16)
    rows = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    smooth = wide.clone()
    smooth[:, :, 1:-1, 1:-1] = (2 * box + 8 * wide[:, :, 1:-1, 1:-1] + 13) // 26  # weights 1, centre 5, over 13
    return _blend(smooth, pixels, amount)


def grey(pixels: Tensor) -> Tensor:
    """ITU-R 601 luma in Pillow's fixed point, int32 (batch, 1, height, width)."""
    if pixels.shape[1] == 1:
        return pixels.to(torch.int32)
    red, green, blue = pixels.to(torch.int32).unbind(1)
    luma = (red * 19595).add_(green, alpha=38470).add_(blue, alpha=7471).add_(32768) >> 16
    return luma.unsqueeze(1)


def _blend(start: Tensor, end: Tensor, amount: Tensor) -> Tensor:
    """start + amount (end − start), cut to a whole level."""
    return (start + amount * (end - start)).clamp_(0, 255).to(torch.uint8)
