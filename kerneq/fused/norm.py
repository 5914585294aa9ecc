"""Batch norm with an optional ReLU after it: one pass for both where channels-last maps are trained on CUDA."""

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tensors import is_channels_last
from .device import runs_triton


@final
class BatchNorm(nn.BatchNorm2d):
    """nn.BatchNorm2d, and nn.ReLU after it if `relu`; with the parameters and buffers of nn.BatchNorm2d."""

    def __init__(self, channels: int, relu: bool = False):
        super().__init__(channels)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        if self._is_fused(x):
            state = (self.running_mean, self.running_var, self.num_batches_tracked, self.momentum, self.eps)
            fused: Tensor = _Norm.apply(x, self.weight, self.bias, *state, self.relu)  # type: ignore[no-untyped-call]
            return fused
        y = super().forward(x)
        return y.relu_() if self.relu else y

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
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, count: Tensor,
        momentum: float, eps: float, relu: bool,
    ) -> Tensor:  # fmt: skip
        from . import norm_triton

        y, stats = norm_triton.forward(x, weight, bias, running_mean, running_var, count, momentum, eps, relu)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.eps, ctx.relu = eps, relu
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        from . import norm_triton

        x, weight, bias, stats = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is coming: plain operations, which have one
            grads = differentiable(g, (x, weight, bias), ctx.eps, ctx.relu)
        else:
            g = g.contiguous(memory_format=torch.channels_last)
            grads = norm_triton.backward(g, x, stats, weight, bias, ctx.relu)
        return *grads, None, None, None, None, None, None


def differentiable(g: Tensor, inputs: tuple[Tensor, Tensor, Tensor], eps: float, relu: bool) -> tuple[Tensor, ...]:
    """The gradients with respect to x, weight and bias, with a graph of their own."""
    x, weight, bias = (t if t.requires_grad else t.detach().requires_grad_() for t in inputs)
    y = F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    return torch.autograd.grad(y.relu() if relu else y, (x, weight, bias), g, create_graph=True)


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
