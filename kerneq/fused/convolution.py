"""Convolutions with what follows them, in one pass over memory: which cases a GPU takes, and by which program.

σ after Wᵀ costs a third of the convolution when it is a pass of its own. cuDNN has ReLU built in; sums and the mask of
the backward pass are ours (`convolution_triton`).
"""

import torch
from torch import Tensor

from ..tensors import needs_graph
from .device import HALF, capability, runs_triton


def convolve(
    x: Tensor, weight: Tensor, *, adjoint: bool = False, add: Tensor | None = None, mask: Tensor | None = None
) -> Tensor | None:
    """Return add + Wx or add + Wᵀx, zero where `mask` is not positive, without a graph; None where no program fits."""
    if not _may_fuse(x, weight) or not runs_triton(x, HALF):
        return None
    from .convolution_triton import fits, product

    return product(x, weight, adjoint, add, mask) if fits(x, weight, adjoint) else None


def fuses_relu(v: Tensor, weight: Tensor, shift: Tensor | None) -> bool:
    """Whether cuDNN computes max(Wᵀv + shift, 0) in one pass, and nothing has to be differentiated."""
    if not _may_fuse(v, weight) or not torch.backends.cudnn.enabled or (shift is not None and needs_graph(shift)):
        return False
    return v.dtype in (torch.float32, torch.float16) or (v.dtype == torch.bfloat16 and capability(v) >= (8, 0))


def convolve_relu(x: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
    """Return max(Wx + shift, 0) for a convolution that keeps the size of the picture, by cuDNN.

    A shift that is one number a channel, expanded, is cuDNN's bias: nothing of the size of a picture is read for it.
    """
    geometry = [1, 1], [weight.shape[-1] // 2] * 2, [1, 1], 1  # stride, padding, dilation, groups
    if shift is None or 0 in shift.stride():
        bias = None if shift is None else shift[0, :, 0, 0]
        return torch.ops.aten.cudnn_convolution_relu(x, weight, bias, *geometry)
    return torch.ops.aten.cudnn_convolution_add_relu(x, weight, shift, 1.0, None, *geometry)


def _may_fuse(x: Tensor, weight: Tensor) -> bool:
    """Whether these are pictures on an NVIDIA card, in one dtype, with nothing to differentiate and no compiler that
    would fuse."""
    if torch.compiler.is_compiling() or x.dtype != weight.dtype or weight.dim() != 4:
        return False
    return capability(x) > (0, 0) and not needs_graph(x, weight)
