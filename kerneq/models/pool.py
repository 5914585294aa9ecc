"""Average pooling of channels-last maps, cheap to differentiate, which avg_pool2d on a GPU is not."""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def pool(x: Tensor, factor: int) -> Tensor:
    """The mean of every factor × factor square of pixels."""
    pooled: Tensor = _Pool.apply(x, factor)  # type: ignore[no-untyped-call]
    return pooled


class _Pool(torch.autograd.Function):
    """A mean over a view forward, a copy to every pixel of the square backward: each one pass over the larger map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        batch, channels, height, width = x.shape
        tiles = x.permute(0, 2, 3, 1).reshape(batch, height // factor, factor, width // factor, factor, channels)
        return tiles.mean((2, 4)).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        g = g / ctx.factor**2
        if g.is_cuda and _HAS_TRITON and not torch.is_grad_enabled():
            from .pool_triton import spread

            return spread(g.contiguous(memory_format=torch.channels_last), ctx.factor), None
        return F.interpolate(g, scale_factor=ctx.factor), None
