"""The last few images and gaps of each sample, their Gram matrix, and the mixture of images with the least gap."""

import dataclasses
from typing import Self

import torch
from torch import Tensor

from .base import working_dtype


def flat(z: Tensor) -> Tensor:
    """(batch, numbers): a view, whether z is stored channels-last or not."""
    if z.dim() == 4 and z.is_contiguous(memory_format=torch.channels_last):
        z = z.permute(0, 2, 3, 1)
    return z.reshape(len(z), -1)


def unflat(numbers: Tensor, like: Tensor) -> Tensor:
    """The inverse of `flat`, in the layout of `like`."""
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        batch, channels, height, width = like.shape
        return numbers.view(batch, height, width, channels).permute(0, 3, 1, 2)
    return numbers.view(like.shape)


def inner(many: Tensor, one: Tensor) -> Tensor:
    """⟨manyⱼ, one⟩ per sample, (batch, m); half precision is summed in float32."""
    if many.dtype in (torch.float32, torch.float64):
        return torch.bmm(many, one.unsqueeze(2)).squeeze(2)
    return (many * one.unsqueeze(1)).sum(2, dtype=torch.float32)


def solve_positive(A: Tensor, b: Tensor) -> Tensor:
    """A⁻¹b for small positive definite A (batch, m, m), by elimination without pivoting.

    Plain operations, where the libraries' batched solvers wait for the device or cannot be in a CUDA graph.
    """
    A, x, size = A.clone(), b.clone(), A.shape[1]
    for k in range(size - 1):
        factor = A[:, k + 1 :, k] / A[:, k, k, None]
        A[:, k + 1 :, k + 1 :] -= factor.unsqueeze(2) * A[:, k, None, k + 1 :]
        x[:, k + 1 :] -= factor * x[:, k, None]
    for k in reversed(range(size)):
        x[:, k] = (x[:, k] - (A[:, k, k + 1 :] * x[:, k + 1 :]).sum(1)) / A[:, k, k]
    return x


@dataclasses.dataclass(frozen=True)
class History:
    """Ring buffers of m entries a sample. A new entry costs one row of the Gram matrix, not the whole of it.

    The buffers are written in place: a solve owns its history.
    """

    images: Tensor  # (batch, m, numbers)
    gaps: Tensor  # (batch, m, numbers)
    gram: Tensor  # (batch, m, m): ⟨gapᵢ, gapⱼ⟩, float32 at least
    valid: Tensor  # (batch, m): the entries that count
    pushed: int = 0

    @classmethod
    def empty(cls, z: Tensor, memory: int) -> Self:
        batch, numbers = len(z), z[0].numel()
        return cls(
            z.new_empty(batch, memory, numbers),
            z.new_zeros(batch, memory, numbers),
            z.new_zeros(batch, memory, memory, dtype=working_dtype(z.dtype)),
            torch.zeros(batch, memory, dtype=torch.bool, device=z.device),
        )

    def forget(self, samples: Tensor) -> None:
        """Drop every entry of the samples where the mask holds."""
        self.valid.logical_and_(~samples.unsqueeze(1))

    def push(self, image: Tensor, gap: Tensor, samples: Tensor | None = None) -> Self:
        """Enter (image, gap) in place of the oldest entry; it counts for the masked samples only."""
        slot, gap = self.pushed % self.valid.shape[1], flat(gap)
        self.images[:, slot] = flat(image)
        self.gaps[:, slot] = gap
        filled = min(self.pushed + 1, self.valid.shape[1])  # slots never written need no product
        row = inner(self.gaps[:, :filled], gap)
        self.gram[:, slot, :filled] = row
        self.gram[:, :filled, slot] = row
        self.valid[:, slot] = True if samples is None else samples
        return dataclasses.replace(self, pushed=self.pushed + 1)

    def weights(self, ridge: float) -> Tensor:
        """α minimising ‖Σ αⱼ gapⱼ‖² with Σ αⱼ = 1, (batch, m).

        Solved on the Gram matrix of unit gaps, plus a ridge relative to it: entries of very different size do not
        spoil its condition, and a sample that is already exact (a zero gap) takes that entry alone.
        """
        eps = torch.finfo(self.gram.dtype).eps
        count = self.valid.shape[1]
        size = self.gram.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
        size = torch.where(self.valid, size, torch.inf).clamp_min(torch.finfo(size.dtype).tiny ** 0.5)
        inverse = torch.where(self.valid, size.amin(1, keepdim=True) / size, 0.0)
        unit = self.gram / (size.unsqueeze(1) * size.unsqueeze(2))
        eye = torch.eye(count, dtype=unit.dtype, device=unit.device)
        both = self.valid.unsqueeze(1) & self.valid.unsqueeze(2)
        unit = torch.where(both & unit.isfinite(), unit, 0.0) * (1 - eye) + eye * (1 + max(ridge, 8 * count * eps))
        y = solve_positive(unit, inverse) * inverse
        alpha = y / y.sum(1, keepdim=True)
        newest = torch.zeros_like(alpha)
        newest[:, (self.pushed - 1) % count] = 1
        return torch.where(alpha.isfinite().all(1, keepdim=True), alpha, newest)

    def mix(self, alpha: Tensor, like: Tensor) -> Tensor:
        """Σ αⱼ imageⱼ, in the shape of `like`."""
        filled = min(self.pushed, self.valid.shape[1])
        alpha = alpha[:, None, :filled].to(self.images.dtype)
        return unflat(torch.bmm(alpha, self.images[:, :filled]).squeeze(1), like)
