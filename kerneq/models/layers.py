"""The layers around an equilibrium: convolutions, batch norm with a ReLU, pooling and up-sampling of pictures.

Pictures are (batch, channels, height, width). Where they are stored channels-last on a GPU, each layer takes fewer
passes over memory than PyTorch's.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..fused.device import pull_back, runs_triton
from ..tensors import is_channels_last, is_transformed, needs_graph


@final
class BatchNorm(nn.BatchNorm2d):
    """nn.BatchNorm2d, and nn.ReLU after it if `relu`; parameters and buffers are those of nn.BatchNorm2d."""

    def __init__(self, channels: int, relu: bool = False):
        super().__init__(channels)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        if self._is_fused(x):
            fused: Tensor = _Norm.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
            return fused
        y = super().forward(x)
        return y.relu_() if self.relu else y

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
        """Return the batch norm of training by plain operations, which have every derivative; keep no statistics."""
        y = F.batch_norm(x, None, None, weight, bias, training=True, eps=self.eps)
        return (y.relu() if self.relu else y,)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, relu={self.relu}"  # type: ignore[no-untyped-call]

    def _is_fused(self, x: Tensor) -> bool:
        return (
            self.training
            and _has_programs(x)
            and x.shape[1] == self.num_features
            and x.numel() > self.num_features  # of a single value PyTorch raises its own error
            and self.momentum is not None  # None means the mean over all batches, which is a number on the host
        )


class _Norm(torch.autograd.Function):
    """Save x and two numbers a channel; backward computes the mask of the ReLU again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: BatchNorm) -> Tensor:
        from ..fused.layers_triton import norm_forward

        y, stats = norm_forward(x, norm, norm.relu)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        from ..fused.layers_triton import norm_backward

        x, weight, bias, stats = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted, which only plain operations have
            return *pull_back(ctx.norm.plain, (x, weight, bias), (g,)), None
        g = g.contiguous(memory_format=torch.channels_last)
        return *norm_backward(g, x, stats, weight, bias, ctx.norm.relu), None


def conv_batch_norm(inputs: int, outputs: int, size: int = 3, stride: int = 1, relu: bool = False) -> nn.Sequential:
    """Return a convolution that keeps the size of the picture (or divides it by `stride`), batch norm, and a ReLU."""
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, BatchNorm(outputs, relu=relu))


@final
class Refinement(nn.Module):
    """x + F(x), or its ReLU; F: 1×1, 3×3, 1×1 convolutions through a quarter of the channels, 0 at the start."""

    def __init__(self, width: int, rectified: bool):
        super().__init__()
        self.rectified = rectified
        inner = width // 4
        self.reduce = conv_batch_norm(width, inner, 1, relu=True)
        self.mix = conv_batch_norm(inner, inner, relu=True)
        self.expand = conv_batch_norm(inner, width, 1)
        nn.init.zeros_(self.expand[-1].get_parameter("weight"))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.expand(self.mix(self.reduce(x)))
        return torch.relu(y) if self.rectified else y


def synchronise_norms(model: nn.Module) -> nn.Module:
    """Return the model with nn.SyncBatchNorm for every batch norm; PyTorch's own conversion would lose the ReLUs."""
    rectified = [name for name, part in model.named_modules() if isinstance(part, BatchNorm) and part.relu]
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    for name in rectified:
        model.get_submodule(name).register_forward_hook(_rectify)
    return model


def _rectify(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return y.relu_()


def pool(x: Tensor, factor: int) -> Tensor:
    """Return the mean of every factor × factor square of pixels: height and width / factor."""
    return pyramid(x, (factor,))[factor]


def unpool(x: Tensor, factor: int) -> Tensor:
    """Return every pixel factor × factor times: nearest up-sampling."""
    spread: Tensor = _repeat(x, factor, 1) if is_transformed() else _Unpool.apply(x, factor)  # type: ignore[no-untyped-call]
    return spread


def pyramid(x: Tensor, scales: Sequence[int]) -> dict[int, Tensor]:
    """Return x at every scale, each pooled from the coarsest scale that divides it."""
    levels = sorted({1, *scales})
    parents = [max(finer for finer in levels if finer < level and level % finer == 0) for level in levels[1:]]
    steps = tuple((levels.index(p), level // p) for p, level in zip(parents, levels[1:], strict=True))
    made = _levels(x, steps) if is_transformed() else _Pyramid.apply(x, steps)  # type: ignore[no-untyped-call]
    return dict(zip(levels, made, strict=True))


def _levels(x: Tensor, steps: tuple[tuple[int, int], ...]) -> tuple[Tensor, ...]:
    """Return x and one level for each step (parent, factor), pooled from the level `parent`."""
    levels = [x.view_as(x)]
    for parent, factor in steps:
        levels.append(_mean(levels[parent], factor, 1))
    return tuple(levels)


def _mean(x: Tensor, factor: int, scale: float) -> Tensor:
    """Return `scale` times the mean of every square."""
    if _has_programs(x) and not needs_graph(x):
        from ..fused.layers_triton import gather_pixels

        return gather_pixels(x, factor, scale / factor**2)
    mean = F.avg_pool2d(x, factor)
    return mean if scale == 1 else mean * scale


def _repeat(g: Tensor, factor: int, scale: float, base: Tensor | None = None) -> Tensor:
    """Return base + scale · every pixel of g, factor × factor times."""
    if _has_programs(g) and not needs_graph(g) and (base is None or not needs_graph(base)):
        from ..fused.layers_triton import spread_pixels

        return spread_pixels(g, factor, scale, base)
    wide = F.interpolate(g if scale == 1 else g * scale, scale_factor=factor)
    return wide if base is None else base + wide


def _has_programs(x: Tensor) -> bool:
    """Whether the Triton programs of `fused.layers_triton` may work on the picture."""
    return x.is_cuda and runs_triton(x) and is_channels_last(x)


class _Unpool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return _repeat(x, factor, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _mean(g, ctx.factor, ctx.factor**2), None


class _Pyramid(torch.autograd.Function):
    """All levels in one node, so that backward adds up their gradients in one pass a level."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: tuple[tuple[int, int], ...]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a level that is not used costs nothing
        ctx.steps = steps
        return _levels(x, steps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        totals = list(gradients)
        for level, (parent, factor) in reversed(list(enumerate(ctx.steps, start=1))):
            gradient = totals[level]
            if gradient is not None:
                totals[parent] = _repeat(gradient, factor, factor**-2, totals[parent])
        return totals[0], None
