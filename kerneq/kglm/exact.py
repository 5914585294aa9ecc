"""The exact fit of a kernel GLM: the problem that is minimised, kGLM's (5), and Newton's method for it.

(5)  min over α   J(α) = 1ᵀ(A + Q)(η) − ηᵀT + ½λ αᵀKα,      η = Kα + m

A is the family's log-partition, Q = −log q the prior factor's penalty, m the offset, T the sufficient statistics. All
that needs the whole matrix K, of n² numbers, is here: `glm.py` knows the kernel only as a function, and `reduced.py`
fits kernels of low rank without it. Where η is a vector per sample (`Categorical`), α, η and T are (batch, n, classes).
"""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Self, final

import torch
from torch import Tensor

from ..tensors import per_sample, per_sample_norm
from .families import FLAT, AbstractFamily, Prior

STALE = 1e-3  # while no weight has moved by more than this share the last factor serves: it gains three digits a step
ACCURATE = 5e-2, 1e-4  # errors of η and of the mean above these shares of the largest, or of 1, are warned of


@final
@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything that stays the same while α is sought; α, η and residuals are (batch, n) or (batch, n, classes)."""

    K: Tensor  # (n, n), symmetric positive semi-definite; (batch, n, n) where every sample has its own coordinates
    t: Tensor  # (batch, n) or (batch, n, classes), the sufficient statistics T(Y)
    family: AbstractFamily
    lam: float
    prior: Prior = FLAT
    offset: Tensor | float = 0.0  # m at the coordinates, (n,) or (batch, n); (n, classes) or (n, 1) for vectors

    def times(self, v: Tensor) -> Tensor:
        """Return Kv, of the shape of v; K is symmetric."""
        if v.ndim == 3:
            return self.K @ v
        return v @ self.K if self.K.ndim == 2 else (v[:, None, :] @ self.K)[:, 0, :]

    def canonical(self, alpha: Tensor) -> Tensor:
        """Return η = Kα + m."""
        return self.times(alpha) + self.offset

    def objective(self, alpha: Tensor, eta: Tensor) -> Tensor:
        """Return J(α) per sample (5); +∞ where it overflows, so that a line search turns back."""
        rest = self.prior.penalty(eta) - eta * self.t + 0.5 * self.lam * alpha * (eta - self.offset)
        loss = self.family.log_partition(eta) + (rest.sum(-1) if self.family.vector else rest)
        return torch.nan_to_num(loss.sum(-1), nan=torch.inf, posinf=torch.inf)

    def rounding(self, alpha: Tensor, eta: Tensor) -> Tensor:
        """Return how much of J is rounding, per sample: two values closer than this are the same value."""
        size = self.prior.penalty(eta).abs() + (eta * self.t).abs() + self.lam * (alpha * eta).abs()
        size = self.family.log_partition(eta).abs().sum(-1) + size.flatten(1).sum(-1)
        return 4 * torch.finfo(eta.dtype).eps * size

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
    matrix = (s[:, :, None] * K).mul_(s[:, None, :])
    matrix.diagonal(dim1=-2, dim2=-1).add_(lam)
    factor, info = torch.linalg.cholesky_ex(matrix)
    if bool(info.any()):
        raise ValueError(
            "The kernel matrix is not positive semi-definite, so the inner problem is not convex. "
            "Use a definite kernel, add White(…), or raise `lam`."
        )
    return factor


def factorise(K: Tensor, s: Tensor, lam: float) -> Callable[[Tensor], Tensor]:
    """Return b ↦ (λI + S K S)⁻¹b, (batch, n); samples that share K and S share one factor."""
    if K.ndim == 2 and bool((s == s[:1]).all()):
        shared = scaled_factor(K, s[:1], lam)[0]
        return lambda b: torch.cholesky_solve(b.mT, shared).mT
    factor = scaled_factor(K, s, lam)
    return lambda b: torch.cholesky_solve(b[..., None], factor)[..., 0]


def cholesky(K: Tensor, s: Tensor, lam: float, b: Tensor) -> Tensor:
    """Solve (λI + S K S) x = b exactly, a `LinearSolver`: n³/3 operations and n² numbers per sample.

    For few samples, or the Gaussian family, whose A″ is a constant: samples that share K then share one matrix.
    """
    return factorise(K, s, lam)(b)


def newton_system(problem: Problem, eta: Tensor, linear_solver: LinearSolver = cholesky) -> Callable[[Tensor], Tensor]:
    """Return r ↦ p = (λI + DK)⁻¹ r = (r − S(λI + SKS)⁻¹S K r)/λ, D = S² the weights at η: no inverse of K is needed."""
    if problem.family.vector:
        return _vector_system(problem, eta)
    K, lam, s = problem.K, problem.lam, problem.weights(eta).sqrt()
    solve = factorise(K, s, lam) if linear_solver is cholesky else lambda b: linear_solver(K, s, lam, b)
    return lambda r: (r - s * solve(s * problem.times(r))) / lam


def newton_step(problem: Problem, eta: Tensor, residual: Tensor) -> Tensor:
    """Return Newton's step p from η, of the shape of the residual."""
    return newton_system(problem, eta)(residual)


