"""Covariance functions k(X, X2): coordinates (n, d) and (m, d) → matrix (n, m); `+` and `*` compose them."""

import abc
import dataclasses
import math
from typing import final

import torch
from torch import Tensor


class AbstractKernel(abc.ABC):
    """A positive semi-definite function of two coordinates, evaluated on all pairs."""

    @abc.abstractmethod
    def __call__(self, X: Tensor, X2: Tensor) -> Tensor: ...

    def __add__(self, other: "AbstractKernel") -> "AbstractKernel":
        return Sum(self, other)

    def __mul__(self, other: "AbstractKernel | float") -> "AbstractKernel":
        return Product(self, Constant(float(other)) if isinstance(other, (int, float)) else other)

    __rmul__ = __mul__


@final
@dataclasses.dataclass(frozen=True)
class Sum(AbstractKernel):
    first: AbstractKernel
    second: AbstractKernel

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        return self.first(X, X2) + self.second(X, X2)


@final
@dataclasses.dataclass(frozen=True)
class Product(AbstractKernel):
    first: AbstractKernel
    second: AbstractKernel

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        return self.first(X, X2) * self.second(X, X2)


@final
@dataclasses.dataclass(frozen=True)
class Constant(AbstractKernel):
    """k = v: a random level; as a factor, the variance of another kernel."""

    value: float = 1.0

    def __post_init__(self) -> None:
        if not self.value >= 0:
            raise ValueError(f"A kernel cannot be scaled by a negative number, got {self.value}.")

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        return X.new_full((X.shape[0], X2.shape[0]), self.value)


@final
@dataclasses.dataclass(frozen=True)
class White(AbstractKernel):
    """k = v where the two coordinates are equal and 0 elsewhere: definite on distinct coordinates."""

    variance: float = 1e-8

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        same = (X[:, None, :] == X2[None, :, :]).all(-1)
        return self.variance * same.to(X.dtype)


@final
@dataclasses.dataclass(frozen=True)
class Linear(AbstractKernel):
    """k = ⟨x, x2⟩: the kernel GLM is the ridge-penalised GLM."""

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        return X @ X2.mT


@final
@dataclasses.dataclass(frozen=True)
class SquaredExponential(AbstractKernel):
    """k = exp(−‖x − x2‖² / 2ℓ²)."""

    lengthscale: float = 1.0  # ℓ

    def __post_init__(self) -> None:
        _positive("lengthscale", self.lengthscale)

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        return (-0.5 * squared_distance(X, X2) / self.lengthscale**2).exp()


@final
@dataclasses.dataclass(frozen=True)
class Periodic(AbstractKernel):
    """k = exp(−2 sin²(π‖x − x2‖/p) / ℓ²); the paper's exp(−sin²‖x − x2‖) has p = π, ℓ = √2."""

    period: float = math.pi  # p
    lengthscale: float = math.sqrt(2)  # ℓ

    def __post_init__(self) -> None:
        _positive("period", self.period)
        _positive("lengthscale", self.lengthscale)

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        distance = squared_distance(X, X2).sqrt()
        return (-2 * (math.pi * distance / self.period).sin().square() / self.lengthscale**2).exp()


@final
@dataclasses.dataclass(frozen=True)
class Matern(AbstractKernel):
    """Smoothness ν = ½, 3/2 or 5/2: with r = √(2ν)‖x − x2‖/ℓ, e^{−r} times 1, 1 + r or 1 + r + r²/3."""

    lengthscale: float = 1.0  # ℓ
    smoothness: float = 1.5  # ν

    def __post_init__(self) -> None:
        _positive("lengthscale", self.lengthscale)
        if self.smoothness not in (0.5, 1.5, 2.5):
            raise ValueError(f"`smoothness` must be 0.5, 1.5 or 2.5, got {self.smoothness}.")

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        r = math.sqrt(2 * self.smoothness) * squared_distance(X, X2).sqrt() / self.lengthscale
        polynomial = 1 + (self.smoothness > 1) * r + (self.smoothness > 2) * r.square() / 3
        return polynomial * (-r).exp()


def squared_distance(X: Tensor, X2: Tensor) -> Tensor:
    """‖xᵢ − x2ⱼ‖² from the differences themselves: exactly symmetric, exactly zero on the diagonal."""
    return (X[:, None, :] - X2[None, :, :]).square().sum(-1)


def coordinates(X: Tensor) -> Tensor:
    """X as a matrix (n, d) of floating-point coordinates; a vector means d = 1."""
    if X.ndim not in (1, 2):
        raise ValueError(f"Coordinates must be (n,) or (n, d), got shape {tuple(X.shape)}.")
    if not X.is_floating_point():
        X = X.to(torch.get_default_dtype())
    return X[:, None] if X.ndim == 1 else X


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"`{name}` must be positive, got {value}.")
