"""The sigmoid kernel (GEQ, Table 4)."""

import dataclasses
from typing import final

import torch
from torch import Tensor

from .inner import AbstractInnerKernel


@final
@dataclasses.dataclass(frozen=True)
class Sigmoid(AbstractInnerKernel):
    """S = tanh⟨a, z⟩ + ½‖v‖². |tanh″| ≤ 4/(3√3), so E is strongly convex if (4/3√3)‖a‖² + ‖W‖² < 1."""

    def value(self, t: Tensor) -> Tensor:
        return torch.tanh(t)

    def derivative(self, t: Tensor) -> Tensor:
        return 1 - torch.tanh(t) ** 2

    @property
    def curvature(self) -> float:
        return 4 / (3 * 3**0.5)