def _vector_factors(problem: Problem, eta: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return per class S = D^½ and the factor of λI + SKS, and the factor of Σ G, G = S(λI + SKS)⁻¹S.

    A″ = D − D11ᵀD/c per sample, D = diag(c·p): so each class has its own n × n matrix, and one more joins them
    (Rasmussen and Williams, 2006, algorithm 3.3).
    """
    if not problem.prior.flat:
        raise ValueError("A Categorical family takes the flat prior factor q only.")
    roots = [s for s in problem.family.mean(eta).clamp(min=1e-30).sqrt().unbind(-1)]
    factors = [scaled_factor(problem.K, s, problem.lam) for s in roots]
    halves = (
        torch.linalg.solve_triangular(L, torch.diag_embed(s), upper=False) for s, L in zip(roots, factors, strict=True)
    )
    total = sum(half.mT @ half for half in halves)  # a third of the time of `torch.cholesky_inverse`
    return roots, factors, torch.linalg.cholesky(torch.as_tensor(total))


def _vector_system(problem: Problem, eta: Tensor) -> Callable[[Tensor], Tensor]:
    """As `newton_system`, where A″ is a matrix per sample: p = (r − G(b − x))/λ, b = Kr, x = (Σ G)⁻¹ Σ G b."""
    roots, factors, total = _vector_factors(problem, eta)

    def apply(b: Tensor) -> Tensor:
        parts = zip(b.unbind(-1), roots, factors, strict=True)
        return torch.stack([s * torch.cholesky_solve((s * v)[..., None], L)[..., 0] for v, s, L in parts], -1)

    def step(r: Tensor) -> Tensor:
        Gb = apply(problem.times(r))
        x = torch.cholesky_solve(Gb.sum(-1, keepdim=True), total)
        return (r - Gb + apply(x.expand_as(r))) / problem.lam

    return step


@final
@dataclasses.dataclass(frozen=True)
class Fit:
    """Where Newton's method stopped, per sample."""

    alpha: Tensor  # (batch, n) or (batch, n, classes), representer coefficients: f = k(·, X)α
    eta: Tensor  # of the same shape, canonical parameters at the coordinates
    residual: Tensor  # (batch,), ‖r‖ / max(‖T‖, 1)
    converged: Tensor  # (batch,), bool
    steps: int
    objective: Tensor  # (steps + 1, batch), J before every step and at the end
    error: Tensor  # (batch,), an estimate of max |η − η*| from the residual and the rounding behind it
    mean_error: Tensor  # (batch,), the same of max |A′(η) − A′(η*)|, over the largest |T| or 1

    def warn_if_unsolved(self) -> Self:
        """Return the fit; warn the caller's caller if a sample is farther from solved than rounding explains.

        A small residual is not enough: K/λ may make a large error of it, and of its rounding.
        """
        eta_error = self.error / self.eta.abs().flatten(1).amax(1).clamp(min=1)
        if not bool((self.residual <= torch.finfo(self.alpha.dtype).eps ** 0.5).all()):
            stopped = f"worst residual {self.residual.max().item():.1e} after {self.steps} steps"
        elif not bool(((eta_error <= ACCURATE[0]) & (self.mean_error <= ACCURATE[1])).all()):
            shares = f"{eta_error.max().item():.0e} of η and {self.mean_error.max().item():.0e} of the mean response"
            stopped = f"rounding leaves about {shares} uncertain"
        else:
            return self
        advice = "Raise `lam`, or choose a positive semi-definite kernel if it is not one."
        warnings.warn(f"The inner problem was not solved: {stopped}. {advice}", RuntimeWarning, stacklevel=3)
        return self


def newton(
    problem: Problem,
    *,
    linear_solver: LinearSolver = cholesky,
    tol: float = 1e-12,
    max_steps: int = 100,
    start: Tensor | None = None,
) -> Fit:
    """Minimise J from α = 0, or `start`, by IRWLS (12), damped, until ‖r‖ ≤ tol·max(‖T‖, 1) or rounding stops it.

    The step, `newton_step`, is halved, per sample, until J falls by a quarter of what its slope promises: J is convex,
    so Newton's method then converges from anywhere.
    """
    alpha = torch.zeros_like(problem.t) if start is None else start
    eta = problem.canonical(alpha)
    history = [problem.objective(alpha, eta)]
    if not bool(history[0].isfinite().all()):
        raise ValueError("The objective is not finite at the start; check the kernel, the offset and the targets.")
    residual = problem.residual(alpha, eta)
    scale = per_sample_norm(problem.t).clamp(min=1)
    active = torch.ones_like(scale, dtype=torch.bool)
    system: Callable[[Tensor], Tensor] | None = None
    at = scale  # the weights that the system is of
    for _ in range(max_steps):
        before = per_sample_norm(residual)
        active = active & (before > tol * scale)
        if not bool(active.any()):
            break
        weights = problem.weights(eta)
        if system is None or not torch.allclose(weights, at, rtol=STALE, atol=0):
            system, at = newton_system(problem, eta, linear_solver), weights
        alpha, eta, value = _line_search(problem, alpha, eta, history[-1], system(residual), residual, active)
        residual = problem.residual(alpha, eta)
        # a sample whose objective and residual both stand still has reached the floor of its dtype
        active = active & ((value < history[-1]) | (per_sample_norm(residual) < 0.5 * before))
        history.append(value)
    relative = per_sample_norm(residual) / scale
    floor = 1e3 * torch.finfo(alpha.dtype).eps
    error = mean_error = torch.zeros_like(relative)
    if system is not None:
        change = _estimate_error(problem, alpha, eta, residual, system)
        error, mean_error = ((size * change).flatten(1).amax(1) for size in (1, problem.weights(eta)))
    converged = relative <= max(tol, floor)
    largest = problem.t.abs().flatten(1).amax(1).clamp(min=1)
    return Fit(alpha, eta, relative, converged, len(history) - 1, torch.stack(history), error, mean_error / largest)


def _estimate_error(
    problem: Problem, alpha: Tensor, eta: Tensor, residual: Tensor, system: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return |δη| for one draw of the signs of what is uncertain in r, of the shape of η.

    That is r itself, the rounding of its terms, and D times the rounding of η = Kα. To first order δη = K(λI + DK)⁻¹δr.
    """
    root = problem.K.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    root = root[..., None] if problem.family.vector else root
    product = root * per_sample(per_sample_norm(root * alpha), alpha) + eta.abs()
    terms = problem.t.abs() + problem.family.mean(eta).abs() + problem.prior.slope(eta).abs()
    terms = terms + problem.lam * alpha.abs() + problem.weights(eta) * product
    signs = torch.randint(0, 2, alpha.shape[1:], generator=torch.Generator().manual_seed(0)).to(alpha) * 2 - 1
    uncertain = residual.abs() + torch.finfo(alpha.dtype).eps * terms
    return problem.times(system(signs * uncertain)).abs() + torch.finfo(alpha.dtype).eps * product


def _line_search(
    problem: Problem, alpha: Tensor, eta: Tensor, value: Tensor, p: Tensor, residual: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the longest step of 1, ½, ¼ … along p whose objective falls enough, per sample; none where none does."""
    Kp = problem.times(p)
    slope = -(residual * Kp).flatten(1).sum(-1)  # of J along p, never positive
    length = active.to(alpha.dtype)
    rounding = problem.rounding(alpha, eta)
    for _ in range(60):
        move = per_sample(length, p)
        trial, trial_eta = alpha + move * p, eta + move * Kp
        new = problem.objective(trial, trial_eta)
        refused = (length > 0) & ~(new <= value + 0.25 * length * slope + rounding)
        if not bool(refused.any()):
            break
        length = torch.where(refused, 0.5 * length, length)
    stay = refused | (length == 0)
    alpha, eta = (torch.where(per_sample(stay, p), old, moved) for old, moved in ((alpha, trial), (eta, trial_eta)))
    return alpha, eta, torch.where(stay, value, new)


@final
@dataclasses.dataclass(frozen=True)
class Posterior:
    """What is known about f after the fit: f(X2) ≈ N(mode, covariance), in canonical coordinates.

    Laplace's approximation; for the Gaussian family the Gaussian-process posterior itself.
    """

    mode: Tensor  # (…, m)
    covariance: Tensor  # (…, m, m)
    family: AbstractFamily

    @property
    def deviation(self) -> Tensor:
        """The standard deviation of f at each coordinate, (…, m)."""
        return self.covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()

    @property
    def mean(self) -> Tensor:
        """The response of the most probable f, (…, m)."""
        return self.family.response(self.mode)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the central interval of the mean response; as that is monotone in f, quantiles carry over exactly."""
        if not 0 < level < 1:
            raise ValueError(f"`level` must lie between 0 and 1, got {level}.")
        width = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=self.mode.dtype)).item() * self.deviation
        return self.family.response(self.mode - width), self.family.response(self.mode + width)


def posterior_covariance(problem: Problem, eta: Tensor, across: Tensor, prior: Tensor) -> Tensor:
    """Return Laplace's covariance of f(X2), (prior − across S(λI + SKS)⁻¹S acrossᵀ)/λ, (batch, m, m).

    `across` is k(X2, X), (m, n), and `prior` is k(X2, X2), (m, m).
    """
    s = problem.weights(eta).sqrt()
    factor = scaled_factor(problem.K, s, problem.lam)
    half = torch.linalg.solve_triangular(factor, (across * s[:, None, :]).mT, upper=False)
    return (prior - half.mT @ half) / problem.lam


def log_evidence(problem: Problem, eta: Tensor, objective: Tensor) -> Tensor:
    """Return log ∫ p(Y | f) p(f) df by Laplace's approximation, less Σ log h(y), (batch,); for the flat factor q.

    `eta` is the solution's, `objective` is J there. Differentiable in K, T and η.
    """
    n = problem.t.shape[1]
    if not problem.family.vector:
        factor = scaled_factor(problem.K, problem.weights(eta).sqrt(), problem.lam)
        return -objective - 0.5 * (_log_det(factor) - n * math.log(problem.lam))
    _, factors, total = _vector_factors(problem, eta)  # |I + K A″/λ| = Π|I + SKS/λ| · |λ Σ G| / Πc
    counts = problem.family.mean(eta).sum(-1).clamp(min=1e-30).log().sum(-1)
    log_det = sum(_log_det(factor) - n * math.log(problem.lam) for factor in factors)
    return -objective - 0.5 * (log_det + _log_det(total) + n * math.log(problem.lam) - counts)


def _log_det(factor: Tensor) -> Tensor:
    """Return log det of the matrix with this Cholesky factor."""
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
