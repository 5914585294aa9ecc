"""The inner problem of the paper, for one kernel matrix and a batch of targets.

min over α   J(α) = 1ᵀ(A + Q)(η) − ηᵀT + ½λ αᵀKα,      η = Kα + m
"""

import dataclasses

import torch
from torch import Tensor

from kerneq.kglm.family import AbstractFamily
from kerneq.kglm.prior import FLAT, AbstractPrior


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything that stays the same while α is sought; tensors are (batch, n)."""

    K: Tensor  # (n, n), symmetric positive semi-definite
    t: Tensor  # (batch, n), the sufficient statistics T(Y)
    family: AbstractFamily
    lam: float
    prior: AbstractPrior = FLAT
    offset: Tensor | None = None  # m at the coordinates, (n,)

    def canonical(self, alpha: Tensor) -> Tensor:
        """η = Kα + m."""
        eta = alpha @ self.K  # K is symmetric
        return eta if self.offset is None else eta + self.offset

    def objective(self, alpha: Tensor, eta: Tensor) -> Tensor:
        """J per sample; +∞ where it overflows, so that a line search turns back."""
        f = eta if self.offset is None else eta - self.offset
        loss = self.family.log_partition(eta) + self.prior.penalty(eta) - eta * self.t
        value = (loss + 0.5 * self.lam * alpha * f).sum(-1)
        return torch.nan_to_num(value, nan=torch.inf)

    def rounding(self, alpha: Tensor, eta: Tensor) -> Tensor:
        """How much of J is rounding, per sample: two values closer than this are the same value."""
        size = self.family.log_partition(eta).abs() + self.prior.penalty(eta).abs() + (eta * self.t).abs()
        size = size + self.lam * (alpha * eta).abs()
        return 4 * torch.finfo(eta.dtype).eps * size.sum(-1)

    def residual(self, alpha: Tensor, eta: Tensor) -> Tensor:
        """r = T − A′(η) − Q′(η) − λα; the gradient of J is −Kr, and r = 0 is the equilibrium."""
        return self.t - self.family.mean(eta) - self.prior.slope(eta) - self.lam * alpha

    def weights(self, eta: Tensor) -> Tensor:
        """D = A″ + Q″, the diagonal of the Hessian in η."""
        return self.family.variance(eta) + self.prior.curve(eta)


def error_bound(norm: float | Tensor, lam: float, residual: Tensor) -> Tensor:
    """How far η = Kα + m can be from the solution: ‖η − η*‖ ≤ (‖K‖/λ)‖r‖, for every kernel, family and λ.

    Subtract the two optimality conditions and multiply by η − η*: A′ + Q′ is monotone and K semi-definite, so
    λ‖α − α*‖²_K ≤ ‖r‖‖η − η*‖, while ‖η − η*‖² ≤ ‖K‖‖α − α*‖²_K.
    """
    return norm / lam * residual.norm(dim=-1)
