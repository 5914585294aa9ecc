"""The adjoint of a convolution with what follows it done before the result reaches memory, on CUDA.

σ after Wᵀ costs a third of the convolution when it is a pass of its own: a state has several times as many numbers as
the features. cuDNN has ReLU built in; the mask of the backward pass is ours (`adjoint_triton`).
"""

import importlib.util

import torch
from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_HALF = (torch.bfloat16, torch.float16)


def cudnn_fuses(v: Tensor, weight: Tensor) -> bool:
    if not v.is_cuda or torch.version.cuda is None or torch.compiler.is_compiling():  # a compiler fuses by itself
        return False
    differentiable = torch.is_grad_enabled() and (v.requires_grad or weight.requires_grad)
    return v.dtype in (*_HALF, torch.float32) and v.dtype == weight.dtype and not differentiable


def relu(v: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
    """max(weight ∗ v + shift, 0), zero-padded to the size of the picture."""
    geometry: tuple[list[int], list[int], list[int], int] = ([1, 1], [s // 2 for s in weight.shape[2:]], [1, 1], 1)
    if shift is None:
        return torch.ops.aten.cudnn_convolution_relu(v, weight, None, *geometry)
    return torch.ops.aten.cudnn_convolution_add_relu(v, weight, shift, 1.0, None, *geometry)


def triton_fuses(v: Tensor, weight: Tensor) -> bool:
    if not (v.is_cuda and _HAS_TRITON and v.dtype in _HALF and v.dtype == weight.dtype):
        return False
    from . import adjoint_triton

    return adjoint_triton.fits(v, weight)


def masked(v: Tensor, weight: Tensor, z: Tensor, g: Tensor | None, sign: int) -> Tensor:
    """g ± Wᵀv where z > 0, else 0; `weight` is that of W."""
    from . import adjoint_triton

    return adjoint_triton.masked_adjoint(v, weight, z, g, sign)
