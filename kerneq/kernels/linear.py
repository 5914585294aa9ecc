"""The linear kernel of OptEq and MOptEq."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from ..solution import take_samples
from .base import AbstractBoundSimilarity, AbstractKernel, AbstractSimilarity, Slope, dot


@final
@dataclasses.dataclass(frozen=True)
class Linear(AbstractKernel):
    """S = ⟨a, z⟩ + ½‖v‖², so d(z) = a + WᵀWz.

    L = ‖W‖² and E is strongly convex with μ = 1 − L; from L = 1 on it need not have a minimum.
    """

    in_state: ClassVar[bool] = True

    def similarity(self, features: int, conv: bool) -> "LinearSimilarity":
        return LinearSimilarity()


@final
class LinearSimilarity(AbstractSimilarity):
    """No parameters of its own."""

    def allowance(self, norm: float) -> float:
        return norm

    def gain(self) -> float:
        return 1.0

    def bind(self, a: Tensor, norm: float) -> "BoundLinear":
        return BoundLinear(a)


@final
@dataclasses.dataclass(frozen=True)
class BoundLinear(AbstractBoundSimilarity):
    a: Tensor

    bend_sign: ClassVar[int] = 1
    through_features: ClassVar[bool] = True

    def slope(self, z: Tensor, v: Tensor, value: bool) -> Slope:
        return Slope(self.a, v, dot(self.a, z) + 0.5 * dot(v, v) if value else None)

    def slope_at_zero(self, value: bool) -> Slope:
        return Slope(self.a, None, torch.zeros(len(self.a), device=self.a.device) if value else None)

    def bend(self, v: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda y: y

    def lipschitz(self, operator_norm: Tensor) -> Tensor:
        return operator_norm**2

    def convexity(self, lipschitz: Tensor) -> Tensor:
        return 1 - lipschitz

    def rows(self, index: Tensor) -> Self:
        return dataclasses.replace(self, a=take_samples(self.a, index))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.a,)

    def on(self, *tensors: Tensor) -> Self:
        return dataclasses.replace(self, a=tensors[0])
