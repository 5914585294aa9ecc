"""The regulariser φ of the hidden problem and its proximal map σ = prox_φ, which is the layer's nonlinearity.

To add one, subclass `AbstractProx` and write prox_{αφ}, φ and the derivative of prox_φ.
"""

import abc
import dataclasses
from typing import ClassVar, final

import torch
from torch import Tensor

from .tensors import check_nonnegative, working_dtype

__all__ = ["AbstractProx", "Identity", "ReLU", "SoftThreshold"]
__dir__ = __all__.copy  # `dir` lists the public names only

Scale = float | Tensor


class AbstractProx(abc.ABC):
    """σ of GEQ (6) and φ of GEQ (5): prox_{αφ}(d) = argmin_z ½‖z − d‖² + α·φ(z), elementwise.

    α = 0 projects onto the domain of φ.
    """

    indicator: ClassVar[bool] = False  # φ is zero wherever it is finite

    @abc.abstractmethod
    def __call__(self, d: Tensor, scale: Scale = 1.0) -> Tensor: ...

    @abc.abstractmethod
    def penalty(self, z: Tensor) -> Tensor:
        """Return 1ᵀφ(z) of each sample, (batch,), infinite outside the domain of φ."""

    @abc.abstractmethod
    def vjp(self, z: Tensor, g: Tensor) -> Tensor:
        """Return D g, D the derivative of prox_φ where its value is z: a diagonal matrix of ones and zeros."""


@final
@dataclasses.dataclass(frozen=True)
class ReLU(AbstractProx):
    """φ is the indicator of z ≥ 0, and prox_{αφ}(d) = max(d, 0) for every α."""

    indicator: ClassVar[bool] = True

    def __call__(self, d: Tensor, scale: Scale = 1.0) -> Tensor:
        return torch.relu(d)

    def penalty(self, z: Tensor) -> Tensor:
        inside = z.amin(tuple(range(1, z.dim()))) >= 0
        return torch.where(inside, 0.0, torch.inf).to(working_dtype(z.dtype))

    def vjp(self, z: Tensor, g: Tensor) -> Tensor:
        return torch.ops.aten.threshold_backward(g, z, 0)  # one vectorised pass, where a Boolean mask takes two


@final
@dataclasses.dataclass(frozen=True)
class SoftThreshold(AbstractProx):
    """φ(z) = λ|z|, and prox_{αφ}(d) = sign(d)·max(|d| − αλ, 0)."""

    threshold: float = 0.1  # λ

    def __post_init__(self) -> None:
        check_nonnegative("threshold", self.threshold)

    def __call__(self, d: Tensor, scale: Scale = 1.0) -> Tensor:
        return torch.sign(d) * torch.relu(d.abs() - scale * self.threshold)

    def penalty(self, z: Tensor) -> Tensor:
        return self.threshold * z.flatten(1).abs().sum(1, dtype=working_dtype(z.dtype))

    def vjp(self, z: Tensor, g: Tensor) -> Tensor:
        return torch.where(z != 0, g, 0.0)


@final
@dataclasses.dataclass(frozen=True)
class Identity(AbstractProx):
    """φ = 0: no nonlinearity, the hidden problem is smooth."""

    indicator: ClassVar[bool] = True

    def __call__(self, d: Tensor, scale: Scale = 1.0) -> Tensor:
        return d

    def penalty(self, z: Tensor) -> Tensor:
        return z.new_zeros(z.shape[0], dtype=working_dtype(z.dtype))

    def vjp(self, z: Tensor, g: Tensor) -> Tensor:
        return g
