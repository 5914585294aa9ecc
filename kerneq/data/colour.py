"""Changing colours as Pillow's ImageEnhance and ImageOps do, on batches of unsigned bytes.

Most operations map each level 0 … 255 of a channel to another, so they are a table (batch, channels, 256)
and one gather. Results are those of Pillow to the bit (autocontrast: to one level), whatever the device.
`amount` is float32 (batch, 1, 1, 1).
"""

import torch
from torch import Tensor


def brightness(pixels: Tensor, amount: Tensor) -> Tensor:
    """Away from black by the factor `amount`."""
    return look_up(pixels, _blend(torch.zeros_like(amount[:, 0]), _levels(pixels), amount[:, 0]))


def contrast(pixels: Tensor, amount: Tensor) -> Tensor:
    """Away from the picture's mean grey by the factor `amount`."""
    total = grey(pixels).sum(dim=(2, 3), dtype=torch.int64)[:, :, None]
    count = pixels[0, 0].numel()
    mean = (2 * total + count) // (2 * count)  # rounded, halves up
    return look_up(pixels, _blend(mean, _levels(pixels), amount[:, 0]))


def posterize(pixels: Tensor, amount: Tensor) -> Tensor:
    """Keep the `amount` highest bits of every level."""
    return pixels & (256 - torch.exp2(8 - amount)).to(torch.uint8)


def solarize(pixels: Tensor, amount: Tensor) -> Tensor:
    """Invert the levels from `amount` up."""
    return torch.where(pixels < amount, pixels, 255 - pixels)


def autocontrast(pixels: Tensor, amount: Tensor) -> Tensor:
    """Stretch each channel to 0 … 255; `amount` is unused.

    Floor of the exact quotient, where Pillow truncates a rounded one: at most one level apart."""
    low, high = (edge.flatten(2).to(torch.int32) for edge in (_least(pixels), _most(pixels)))
    table = (_levels(pixels) - low) * 255 // (high - low).clamp(min=1)
    return look_up(pixels, torch.where(high > low, table, _levels(pixels)).clamp(0, 255).to(torch.uint8))


def equalize(pixels: Tensor, amount: Tensor) -> Tensor:
    """Level the histogram of each channel; `amount` is unused."""
    flat = pixels.flatten(2).long()
    ones = torch.ones((), dtype=torch.int32, device=pixels.device).expand(flat.shape)
    counts = torch.zeros((*flat.shape[:2], 256), dtype=torch.int32, device=pixels.device)
    counts.scatter_add_(2, flat, ones)
    brightest = counts.gather(2, _most(pixels).flatten(2).long())
    step = (flat.shape[2] - brightest) // 255
    below = counts.cumsum(2) - counts
    table = (step // 2 + below) // step.clamp(min=1)
    return look_up(pixels, torch.where(step > 0, table, _levels(pixels)).clamp(max=255).to(torch.uint8))


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
    red, green, blue = (pixels[:, i : i + 1].to(torch.int32) for i in range(3))
    return (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16


def look_up(pixels: Tensor, table: Tensor) -> Tensor:
    """table[b, c, pixels[b, c, i, j]]; the table is (batch, channels or 1, 256)."""
    batch, channels = pixels.shape[:2]
    return table.expand(batch, channels, 256).gather(2, pixels.flatten(2).long()).view_as(pixels)


def _blend(start: Tensor, end: Tensor, amount: Tensor) -> Tensor:
    """start + amount (end − start), cut to a whole level."""
    return (start + amount * (end.to(amount.dtype) - start)).clamp_(0, 255).to(torch.uint8)


def _levels(pixels: Tensor) -> Tensor:
    return torch.arange(256, dtype=torch.int32, device=pixels.device)


def _least(pixels: Tensor) -> Tensor:
    return pixels.amin(dim=(2, 3), keepdim=True)


def _most(pixels: Tensor) -> Tensor:
    return pixels.amax(dim=(2, 3), keepdim=True)
