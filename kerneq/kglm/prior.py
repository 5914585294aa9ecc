"""The factor q of the prior p(f) ∝ q(f(X)) exp(−λ‖f‖²/2), through Q = −log q, convex and elementwise."""

import abc
import dataclasses
import math
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F


class AbstractPrior(abc.ABC):
    """Q with its two derivatives; ρ = Q′ ∘ (A′)⁻¹ is the second activation of the equilibrium."""

    @abc.abstractmethod
    def penalty(self, eta: Tensor) -> Tensor: ...  # Q

    @abc.abstractmethod
    def slope(self, eta: Tensor) -> Tensor: ...  # Q′

    @abc.abstractmethod
    def curve(self, eta: Tensor) -> Tensor: ...  # Q″

    @abc.abstractmethod
    def curvature(self) -> float: ...  # sup Q″


@final
@dataclasses.dataclass(frozen=True)
class Flat(AbstractPrior):
    """q = 1: the prior is the Gaussian process alone and ρ = 0."""

    def penalty(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta)

    def slope(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta)

    def curve(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta)

    def curvature(self) -> float:
        return 0.0


FLAT = Flat()


@final
@dataclasses.dataclass(frozen=True)
class Normal(AbstractPrior):
    """q a Gaussian of the given precision p at every coordinate: Q = pη²/2."""

    precision: float  # p

    def __post_init__(self) -> None:
        if not self.precision >= 0:
            raise ValueError(f"`precision` must not be negative, got {self.precision}.")

    def penalty(self, eta: Tensor) -> Tensor:
        return 0.5 * self.precision * eta.square()

    def slope(self, eta: Tensor) -> Tensor:
        return self.precision * eta

    def curve(self, eta: Tensor) -> Tensor:
        return torch.full_like(eta, self.precision)

    def curvature(self) -> float:
        return self.precision


@final
@dataclasses.dataclass(frozen=True)
class Logistic(AbstractPrior):
    """q a logistic density of scale s: Q = 2 log 2cosh(η/2s), a Laplace prior without its kink."""

    scale: float = 1.0  # s

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"`scale` must be positive and finite, got {self.scale}.")

    def penalty(self, eta: Tensor) -> Tensor:
        x = eta / self.scale
        return F.softplus(x) + F.softplus(-x)

    def slope(self, eta: Tensor) -> Tensor:
        return (eta / (2 * self.scale)).tanh() / self.scale

    def curve(self, eta: Tensor) -> Tensor:
        return (1 - (eta / (2 * self.scale)).tanh().square()) / (2 * self.scale**2)

    def curvature(self) -> float:
        return 1 / (2 * self.scale**2)
