"""The leaky ReLU as a family: A is convex but no log-partition."""

import dataclasses
import math
from typing import final

import torch
from torch import Tensor

from kerneq.kglm.family import AbstractFamily


@final
@dataclasses.dataclass(frozen=True)
class LeakyReLU(AbstractFamily):
    """σ = max(η, aη); A = ½ηmax(η, aη). A log-partition is analytic and this A is not: not admissible.

    Slope 0 is the ReLU, whose link does not exist; it serves where the prior is flat.
    """

    slope: float = 0.1  # a
    admissible: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.slope <= 1:
            raise ValueError(f"`slope` must lie in [0, 1], got {self.slope}.")

    def log_partition(self, eta: Tensor) -> Tensor:
        return 0.5 * eta * self.mean(eta)

    def mean(self, eta: Tensor) -> Tensor:
        return torch.where(eta > 0, eta, self.slope * eta)

    def variance(self, eta: Tensor) -> Tensor:
        return torch.where(eta > 0, torch.ones_like(eta), torch.full_like(eta, self.slope))

    def canonical(self, mean: Tensor) -> Tensor:
        if self.slope == 0:
            raise ValueError("The ReLU (slope 0) has no inverse; use a positive slope, or the flat prior.")
        return torch.where(mean > 0, mean, mean / self.slope)

    def curvature(self, below: float = math.inf) -> float:
        return 1.0

    def floor(self) -> float:
        return self.slope

    def statistic(self, y: Tensor) -> Tensor:
        return y
