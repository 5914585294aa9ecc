"""How far a point is from an equilibrium: the one definition of the residual."""

from typing import Protocol

import torch
from torch import Tensor

from ..tensors import is_channels_last, per_sample_norm
from .device import runs_triton


class PointAndImage(Protocol):
    """What one evaluation of f tells: z, f(z) and f(z) − z, (batch, ...) each."""

    @property
    def z(self) -> Tensor: ...
    @property
    def image(self) -> Tensor: ...
    @property
    def gap(self) -> Tensor: ...


def relative_residual(at: PointAndImage) -> tuple[Tensor, Tensor]:
    """‖f(z) − z‖ / ‖f(z)‖ and ‖f(z) − z‖ of each sample, (batch,), in float32 at least."""
    if runs_triton(at.image) and _alike(at.z, at.image):
        from .residual_triton import residual_and_gap

        return residual_and_gap(at.z, at.image)
    gap, size = per_sample_norm(at.gap), per_sample_norm(at.image)
    limits = torch.finfo(size.dtype)
    size = torch.maximum(size, limits.eps * gap)  # f(z) = 0 at z ≠ 0 is far away, but nothing infinite
    return gap / size.clamp_min(limits.tiny), gap


def _alike(z: Tensor, image: Tensor) -> bool:
    """Both stored alike and without holes, so that a sample is one run of numbers."""
    dense = image.is_contiguous() or is_channels_last(image)
    return dense and z.stride() == image.stride() and z.dtype == image.dtype
