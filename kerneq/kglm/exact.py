"""The exact fit of a kernel GLM: the problem that is minimised, kGLM's (5), and Newton's method for it.

(5)  min over α   J(α) = 1ᵀ(A + Q)(η) − ηᵀT + ½λ αᵀKα,      η = Kα + m

A is the family's log-partition, Q = −log q the prior factor's penalty, m the offset, T the sufficient statistics. All
that needs the whole matrix K, of n² numbers, is here: `glm.py` knows the kernel only as a function.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Self, final

import torch
from torch import Tensor

from .families import FLAT, AbstractFamily, Prior


@final
@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything that stays the same while α is sought; α, η and residuals are (batch, n)."""

    K: Tensor  # (n, n), symmetric positive semi-definite; (batch, n, n) where every sample has its own coordinates
    t: Tensor  # (batch, n), the sufficient statistics T(Y)
    family: AbstractFamily
    lam: float
    prior: Prior = FLAT
    offset: Tensor | float = 0.0  # m at the coordinates, (n,) or (batch, n)

    def times(self, v: Tensor) -> Tensor:
        """Return Kv, (batch, n); K is symmetric."""
        return v @ self.K if self.K.ndim == 2 else (v[:, None, :] @ self.K)[:, 0, :]

    def canonical(self, alpha: Tensor) -> Tensor:
        """Return η = Kα + m."""
        return self.times(alpha) + self.offset

    def objective(self, alpha: Tensor, eta: Tensor) -> Tensor:
        """Return J(α) per sample (5); +∞ where it overflows, so that a line search turns back."""
        loss = self.family.log_partition(eta) + self.prior.penalty(eta) - eta * self.t
        value = (loss + 0.5 * self.lam * alpha * (eta - self.offset)).sum(-1)
        return torch.nan_to_num(value, nan=torch.inf, posinf=torch.inf)

    def rounding(self, alpha: Tensor, eta: Tensor) -> Tensor:
        """Return how much of J is rounding, per sample: two values closer than this are the same value."""
        size = self.family.log_partition(eta).abs() + self.prior.penalty(eta).abs() + (eta * self.t).abs()
        size = size + self.lam * (alpha * eta).abs()
        return 4 * torch.finfo(eta.dtype).eps * size.sum(-1)

    def residual(self, alpha: Tensor, eta: Tensor) -> Tensor:
        """Return r = T − A′(η) − Q′(η) − λα; the gradient of J is −Kr, and r = 0 is the equilibrium."""
        return self.t - self.family.mean(eta) - self.prior.slope(eta) - self.lam * alpha

    def weights(self, eta: Tensor) -> Tensor:
        """Return D = A″ + Q″, the diagonal of the Hessian in η."""
        return self.family.variance(eta) + self.prior.curvature(eta)


# (K, s, λ, b) ↦ the x with (λI + S K S) x = b, S = diag(s); K is as in `Problem`, the others (batch, n)
LinearSolver = Callable[[Tensor, Tensor, float, Tensor], Tensor]


def scaled_factor(K: Tensor, s: Tensor, lam: float) -> Tensor:
    """Return the Cholesky factors of λI + S K S, S = diag(s), (batch, n, n); an error where one is not definite."""
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
    """Solve (λI + S K S) x = b exactly, a `LinearSolver`: n³/3 operations and n² numbers per sample.

    For few samples, or the Gaussian family, whose A″ is a constant: samples that share K then share one matrix.
    """
    if K.ndim == 2 and bool((s == s[:1]).all()):
        return torch.cholesky_solve(b.mT, scaled_factor(K, s[:1], lam)[0]).mT
    return torch.cholesky_solve(b[..., None], scaled_factor(K, s, lam))[..., 0]


