"""Average pooling and its inverse for channels-last maps, cheap to differentiate, which PyTorch's on a GPU are not."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tensors import is_channels_last
from .device import needs_graph, runs_triton


def pool(x: Tensor, factor: int) -> Tensor:
    """The mean of every factor × factor square of pixels: (batch, channels, height, width), each side / factor."""
    _, pooled = _Pyramid.apply(x, ((0, factor),))  # type: ignore[no-untyped-call]
    return pooled  # type: ignore[no-any-return]


def unpool(x: Tensor, factor: int) -> Tensor:
    """Every pixel factor × factor times: nearest up-sampling."""
    spread: Tensor = _Unpool.apply(x, factor)  # type: ignore[no-untyped-call]
    return spread


def pyramid(x: Tensor, scales: Sequence[int]) -> dict[int, Tensor]:
    """x at every scale, each pooled from the coarsest before it that it is a multiple of."""
    levels = sorted({1, *scales})
    parents = [max(finer for finer in levels if finer < level and level % finer == 0) for level in levels[1:]]
    steps = tuple((levels.index(p), level // p) for p, level in zip(parents, levels[1:], strict=True))
    return dict(zip(levels, _Pyramid.apply(x, steps), strict=True))  # type: ignore[no-untyped-call]


def _mean(x: Tensor, factor: int, scale: float) -> Tensor:
    """`scale` times the mean of every square."""
    if _fused(x):
        from .pool_triton import gather

        return gather(x, factor, scale / factor**2)
    batch, channels, height, width = x.shape
    tiles = x.permute(0, 2, 3, 1).reshape(batch, height // factor, factor, width // factor, factor, channels)
    mean = tiles.mean((2, 4)).permute(0, 3, 1, 2)
    return mean if scale == 1 else mean * scale


def _spread(g: Tensor, factor: int, scale: float, base: Tensor | None = None) -> Tensor:
    """base + scale · every pixel of g, factor × factor times."""
    if _fused(g):
        from .pool_triton import spread

        return spread(g, factor, scale, base)
    wide = F.interpolate(g if scale == 1 else g * scale, scale_factor=factor)
    return wide if base is None else base + wide


def _fused(x: Tensor) -> bool:
    return runs_triton(x) and is_channels_last(x) and not needs_graph(x)


class _Unpool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return _spread(x, factor, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _mean(g, ctx.factor, ctx.factor**2), None


class _Pyramid(torch.autograd.Function):
    """All levels at once, x the first, so that their gradients are added up on the way: one pass a level.

    A step (parent, factor) pools the next level from one before it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: tuple[tuple[int, int], ...]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a level that nothing was made of costs nothing
        ctx.steps = steps
        levels = [x.view_as(x)]
        for parent, factor in steps:
            levels.append(_mean(levels[parent], factor, 1))
        return tuple(levels)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        totals = list(gradients)
        for level, (parent, factor) in reversed(list(enumerate(ctx.steps, start=1))):
            gradient = totals[level]
            if gradient is not None:
                totals[parent] = _spread(gradient, factor, factor**-2, totals[parent])
        return totals[0], None
