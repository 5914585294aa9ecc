"""Batch norm with an optional ReLU after it: one pass for both where channels-last maps are trained on CUDA."""

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tensors import is_channels_last
from .device import differentiable, runs_triton


@final
class BatchNorm(nn.BatchNorm2d):
    """nn.BatchNorm2d, and nn.ReLU after it if `relu`; with the parameters and buffers of nn.BatchNorm2d."""

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
        """The batch norm of training in plain operations, which have every derivative; no statistics are kept."""
        y = F.batch_norm(x, None, None, weight, bias, training=True, eps=self.eps)
        return (y.relu() if self.relu else y,)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, relu={self.relu}"  # type: ignore[no-untyped-call]

    def _is_fused(self, x: Tensor) -> bool:
        return (
            self.training
            and runs_triton(x)
            and is_channels_last(x)
            and x.shape[1] == self.num_features
            and x.numel() > self.num_features  # of a single value PyTorch says what is wrong
            and self.track_running_stats
            and self.momentum is not None  # None means the mean over all batches, which is a number on the host
        )


class _Norm(torch.autograd.Function):
    """Keeps x and two numbers a channel: backward finds again what the ReLU let through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: BatchNorm) -> Tensor:
        from .norm_triton import forward

        y, stats = forward(x, norm)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        from .norm_triton import backward

        x, weight, bias, stats = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is coming: plain operations, which have one
            return *differentiable(ctx.norm.plain, (x, weight, bias), (g,)), None
        g = g.contiguous(memory_format=torch.channels_last)
        return *backward(g, x, stats, weight, bias, ctx.norm.relu), None


def synchronised(model: nn.Module) -> nn.Module:
    """The model with nn.SyncBatchNorm for every batch norm, keeping the ReLUs, of which PyTorch's own
    conversion knows nothing."""
    rectified = [name for name, part in model.named_modules() if isinstance(part, BatchNorm) and part.relu]
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    for name in rectified:
        model.get_submodule(name).register_forward_hook(_rectify)
    return model


def _rectify(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return y.relu_()
