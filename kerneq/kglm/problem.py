"""The inner problem of a kernel GLM, for one kernel matrix and a batch of targets, and Newton's method for it.

min over α   J(α) = 1ᵀ(A + Q)(η) − ηᵀT + ½λ αᵀKα,      η = Kα + m

A is the family's log-partition, Q = −log q the prior factor's penalty, m the offset, T the sufficient statistics.
"""

import dataclasses
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from ..tensors import check_positive
from .families import AbstractFamily, Gaussian, Ising


@final
@dataclasses.dataclass(frozen=True)
class Prior:
    """The factor q of the prior p(f) ∝ q(f(X)) exp(−λ‖f‖²/2): Q = −log q = νA_q(η), convex and elementwise.

    A_q is the log-partition of a family, `Custom` for a penalty of your own; q is that family's conjugate prior after
    ν observations of mean 0. ρ = Q′ ∘ (A′)⁻¹ is the second activation of the equilibrium.
    """

    family: AbstractFamily
    weight: float = 1.0  # ν; with 0 the prior is the Gaussian process alone, and ρ = 0

    @property
    def flat(self) -> bool:
        """Whether q = 1."""
        return self.weight == 0

    def penalty(self, eta: Tensor) -> Tensor:
        """Q(η)."""
        return self.weight * self.family.log_partition(eta)

    def slope(self, eta: Tensor) -> Tensor:
        """Q′(η)."""
        return self.weight * self.family.mean(eta)

    def curvature(self, eta: Tensor) -> Tensor:
        """Q″(η)."""
        return self.weight * self.family.variance(eta)

    def max_curvature(self) -> float:
        """sup Q″."""
        return 0.0 if self.flat else self.weight * self.family.variance_range()[1]


def Normal(precision: float) -> Prior:
    """q a Gaussian of precision p at every coordinate: Q = pη²/2."""
    if not precision >= 0:
        raise ValueError(f"`precision` must not be negative, got {precision}.")
    return Prior(Gaussian(), precision)


def Logistic(scale: float = 1.0) -> Prior:
    """q a logistic density of scale s: Q = 2 log 2cosh(η/2s), a Laplace prior without its kink."""
    check_positive("scale", scale)
    return Prior(Ising(2 * scale), 2.0)


FLAT = Normal(0.0)


@final
@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything that stays the same while α is sought; α, η and residuals are (batch, n)."""

    K: Tensor  # (n, n), symmetric positive semi-definite
    t: Tensor  # (batch, n), the sufficient statistics T(Y)
    family: AbstractFamily
    lam: float
    prior: Prior = FLAT
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
        return self.family.variance(eta) + self.prior.curvature(eta)

    def error_bound(self, alpha: Tensor, eta: Tensor, norm: float) -> Tensor:
        """How far η can be from the solution, per sample: ‖η − η*‖ ≤ (‖K‖/λ)‖r‖ for every kernel, family and λ.

        Subtract the two optimality conditions and multiply by η − η*: A′ + Q′ is monotone and K semi-definite, so
        λ‖α − α*‖²_K ≤ ‖r‖‖η − η*‖, while ‖η − η*‖² ≤ ‖K‖‖α − α*‖²_K. `norm` is ‖K‖.
        """
        return norm / self.lam * self.residual(alpha, eta).norm(dim=-1)


# (K, s, λ, b) ↦ the x with (λI + S K S) x = b, S = diag(s); K is (n, n), the others (batch, n)
LinearSolver = Callable[[Tensor, Tensor, float, Tensor], Tensor]


def scaled_factor(K: Tensor, s: Tensor, lam: float) -> Tensor:
    """The Cholesky factors of λI + S K S, S = diag(s), (batch, n, n); an error where one is not definite."""
    matrix = s[:, :, None] * K * s[:, None, :]
    matrix.diagonal(dim1=-2, dim2=-1).add_(lam)
    factor, info = torch.linalg.cholesky_ex(matrix)
    if bool(info.any()):
        raise ValueError(
            "The kernel matrix is not positive semi-definite, so the inner problem is not convex. "
            "Use a definite kernel, add White(…), or raise `lam`."
        )
    return factor


def cholesky(K: Tensor, s: Tensor, lam: float, b: Tensor) -> Tensor:
    """The exact `LinearSolver`: n³/3 operations and n² numbers per sample. The choice for a few samples."""
    return torch.cholesky_solve(b[..., None], scaled_factor(K, s, lam))[..., 0]


@final
@dataclasses.dataclass(frozen=True)
class Fit:
    """Where Newton's method stopped, per sample."""

    alpha: Tensor  # (batch, n), representer coefficients: f = k(·, X)α
    eta: Tensor  # (batch, n), canonical parameters at the coordinates
    residual: Tensor  # (batch,), ‖r‖ / max(‖T‖, 1)
    converged: Tensor  # (batch,), bool
    steps: int
    objective: Tensor  # (steps + 1, batch), J before every step and at the end


