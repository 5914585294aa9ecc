"""Products with W or Wᵀ, and what follows them done before the result reaches memory, on CUDA.

σ after Wᵀ costs a third of the convolution when it is a pass of its own: a state has several times as many numbers as
the features. cuDNN has ReLU built in; sums and the mask of the backward pass are ours (`fused_triton`).
"""

import torch
from torch import Tensor

from ..cards import capability, runs_triton

_HALF = (torch.bfloat16, torch.float16)


def cudnn_fuses(v: Tensor, weight: Tensor) -> bool:
    if not _plain(v, weight) or not torch.backends.cudnn.enabled:
        return False
    return v.dtype in (torch.float32, torch.float16) or (v.dtype == torch.bfloat16 and capability(v) >= (8, 0))


def relu(v: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
    """max(weight ∗ v + shift, 0), zero-padded to the size of the picture."""
    geometry: tuple[list[int], list[int], list[int], int] = ([1, 1], [s // 2 for s in weight.shape[2:]], [1, 1], 1)
    if shift is None:
        return torch.ops.aten.cudnn_convolution_relu(v, weight, None, *geometry)
    return torch.ops.aten.cudnn_convolution_add_relu(v, weight, shift, 1.0, None, *geometry)


def triton_fuses(x: Tensor, weight: Tensor, adjoint: bool) -> bool:
    if not (_plain(x, weight) and x.dtype in _HALF and runs_triton(x)):
        return False
    from . import fused_triton

    return fused_triton.fits(x, weight, adjoint)


def product(
    x: Tensor,
    weight: Tensor,
    *,
    adjoint: bool,
    add: Tensor | None = None,
    sign: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """add ± Wx, or with `adjoint` add ± Wᵀx; zero where `mask` is not positive."""
    from . import fused_triton

    return fused_triton.product(x, weight, adjoint, add, sign, mask)


def _plain(x: Tensor, weight: Tensor) -> bool:
    """On CUDA, nothing to differentiate, no compiler that would fuse by itself."""
    if not x.is_cuda or torch.version.cuda is None or torch.compiler.is_compiling() or x.dtype != weight.dtype:
        return False
    return not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
