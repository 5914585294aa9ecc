# mypy: ignore-errors
# (Triton is optional and its kernels are not Python that mypy can read.)
"""Nearest up-sampling of channels-last maps at the speed of memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS = 4  # of the small map a program


@triton.jit
def _spread(g, out, total, h, w, C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr):
    """Each pixel (b, i, j) of g goes to the K × K pixels (b, iK + p, jK + q) of out."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, BLOCK)
    inside = (pixel < total)[:, None] & (channel < C)[None, :]
    value = tl.load(g + pixel[:, None].to(tl.int64) * C + channel[None, :], mask=inside)
    row, column = pixel // w, pixel % w  # row counts through the batch: b·h + i
    for p in range(K):
        for q in range(K):
            target = (row.to(tl.int64) * K + p) * (w * K) + column * K + q
            tl.store(out + target[:, None] * C + channel[None, :], value, mask=inside)


def spread(g: Tensor, factor: int) -> Tensor:
    """Every pixel of g, stored channels-last, factor × factor times."""
    batch, channels, height, width = g.shape
    shape = (batch, channels, height * factor, width * factor)
    out = torch.empty(shape, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
    total = batch * height * width
    block = triton.next_power_of_2(channels)
    _spread[(triton.cdiv(total, PIXELS),)](g, out, total, height, width, channels, factor, block, PIXELS)
    return out
