"""Batch norm, with or without a ReLU after it, pooling and up-sampling of channels-last maps as Triton programs.

A map is P pixels × C channels, a row a pixel. For a batch norm, a program sums over the tiles i, i + programs, …; a
second kernel merges the sums of all programs; a third walks the tiles from the end, which the level 2 cache still
holds. Forward moves the map three times (read; read, write), backward five times (read g, x; read g, x, write dx).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from .device import processors

MERGED = 8  # channels a program merges: a sector of memory for every part
WARPS = 8  # in a program
PIXELS = 4  # of the small map a program that pools


@triton.jit
def _pixel_tile(tile, P, C, ROWS, B, FULL):
    """ROWS pixels of B channels: where they begin, how far from there each lies, which of them exist."""
    pixel = tl.arange(0, ROWS)[:, None]
    channel = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    inside = (pixel < P - tile * ROWS) & (channel < C)
    if FULL:  # a condition that is not known to be met keeps the compiler from starting the loads together
        inside = tl.full((ROWS, B), True, tl.int1)
    return tl.cast(tile, tl.int64) * (ROWS * C), pixel * C + channel, inside


@triton.jit
def _load_row(pointer, C, B):
    """A value for each of the program's B channels."""
    channel = tl.program_id(1) * B + tl.arange(0, B)
    return tl.load(pointer + channel, mask=channel < C, other=0.0).to(tl.float32)


@triton.jit
def _load_line(stats, weight, bias, C, B):
    """The mean, weight / std and bias of each of the program's channels."""
    return _load_row(stats, C, B), _load_row(stats + C, C, B) * _load_row(weight, C, B), _load_row(bias, C, B)


@triton.jit
def _store_row(row, pointer, C, B):
    channel = tl.program_id(1) * B + tl.arange(0, B)
    tl.store(pointer + channel, row.to(pointer.dtype.element_ty), mask=channel < C)


@triton.jit
def _load_parts(parts, programs, C, G, B):
    """What all programs found for B channels, and 0 where there is no program."""
    program = tl.arange(0, G)[:, None]
    channel = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    return tl.load(parts + program * C + channel, mask=(program < programs) & (channel < C), other=0.0)


@triton.jit
def _pixels(program, programs, tiles, P, ROWS):
    """How many pixels a program passes over: none if there is no such program, fewer if the last tile sticks out."""
    whole = tl.where(program < programs, tl.cdiv(tiles - program, programs) * ROWS, 0)
    return (whole - tl.where((tiles - 1) % programs == program, tiles * ROWS - P, 0)).to(tl.float32)


@triton.jit
def _output(d, scale, bias, dtype):
    """Before the ReLU, rounded as it is stored: backward masks by the very numbers of forward."""
    return tl.fma(d, scale, bias).to(dtype).to(tl.float32)


