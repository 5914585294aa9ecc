# mypy: ignore-errors
# (Triton is optional and its kernels are not Python that mypy can read.)
"""Pooling and up-sampling of channels-last maps at the speed of memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

PIXELS = 4  # of the small map a program


@triton.jit
def pool_spread(
    g, base, out, scale, total, w,
    C: tl.constexpr, K: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Each pixel (b, i, j) of g goes to the K × K pixels (b, iK + p, jK + q) of out."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, BLOCK)
    inside = (pixel < total)[:, None] & (channel < C)[None, :]
    value = tl.load(g + pixel[:, None].to(tl.int64) * C + channel[None, :], mask=inside).to(tl.float32) * scale
    row, column = pixel // w, pixel % w  # row counts through the batch: b·h + i
    for p in range(K):
        for q in range(K):
            at = ((row.to(tl.int64) * K + p) * (w * K) + column * K + q)[:, None] * C + channel[None, :]
            wide = value
            if ADD:
                wide += tl.load(base + at, mask=inside).to(tl.float32)
            tl.store(out + at, wide.to(out.dtype.element_ty), mask=inside)


@triton.jit
def pool_gather(
    x, out, scale, total, w,
    C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Each pixel (b, i, j) of out is the sum of the K × K pixels (b, iK + p, jK + q) of x, times `scale`."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, BLOCK)
    inside = (pixel < total)[:, None] & (channel < C)[None, :]
    row, column = pixel // w, pixel % w
    value = tl.zeros((PIXELS, BLOCK), tl.float32)
    for p in range(K):
        for q in range(K):
            at = ((row.to(tl.int64) * K + p) * (w * K) + column * K + q)[:, None] * C + channel[None, :]
            value += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    to = out + pixel[:, None].to(tl.int64) * C + channel[None, :]
    tl.store(to, (value * scale).to(out.dtype.element_ty), mask=inside)


def spread(g: Tensor, factor: int, scale: float, base: Tensor | None = None) -> Tensor:
    """base + scale · every pixel of g, factor × factor times; all stored channels-last."""
    batch, channels, height, width = g.shape
    out = _empty(g, height * factor, width * factor)
    base = None if base is None else base.contiguous(memory_format=torch.channels_last)
    total = batch * height * width
    with torch.cuda.device_of(g):
        pool_spread[(triton.cdiv(total, PIXELS),)](
            g, g if base is None else base, out, scale, total, width,
            channels, factor, base is not None, triton.next_power_of_2(channels), PIXELS,
        )  # fmt: skip
    return out


def gather(x: Tensor, factor: int, scale: float) -> Tensor:
    """`scale` times the sum of every factor × factor square."""
    batch, channels, height, width = x.shape
    out = _empty(x, height // factor, width // factor)
    total = batch * (height // factor) * (width // factor)
    with torch.cuda.device_of(x):
        pool_gather[(triton.cdiv(total, PIXELS),)](
            x, out, scale, total, width // factor, channels, factor, triton.next_power_of_2(channels), PIXELS
        )
    return out


def _empty(like: Tensor, height: int, width: int) -> Tensor:
    shape = (*like.shape[:2], height, width)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)
