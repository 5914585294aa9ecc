"""The exponential families of the paper, and the leaky-ReLU-like one that is admissible."""

import dataclasses
import math
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from kerneq.kglm.family import AbstractFamily, invert, within_support


@final
@dataclasses.dataclass(frozen=True)
class Gaussian(AbstractFamily):
    """Known variance s²: A = η²/2s², T = y/s². The kernel GLM is kernel ridge regression; σ is linear."""

    noise: float = 1.0  # s²

    def __post_init__(self) -> None:
        if not self.noise > 0:
            raise ValueError(f"`noise` is a variance and must be positive, got {self.noise}.")

    def log_partition(self, eta: Tensor) -> Tensor:
        return eta.square() / (2 * self.noise)

    def mean(self, eta: Tensor) -> Tensor:
        return eta / self.noise

    def variance(self, eta: Tensor) -> Tensor:
        return torch.full_like(eta, 1 / self.noise)

    def canonical(self, mean: Tensor) -> Tensor:
        return mean * self.noise

    def curvature(self, below: float = math.inf) -> float:
        return 1 / self.noise

    def floor(self) -> float:
        return 1 / self.noise

    def statistic(self, y: Tensor) -> Tensor:
        return y / self.noise


@final
@dataclasses.dataclass(frozen=True)
class Binomial(AbstractFamily):
    """y successes of r trials: A = r log(1 + e^η), σ = r · logistic, A″ ≤ r/4."""

    trials: int = 1  # r

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"`trials` must be at least 1, got {self.trials}.")

    def log_partition(self, eta: Tensor) -> Tensor:
        return self.trials * F.softplus(eta)

    def mean(self, eta: Tensor) -> Tensor:
        return self.trials * eta.sigmoid()

    def variance(self, eta: Tensor) -> Tensor:
        return self.trials * eta.sigmoid() * (-eta).sigmoid()

    def canonical(self, mean: Tensor) -> Tensor:
        return torch.logit(mean / self.trials)

    def curvature(self, below: float = math.inf) -> float:
        return self.trials / 4

    def floor(self) -> float:
        return 0.0

    def statistic(self, y: Tensor) -> Tensor:
        inside = (y >= 0) & (y <= self.trials) & (y == y.round())
        return within_support(y, inside, type(self).__name__, f"whole numbers from 0 to {self.trials}")


def Bernoulli() -> Binomial:
    """Targets 0 and 1: kernel logistic regression."""
    return Binomial(1)


@final
@dataclasses.dataclass(frozen=True)
class Poisson(AbstractFamily):
    """Counts: A = σ = A″ = e^η. A″ is unbounded, so a contraction needs a bound on η."""

    def log_partition(self, eta: Tensor) -> Tensor:
        return eta.exp()

    def mean(self, eta: Tensor) -> Tensor:
        return eta.exp()

    def variance(self, eta: Tensor) -> Tensor:
        return eta.exp()

    def canonical(self, mean: Tensor) -> Tensor:
        return mean.log()

    def curvature(self, below: float = math.inf) -> float:
        return math.exp(below) if below < 700 else math.inf

    def floor(self) -> float:
        return 0.0

    def statistic(self, y: Tensor) -> Tensor:
        return within_support(y, (y >= 0) & (y == y.round()), "Poisson", "whole numbers from 0")


@final
@dataclasses.dataclass(frozen=True)
class Ising(AbstractFamily):
    """Spins y = ±1 without interaction, at temperature t: A = log 2cosh(η/t), T = y/t, σ = tanh(η/t)/t."""

    temperature: float = 1.0  # t

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"`temperature` must be positive, got {self.temperature}.")

    def log_partition(self, eta: Tensor) -> Tensor:
        x = (eta / self.temperature).abs()
        return x + torch.log1p((-2 * x).exp())

    def mean(self, eta: Tensor) -> Tensor:
        return (eta / self.temperature).tanh() / self.temperature

    def variance(self, eta: Tensor) -> Tensor:
        return (1 - (eta / self.temperature).tanh().square()) / self.temperature**2

    def canonical(self, mean: Tensor) -> Tensor:
        return self.temperature * torch.atanh(mean * self.temperature)

    def curvature(self, below: float = math.inf) -> float:
        return 1 / self.temperature**2

    def floor(self) -> float:
        return 0.0

    def statistic(self, y: Tensor) -> Tensor:
        return within_support(y, y.abs() == 1, "Ising", "−1 or 1") / self.temperature


@final
@dataclasses.dataclass(frozen=True)
class Rectified(AbstractFamily):
    """A leaky ReLU that a density has: slope a far to the left, 1 far to the right, smooth between.

    y = √a·N + √(1−a)·|N| tilted, a Gaussian plus a half-Gaussian, gives A = aη²/2 + A₊(√(1−a) η) with
    A₊(u) = u²/2 + log Φ(u); so σ(η) = aη + √(1−a) m(√(1−a) η), m(u) = u + φ(u)/Φ(u), and 0 < A″ < 1.
    (Softplus itself is not admissible: exp(−Li₂(−x)) has a negative coefficient at x⁴, so no base measure.)
    """

    slope: float = 0.1  # a

    def __post_init__(self) -> None:
        if not 0 <= self.slope < 1:
            raise ValueError(f"`slope` must lie in [0, 1), got {self.slope}.")

    def log_partition(self, eta: Tensor) -> Tensor:
        u = math.sqrt(1 - self.slope) * eta
        return 0.5 * eta.square() + torch.special.log_ndtr(u)

    def mean(self, eta: Tensor) -> Tensor:
        root = math.sqrt(1 - self.slope)
        return eta + root * _hazard(root * eta)

    def variance(self, eta: Tensor) -> Tensor:
        u = math.sqrt(1 - self.slope) * eta
        hazard = _hazard(u)
        # 1 − m(u)·hazard(u) loses its digits far to the left, where it tends to 1/u²
        excess = torch.where(u < -1e3, 1 / u.square(), 1 - hazard * (u + hazard))
        return self.slope + (1 - self.slope) * excess.clamp(0, 1)

    def canonical(self, mean: Tensor) -> Tensor:
        return invert(self.mean, self.variance, mean)

    def curvature(self, below: float = math.inf) -> float:
        return 1.0

    def floor(self) -> float:
        return self.slope

    def statistic(self, y: Tensor) -> Tensor:
        inside = (y >= 0) if self.slope == 0 else y.isfinite()
        return within_support(y, inside, "Rectified", "at least 0" if self.slope == 0 else "finite")


def _hazard(u: Tensor) -> Tensor:
    """φ(u)/Φ(u), through logarithms so that the far left does not divide 0 by 0."""
    return torch.exp(-0.5 * u.square() - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(u))