def newton(problem: Problem, *, linear_solver: LinearSolver = cholesky, tol: float = 1e-12, max_steps: int = 50) -> Fit:
    """Minimise J from α = 0 until ‖r‖ ≤ tol·max(‖T‖, 1) or rounding stops the descent; the same as IRWLS.

    The step is p = (λI + DK)⁻¹ r = (r − S(λI + SKS)⁻¹S K r)/λ, S = D^½. It is halved, per sample, until J falls by a
    quarter of what its slope promises: J is convex, so Newton's method then converges from anywhere.
    """
    alpha = torch.zeros_like(problem.t)
    eta = problem.canonical(alpha)
    value = problem.objective(alpha, eta)
    if not bool(value.isfinite().all()):
        raise ValueError("The objective is not finite at the start; check the offset and the targets.")
    scale = problem.t.norm(dim=-1).clamp(min=1)
    history, active = [value], torch.ones_like(value, dtype=torch.bool)
    residual = problem.residual(alpha, eta)
    for step in range(max_steps + 1):
        before = residual.norm(dim=-1)
        active = active & (before > tol * scale)
        if step == max_steps or not bool(active.any()):
            break
        s, Kr = problem.weights(eta).sqrt(), residual @ problem.K
        p = (residual - s * linear_solver(problem.K, s, problem.lam, s * Kr)) / problem.lam
        alpha, eta, new = _line_search(problem, alpha, eta, value, p, residual, active)
        residual = problem.residual(alpha, eta)
        # a sample whose objective and residual both stand still has reached the floor of its dtype
        active = active & ((new < value) | (residual.norm(dim=-1) < 0.5 * before))
        value = new
        history.append(value)
    relative = residual.norm(dim=-1) / scale
    floor = 1e3 * torch.finfo(alpha.dtype).eps
    return Fit(alpha, eta, relative, relative <= max(tol, floor), len(history) - 1, torch.stack(history))


def _line_search(
    problem: Problem, alpha: Tensor, eta: Tensor, value: Tensor, p: Tensor, residual: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The longest step of 1, ½, ¼ … along p whose objective falls enough, per sample; none where none does."""
    Kp = p @ problem.K
    slope = -(residual * Kp).sum(-1)  # of J along p, never positive
    length = active.to(alpha.dtype)
    rounding = problem.rounding(alpha, eta)
    for _ in range(60):
        trial, trial_eta = alpha + length[:, None] * p, eta + length[:, None] * Kp
        new = problem.objective(trial, trial_eta)
        refused = (length > 0) & ~(new <= value + 0.25 * length * slope + rounding)
        if not bool(refused.any()):
            break
        length = torch.where(refused, 0.5 * length, length)
    stay = (refused | (length == 0))[:, None]
    alpha, eta = torch.where(stay, alpha, trial), torch.where(stay, eta, trial_eta)
    return alpha, eta, torch.where(stay[:, 0], value, new)
