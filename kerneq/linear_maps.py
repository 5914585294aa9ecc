"""Linear maps W from state to features, fixed for one solve: a matrix, or a zero-padded convolution."""

import abc
import dataclasses
import functools
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from .fused.convolution import convolve, convolve_relu, fuses_relu


@dataclasses.dataclass(frozen=True)
class AbstractLinearMap(abc.ABC):
    """W, with its weight; v = Wz.

    `added` and `adjoint_masked` make no graph; the other products are differentiated like plain operations.
    """

    weight: Tensor

    @abc.abstractmethod
    def __call__(self, z: Tensor) -> Tensor:
        """Return Wz."""

    @abc.abstractmethod
    def adjoint(self, v: Tensor) -> Tensor:
        """Return Wᵀv."""

    @abc.abstractmethod
    def weight_gradient(self, z: Tensor, v: Tensor) -> Tensor:
        """Return the gradient of ⟨Wz, v⟩ with respect to the weight."""

    def added(self, v: Tensor, z: Tensor, sign: int) -> Tensor:
        """Return v ± Wz, without a graph."""
        return torch.add(v, self(z), alpha=sign)

    def adjoint_relu(self, v: Tensor, shift: Tensor | None) -> Tensor:
        """Return max(Wᵀv + shift, 0)."""
        drive = self.adjoint(v)
        return torch.relu(drive if shift is None else drive + shift)

    def adjoint_masked(self, v: Tensor, z: Tensor, g: Tensor | None, sign: int) -> Tensor:
        """Return g ± Wᵀv where z > 0, else 0; without a graph."""
        drive = self.adjoint(v)
        if g is not None:
            drive = torch.add(g, drive, alpha=sign)
        elif sign < 0:
            drive = -drive
        return torch.ops.aten.threshold_backward(drive, z, 0)  # one vectorised pass, where a Boolean mask takes two


@final
@dataclasses.dataclass(frozen=True)
class Matrix(AbstractLinearMap):
    """A matrix (features, state): z (batch, state) ↦ v = Wz (batch, features)."""

    def __call__(self, z: Tensor) -> Tensor:
        return F.linear(z, self.weight)

    def adjoint(self, v: Tensor) -> Tensor:
        return F.linear(v, self.weight.mT)

    def weight_gradient(self, z: Tensor, v: Tensor) -> Tensor:
        return v.mT @ z


@final
@dataclasses.dataclass(frozen=True)
class Convolution(AbstractLinearMap):
    """A convolution (features, state, k, k), k odd, zero-padded so that pictures keep their size.

    z is (batch, state, height, width), v = Wz is (batch, features, height, width). Where a GPU has a program for it,
    a product, the sum and the mask or ReLU after it take one pass over memory (`fused.convolution`).
    """

    def __call__(self, z: Tensor) -> Tensor:
        fused = convolve(z, self.weight) if z.is_cuda else None
        return F.conv2d(z, self.weight, padding=self._padding) if fused is None else fused

    def adjoint(self, v: Tensor) -> Tensor:
        return F.conv_transpose2d(v, self.weight, padding=self._padding)

    def weight_gradient(self, z: Tensor, v: Tensor) -> Tensor:
        """Return the gradient of ⟨Wz, v⟩ with respect to the weight; without a graph."""
        return conv2d_weight(z, list(self.weight.shape), v, padding=self._padding)  # type: ignore[no-untyped-call]

    def added(self, v: Tensor, z: Tensor, sign: int) -> Tensor:
        fused = convolve(z, self.weight, add=v, sign=sign) if z.is_cuda else None
        return super().added(v, z, sign) if fused is None else fused

    def adjoint_relu(self, v: Tensor, shift: Tensor | None) -> Tensor:
        if v.is_cuda and fuses_relu(v, self.weight, shift):
            return convolve_relu(v, self._flipped, shift)
        return super().adjoint_relu(v, shift)

    def adjoint_masked(self, v: Tensor, z: Tensor, g: Tensor | None, sign: int) -> Tensor:
        fused = convolve(v, self.weight, adjoint=True, add=g, sign=sign, mask=z) if v.is_cuda else None
        return super().adjoint_masked(v, z, g, sign) if fused is None else fused

    @functools.cached_property
    def _padding(self) -> int:
        return self.weight.shape[-1] // 2

    @functools.cached_property
    def _flipped(self) -> Tensor:
        """The weight of Wᵀ as a convolution of its own."""
        return self.weight.transpose(0, 1).flip(2, 3).contiguous(memory_format=torch.channels_last)


def as_linear_map(weight: Tensor) -> AbstractLinearMap:
    """Return a weight (features, state) as a matrix, (features, state, size, size) as a zero-padded convolution."""
    return Matrix(weight) if weight.dim() == 2 else Convolution(weight)
