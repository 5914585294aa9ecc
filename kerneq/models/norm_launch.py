# mypy: ignore-errors
# (It starts Triton kernels, and Triton is optional: mypy cannot rely on seeing it.)
"""Starting the kernels of the batch norm: tiles, grids, buffers.

Forward passes over the map three times (read; read, write), backward five times (read g, x; read g, x, write
dx), each in three launches. On top come 8 bytes a channel and program for the partial sums.
"""

import contextlib
import dataclasses

import torch
import triton
from torch import Tensor

from . import norm_triton

MERGED = 8  # channels a program merges: a sector of memory for every part


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a kernel is spread over the card."""

    channels: int = 256  # in a tile, at most
    unroll: int = 1  # 16-byte pieces of each map that a thread takes of a tile
    stages: int = 4  # tiles a program has under way
    warps: int = 8  # in a program
    programs: int = 4  # on a multiprocessor, each looping over its share of the tiles


SUMS = Tiling(channels=64, stages=6, programs=2)  # fewer programs and channels: every program adds a part to merge
APPLY = Tiling()


@dataclasses.dataclass(frozen=True)
class Grid:
    """The tiles of one map: unroll × rows pixels, `block` channels."""

    pixels: int
    channels: int
    rows: int  # that a program's threads read at once
    block: int
    programs: int  # along the pixels
    tiling: Tiling

    @property
    def height(self) -> int:
        return self.tiling.unroll * self.rows

    @property
    def tiles(self) -> int:
        return triton.cdiv(self.pixels, self.height)

    @property
    def shape(self) -> tuple[int, int]:
        return self.programs, triton.cdiv(self.channels, self.block)

    @property
    def constants(self) -> tuple[int, int, int, int, bool, int]:
        full = self.pixels % self.height == 0 and self.channels % self.block == 0
        return self.channels, self.tiling.unroll, self.rows, self.block, full, self.tiling.stages


def grid_of(x: Tensor, tiling: Tiling) -> Grid:
    channels = x.shape[1]
    pixels = x.numel() // channels
    cores = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    divisor = channels & -channels  # the largest power of two: tiles without a masked rest, if that is wide enough
    block = min(divisor if divisor >= 32 else triton.next_power_of_2(channels), tiling.channels)
    rows = max(1, 32 * tiling.warps * (16 // x.element_size()) // block)
    tiles, blocks = triton.cdiv(pixels, tiling.unroll * rows), triton.cdiv(channels, block)
    # At most 1024: their sums are merged in the registers of one program.
    programs = min(tiles, max(1, cores * tiling.programs // blocks), 1024)
    return Grid(pixels, channels, rows, block, programs, tiling)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    count: Tensor,
    momentum: float,
    eps: float,
    relu: bool,
    sums: Tiling = SUMS,
    apply: Tiling = APPLY,
) -> tuple[Tensor, Tensor]:
    """The output like x, and the means and inverse standard deviations (2, channels); moves the running ones."""
    grid, wide = grid_of(x, sums), grid_of(x, apply)
    P, C, tiles, G = grid.pixels, grid.channels, grid.tiles, grid.programs
    parts = torch.empty((2, G, C), device=x.device, dtype=torch.float32)
    stats = torch.empty((2, C), device=x.device, dtype=torch.float32)
    y = torch.empty_like(x)
    with _on(x):
        norm_triton.norm_forward_sums[grid.shape](x, parts, P, tiles, *grid.constants, num_warps=sums.warps)
        norm_triton.norm_forward_finish[(1, triton.cdiv(C, MERGED))](
            parts, stats, running_mean, running_var, count, G, tiles, P, momentum, eps,
            C, grid.height, triton.next_power_of_2(G), MERGED, num_warps=8,
        )  # fmt: skip
        norm_triton.norm_forward_apply[wide.shape](
            x, y, stats, weight, bias, P, wide.tiles, *wide.constants, relu, num_warps=apply.warps
        )
    return y, stats


def backward(
    g: Tensor,
    x: Tensor,
    stats: Tensor,
    weight: Tensor,
    bias: Tensor,
    relu: bool,
    sums: Tiling = SUMS,
    apply: Tiling = APPLY,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with respect to x, weight and bias; g lies in memory as x does."""
    grid, wide = grid_of(x, sums), grid_of(x, apply)
    P, C, tiles, G = grid.pixels, grid.channels, grid.tiles, grid.programs
    parts = torch.empty((2, G, C), device=x.device, dtype=torch.float32)
    line = torch.empty((2, C), device=x.device, dtype=torch.float32)
    dx, grad_weight, grad_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
    with _on(x):
        norm_triton.norm_backward_sums[grid.shape](
            g, x, stats, weight, bias, parts, P, tiles, *grid.constants, relu, num_warps=sums.warps
        )
        norm_triton.norm_backward_finish[(1, triton.cdiv(C, MERGED))](
            parts, stats, weight, grad_weight, grad_bias, line, G, P,
            C, triton.next_power_of_2(G), MERGED, num_warps=8,
        )  # fmt: skip
        norm_triton.norm_backward_apply[wide.shape](
            g, x, dx, stats, weight, bias, line, P, wide.tiles, *wide.constants, relu, num_warps=apply.warps
        )
    return dx, grad_weight, grad_bias


def _on(x: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
