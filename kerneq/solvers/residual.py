"""How far a point is from an equilibrium: the one definition."""

import torch
from torch import Tensor

from ..cards import runs_triton
from ..equation import Evaluation
from ..solution import per_sample_norm

_FUSED = (torch.bfloat16, torch.float16, torch.float32)


def relative_residual(at: Evaluation) -> tuple[Tensor, Tensor]:
    """‖f(z) − z‖ / ‖f(z)‖ and ‖f(z) − z‖ of each sample."""
    if runs_triton(at.image) and at.image.dtype in _FUSED and _alike(at.z, at.image):
        from .residual_triton import residual_and_gap

        return residual_and_gap(at.z, at.image)
    gap, size = per_sample_norm(at.gap), per_sample_norm(at.image)
    limits = torch.finfo(size.dtype)
    size = torch.maximum(size, limits.eps * gap)  # f(z) = 0 at z ≠ 0 is far away, but nothing infinite
    return gap / size.clamp_min(limits.tiny), gap


def _alike(z: Tensor, image: Tensor) -> bool:
    """Both stored alike and without holes, so that a sample is one run of numbers."""
    dense = image.is_contiguous() or (image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last))
    return dense and z.stride() == image.stride() and z.dtype == image.dtype
