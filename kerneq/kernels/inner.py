"""Kernels of the inner product t = ⟨a, z⟩: S = κ(t) + ½‖v‖². What polynomial and sigmoid share."""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from ..solution import take_samples
from .base import AbstractBoundSimilarity, AbstractKernel, AbstractSimilarity, Slope, dot


class AbstractInnerKernel(AbstractKernel):
    """S = κ(⟨a, z⟩) + ½‖v‖², so d(z) = κ′(t) a + WᵀWz and L = max κ″·‖a‖² + ‖W‖².

    On feature maps t sums thousands of terms, so a is shortened, per sample, to ‖a‖ ≤ `reach`: half of norm² is left
    to it and half to W, and with norm ≤ 1 the equilibrium exists and is unique (docs/facts.md, fact 8).
    """

    in_state: ClassVar[bool] = True

    @abc.abstractmethod
    def value(self, t: Tensor) -> Tensor:
        """κ(t)."""

    @abc.abstractmethod
    def derivative(self, t: Tensor) -> Tensor:
        """κ′(t)."""

    @property
    @abc.abstractmethod
    def curvature(self) -> float:
        """A bound on |κ″(t)| where iterates from z = 0 can be."""

    def reach(self, norm: float) -> float:
        """How long a may be."""
        return norm / (2 * self.curvature) ** 0.5

    def similarity(self, features: int, conv: bool) -> "InnerSimilarity":
        return InnerSimilarity(self)


@final
class InnerSimilarity(AbstractSimilarity):
    """No parameters of its own; shortens a."""

    def __init__(self, kernel: AbstractInnerKernel):
        super().__init__()
        self.kernel = kernel

    def allowance(self, norm: float) -> float:
        return norm / 2**0.5

    def gain(self) -> float:
        return 1.0

    def bind(self, a: Tensor, norm: float) -> "BoundInner":
        reach = self.kernel.reach(norm)
        dims = tuple(range(1, a.dim()))
        length = torch.linalg.vector_norm(a, dim=dims, keepdim=True, dtype=torch.promote_types(a.dtype, torch.float32))
        shortened = a * (reach / length.clamp_min(reach)).to(a.dtype)
        kernel = self.kernel
        return BoundInner(shortened, kernel.value, kernel.derivative, kernel.curvature * reach**2)


@final
@dataclasses.dataclass(frozen=True)
class BoundInner(AbstractBoundSimilarity):
    a: Tensor
    kappa: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    stiffness: float  # max κ″·‖a‖²

    bend_sign: ClassVar[int] = 1
    through_features: ClassVar[bool] = False

    def slope(self, z: Tensor, v: Tensor, value: bool) -> Slope:
        t = dot(self.a, z)
        pull = self.derivative(t).to(z.dtype).view(-1, *[1] * (z.dim() - 1))
        return Slope(pull * self.a, v, self.kappa(t) + 0.5 * dot(v, v) if value else None)

    def slope_at_zero(self, value: bool) -> Slope:
        t = self.a.new_zeros(len(self.a), dtype=torch.promote_types(self.a.dtype, torch.float32))
        pull = self.derivative(t).to(self.a.dtype).view(-1, *[1] * (self.a.dim() - 1))
        return Slope(pull * self.a, None, self.kappa(t) if value else None)

    def bend(self, v: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda y: y

    def lipschitz(self, operator_norm: Tensor) -> Tensor:
        return operator_norm**2 + self.stiffness

    def convexity(self, lipschitz: Tensor) -> Tensor:
        return 1 - lipschitz

    def rows(self, index: Tensor) -> Self:
        return dataclasses.replace(self, a=take_samples(self.a, index))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.a,)

    def on(self, *tensors: Tensor) -> Self:
        return dataclasses.replace(self, a=tensors[0])