@triton.jit
def norm_forward_sums(
    x, parts, P, tiles,
    C: tl.constexpr, R: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The mean and Σ (x − mean)² of a program's n pixels, from sums shifted by the first of them, k.

    k being one of the n values, (k − mean)² ≤ Σ (x − mean)²: the difference below loses at most a factor n of
    float32's precision, however large the mean.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    k = _load_row(x + program.to(tl.int64) * (R * C), C, B)
    first, second = tl.zeros((R, B), tl.float32), tl.zeros((R, B), tl.float32)
    for tile in tl.range(program, tiles, programs, num_stages=6):
        begin, at, inside = _pixel_tile(tile, P, C, R, B, FULL)
        d = tl.load(x + begin + at, mask=inside, other=0.0).to(tl.float32) - k
        d = tl.where(inside, d, 0.0)
        first += d
        second = tl.fma(d, d, second)
    n = _pixels(program, programs, tiles, P, R)
    shift = tl.sum(first, 0) / n
    _store_row(k + shift, parts + program * C, C, B)
    _store_row(tl.sum(second, 0) - shift * shift * n, parts + (programs + program) * C, C, B)


@triton.jit
def norm_forward_finish(
    parts, stats, running_mean, running_var, count, programs, tiles, P, momentum, eps,
    C: tl.constexpr, ROWS: tl.constexpr, G: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Merges the means and squares of all programs (Chan et al., 1983), and moves the running statistics."""
    n = _pixels(tl.arange(0, G), programs, tiles, P, ROWS)[:, None]
    means = _load_parts(parts, programs, C, G, B)
    mean = tl.sum(means * (n / P), 0)
    d = means - mean
    squares = tl.sum(_load_parts(parts + programs * C, programs, C, G, B) + n * d * d, 0)
    _store_row(mean, stats, C, B)
    _store_row(tl.div_rn(1.0, tl.sqrt_rn(squares / P + eps)), stats + C, C, B)
    _store_row(_load_row(running_mean, C, B) * (1 - momentum) + mean * momentum, running_mean, C, B)
    _store_row(_load_row(running_var, C, B) * (1 - momentum) + squares / (P - 1) * momentum, running_var, C, B)
    if tl.program_id(1) == 0:
        tl.store(count, tl.load(count) + 1)


@triton.jit
def norm_forward_apply(
    x, y, stats, weight, bias, P, tiles,
    C: tl.constexpr, R: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """y = (x − mean) · weight / std + bias, and its positive part."""
    mean, scale, shift = _load_line(stats, weight, bias, C, B)
    for i in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=4):
        begin, at, inside = _pixel_tile(tiles - 1 - i, P, C, R, B, FULL)
        d = tl.load(x + begin + at, mask=inside, other=0.0).to(tl.float32) - mean
        out = _output(d, scale, shift, y.dtype.element_ty)
        if RELU:
            out = tl.where(out <= 0, 0.0, out)  # not a maximum: that would hide a NaN
        tl.store(y + begin + at, out, mask=inside)


@triton.jit
def _incoming(g, x, at, inside, mean, scale, shift, RELU):
    """The gradient that passes the ReLU, and x − mean."""
    g_value = tl.load(g + at, mask=inside, other=0.0)
    d = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean
    if RELU:
        g_value = tl.where(_output(d, scale, shift, x.dtype.element_ty) <= 0, 0.0, g_value)
    return g_value.to(tl.float32), d


@triton.jit
def norm_backward_sums(
    g, x, stats, weight, bias, parts, P, tiles,
    C: tl.constexpr, R: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g (x − mean) over a program's pixels."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    mean, scale, shift = _load_line(stats, weight, bias, C, B)
    first, second = tl.zeros((R, B), tl.float32), tl.zeros((R, B), tl.float32)
    for tile in tl.range(program, tiles, programs, num_stages=6):
        begin, at, inside = _pixel_tile(tile, P, C, R, B, FULL)
        g_value, d = _incoming(g + begin, x + begin, at, inside, mean, scale, shift, RELU)
        first += g_value
        second = tl.fma(g_value, d, second)
    _store_row(tl.sum(first, 0), parts + program * C, C, B)
    _store_row(tl.sum(second, 0), parts + (programs + program) * C, C, B)


@triton.jit
def norm_backward_finish(
    parts, stats, weight, grad_weight, grad_bias, line, programs, P, C: tl.constexpr, G: tl.constexpr, B: tl.constexpr
):
    """The gradients of weight and bias, and the line (offset, slope) in x − mean that dx has beside g."""
    first = tl.sum(_load_parts(parts, programs, C, G, B), 0)
    inv = _load_row(stats + C, C, B)
    second = tl.sum(_load_parts(parts + programs * C, programs, C, G, B), 0) * inv
    _store_row(first, grad_bias, C, B)
    _store_row(second, grad_weight, C, B)
    scale = inv * _load_row(weight, C, B)
    _store_row(-scale * (first / P), line, C, B)
    _store_row(-scale * inv * (second / P), line + C, C, B)


@triton.jit
def norm_backward_apply(
    g, x, dx, stats, weight, bias, line, P, tiles,
    C: tl.constexpr, R: tl.constexpr, B: tl.constexpr, FULL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """dx = g · weight / std + offset + slope · (x − mean)."""
    mean, scale, shift = _load_line(stats, weight, bias, C, B)
    offset, slope = _load_row(line, C, B), _load_row(line + C, C, B)
    for i in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=4):
        begin, at, inside = _pixel_tile(tiles - 1 - i, P, C, R, B, FULL)
        g_value, d = _incoming(g + begin, x + begin, at, inside, mean, scale, shift, RELU)
        tl.store(dx + begin + at, tl.fma(g_value, scale, tl.fma(d, slope, offset)), mask=inside)


def tiling(x: Tensor, widest: int, programs: int) -> tuple[tuple[int, int], int, tuple[int, ...]]:
    """Tiles of at most `widest` channels, shared by about `programs` programs a multiprocessor.

    The grid (programs along the pixels, blocks of channels), the number of tiles along the pixels, and C, R, B, FULL of
    a program. Few programs and channels for sums, since every program adds a part to merge.
    """
    channels = x.shape[1]
    pixels = x.numel() // channels
    divisor = channels & -channels  # the largest power of two: tiles without a masked rest, if that is wide enough
    block = min(divisor if divisor >= 32 else triton.next_power_of_2(channels), widest)
    rows = max(1, 32 * WARPS * (16 // x.element_size()) // block)  # 16 bytes a thread
    tiles, blocks = triton.cdiv(pixels, rows), triton.cdiv(channels, block)
    shares = max(1, processors(x) * programs // blocks)
    full = pixels % rows == 0 and channels % block == 0
    # At most 1024: their sums are merged in the registers of one program.
    return (min(tiles, shares, 1024), blocks), tiles, (channels, rows, block, full)


def norm_forward(x: Tensor, norm: nn.BatchNorm2d, relu: bool) -> tuple[Tensor, Tensor]:
    """The output like x, and the means and inverse standard deviations (2, channels); moves the running ones."""
    grid, tiles, constants = tiling(x, widest=64, programs=2)
    programs, C, P = grid[0], x.shape[1], x.numel() // x.shape[1]
    parts = x.new_empty((2, programs, C), dtype=torch.float32)
    stats = x.new_empty((2, C), dtype=torch.float32)
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):
        norm_forward_sums[grid](x, parts, P, tiles, *constants, num_warps=WARPS)
        norm_forward_finish[(1, triton.cdiv(C, MERGED))](
            parts, stats, norm.running_mean, norm.running_var, norm.num_batches_tracked, programs, tiles, P,
            norm.momentum, norm.eps, *constants[:2], triton.next_power_of_2(programs), MERGED, num_warps=WARPS,
        )  # fmt: skip
        grid, tiles, constants = tiling(x, widest=256, programs=4)
        norm_forward_apply[grid](x, y, stats, norm.weight, norm.bias, P, tiles, *constants, relu, num_warps=WARPS)
    return y, stats


def norm_backward(
    g: Tensor, x: Tensor, stats: Tensor, weight: Tensor, bias: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with respect to x, weight and bias; g lies in memory as x does."""
    grid, tiles, constants = tiling(x, widest=64, programs=2)
    programs, C, P = grid[0], x.shape[1], x.numel() // x.shape[1]
    parts = x.new_empty((2, programs, C), dtype=torch.float32)
    line = x.new_empty((2, C), dtype=torch.float32)
    dx, grad_weight, grad_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
    with torch.cuda.device_of(x):
        norm_backward_sums[grid](g, x, stats, weight, bias, parts, P, tiles, *constants, relu, num_warps=WARPS)
        norm_backward_finish[(1, triton.cdiv(C, MERGED))](
            parts, stats, weight, grad_weight, grad_bias, line, programs, P,
            C, triton.next_power_of_2(programs), MERGED, num_warps=WARPS,
        )  # fmt: skip
        grid, tiles, constants = tiling(x, widest=256, programs=4)
        norm_backward_apply[grid](g, x, dx, stats, weight, bias, line, P, tiles, *constants, relu, num_warps=WARPS)
    return dx, grad_weight, grad_bias


@triton.jit
def pool_spread(
    g, base, out, scale, total, w,
    C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr,
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
            if base is not None:
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


def spread_pixels(g: Tensor, factor: int, scale: float, base: Tensor | None = None) -> Tensor:
    """base + scale · every pixel of g, factor × factor times; all stored channels-last."""
    batch, channels, height, width = g.shape
    out = _empty(g, height * factor, width * factor)
    base = None if base is None else base.contiguous(memory_format=torch.channels_last)
    total = batch * height * width
    with torch.cuda.device_of(g):
        pool_spread[(triton.cdiv(total, PIXELS),)](
            g, base, out, scale, total, width, channels, factor, triton.next_power_of_2(channels), PIXELS
        )
    return out


def gather_pixels(x: Tensor, factor: int, scale: float) -> Tensor:
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