def newton_step(problem: Problem, eta: Tensor, residual: Tensor, linear_solver: LinearSolver = cholesky) -> Tensor:
    """Return p = (λI + DK)⁻¹ r = (r − S(λI + SKS)⁻¹S K r)/λ, D = S² the weights at η: no inverse of K is needed."""
    s = problem.weights(eta).sqrt()
    return (residual - s * linear_solver(problem.K, s, problem.lam, s * problem.times(residual))) / problem.lam


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

    def warn_if_unsolved(self) -> Self:
        """Return the fit; warn the caller's caller if a sample is farther from solved than rounding explains."""
        if not bool((self.residual <= torch.finfo(self.alpha.dtype).eps ** 0.5).all()):
            stopped = f"worst residual {self.residual.max().item():.1e} after {self.steps} steps"
            advice = "Raise `lam`, or choose a positive semi-definite kernel if it is not one."
            warnings.warn(f"The inner problem was not solved: {stopped}. {advice}", RuntimeWarning, stacklevel=3)
        return self


def newton(
    problem: Problem, *, linear_solver: LinearSolver = cholesky, tol: float = 1e-12, max_steps: int = 100
) -> Fit:
    """Minimise J from α = 0 by IRWLS (12), damped, until ‖r‖ ≤ tol·max(‖T‖, 1) or rounding stops the descent.

    The step, `newton_step`, is halved, per sample, until J falls by a quarter of what its slope promises: J is convex,
    so Newton's method then converges from anywhere.
    """
    alpha = torch.zeros_like(problem.t)
    eta = problem.canonical(alpha)
    history = [problem.objective(alpha, eta)]
    if not bool(history[0].isfinite().all()):
        raise ValueError("The objective is not finite at the start; check the kernel, the offset and the targets.")
    residual = problem.residual(alpha, eta)
    scale = problem.t.norm(dim=-1).clamp(min=1)
    active = torch.ones_like(scale, dtype=torch.bool)
    for _ in range(max_steps):
        before = residual.norm(dim=-1)
        active = active & (before > tol * scale)
        if not bool(active.any()):
            break
        p = newton_step(problem, eta, residual, linear_solver)
        alpha, eta, value = _line_search(problem, alpha, eta, history[-1], p, residual, active)
        residual = problem.residual(alpha, eta)
        # a sample whose objective and residual both stand still has reached the floor of its dtype
        active = active & ((value < history[-1]) | (residual.norm(dim=-1) < 0.5 * before))
        history.append(value)
    relative = residual.norm(dim=-1) / scale
    floor = 1e3 * torch.finfo(alpha.dtype).eps
    return Fit(alpha, eta, relative, relative <= max(tol, floor), len(history) - 1, torch.stack(history))


def _line_search(
    problem: Problem, alpha: Tensor, eta: Tensor, value: Tensor, p: Tensor, residual: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the longest step of 1, ½, ¼ … along p whose objective falls enough, per sample; none where none does."""
    Kp = problem.times(p)
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


def posterior_covariance(problem: Problem, eta: Tensor, across: Tensor, prior: Tensor) -> Tensor:
    """Return Laplace's covariance of f(X2), (prior − across S(λI + SKS)⁻¹S acrossᵀ)/λ, (batch, m, m).

    `across` is k(X2, X), (m, n), and `prior` is k(X2, X2), (m, m).
    """
    s = problem.weights(eta).sqrt()
    factor = scaled_factor(problem.K, s, problem.lam)
    half = torch.linalg.solve_triangular(factor, (across * s[:, None, :]).mT, upper=False)
    return (prior - half.mT @ half) / problem.lam


def log_evidence(problem: Problem, fit: Fit) -> Tensor:
    """Return log ∫ p(Y | f) p(f) df by Laplace's approximation, less Σ log h(y), (batch,); for the flat factor q."""
    factor = scaled_factor(problem.K, problem.weights(fit.eta).sqrt(), problem.lam)
    log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -fit.objective[-1] - 0.5 * (log_det - problem.t.shape[-1] * math.log(problem.lam))
