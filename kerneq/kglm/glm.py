"""The kernel GLM: an exponential family whose canonical parameter is a function in a kernel's space.

`Problem` is what is minimised, kGLM's (5), for one kernel matrix and a batch of targets, and `newton` minimises it:

(5)  min over α   J(α) = 1ᵀ(A + Q)(η) − ηᵀT + ½λ αᵀKα,      η = Kα + m

A is the family's log-partition, Q = −log q the prior factor's penalty, m the offset, T the sufficient statistics.
`KernelGLM` is the model: fit, prediction, posterior, evidence, and the equilibrium layer that is the same function.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, Self, final

import torch
from torch import Tensor

from ..tensors import check_positive
from .equilibrium import GLMCell, KernelEquilibrium
from .families import FLAT, AbstractFamily, Prior
from .guarantee import certify
from .kernels import Truncated, as_kernel, coordinates, pixels


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
        p = newton_step(problem, eta, residual, linear_solver)
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


@final
class KernelGLM:
    """p(y | x) from `family` with η = f(x) + offset(x), f the most probable under the prior (4), q(f) exp(−λ‖f‖²_k/2).

    >>> glm = KernelGLM(SquaredExponential(0.5), Bernoulli(), lam=0.1).fit(X, Y)
    >>> glm.predict(X2)                       # the mean response at X2
    >>> layer = glm.as_equilibrium(X2)        # the same function of Y, as an equilibrium model

    The offset is that of Appendix H. X is (n,) or (n, d). Y may be (n,) or (batch, n): many data sets on the same
    coordinates, fitted together. The kernel may be one of ours, of scikit-learn or of GPyTorch, or any k(X, X2).
    """

    def __init__(
        self,
        kernel: Any,
        family: AbstractFamily,
        *,
        lam: float,
        prior: Prior = FLAT,
        offset: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        check_positive("lam", lam)
        if not isinstance(family, AbstractFamily):
            raise TypeError(f"`family` must be a family of `kerneq.kglm`, such as `Poisson()`, got {family!r}.")
        self.kernel, self.family, self.lam = as_kernel(kernel), family, float(lam)
        self.prior, self.offset = prior, offset
        self._state: tuple[Tensor, Problem, Fit, bool] | None = None

    @torch.no_grad()
    def fit(
        self, X: Tensor, Y: Tensor, *, linear_solver: LinearSolver = cholesky, tol: float = 1e-12, max_steps: int = 100
    ) -> Self:
        """Fit by Newton's method from f = 0; refuse targets outside the family's support and indefinite kernels.

        Where it stops before the minimum, as it may with an indefinite kernel or a λ of next to nothing, it warns.
        """
        # copies: what is predicted later is about these numbers, whatever becomes of the caller's
        X, Y, single = coordinates(X).clone(), Y.clone(), Y.ndim == 1
        problem = self.pose(X, Y[None] if single else Y)
        fit = newton(problem, linear_solver=linear_solver, tol=tol, max_steps=max_steps).warn_if_unsolved()
        self._state = X, problem, fit, single
        return self

    def pose(self, X: Tensor, Y: Tensor) -> Problem:
        """Return the inner problem of targets Y (batch, n) at X, (n, d) or (batch, n, d), with gradients."""
        if Y.ndim != 2 or Y.shape[1] != X.shape[-2]:
            raise ValueError(f"Targets must be (n,) or (batch, n) with n = {X.shape[-2]}, got {tuple(Y.shape)}.")
        t = self.family.statistic(Y.to(X.dtype))
        return Problem(self.covariance(X, X), t, self.family, self.lam, self.prior, self.offset_at(X))

    @property
    def problem(self) -> Problem:
        """The inner problem at the fitted coordinates."""
        return self._fitted[1]

    @property
    def result(self) -> Fit:
        """α, η, the objective's history and whether every sample converged."""
        return self._fitted[2]

    @torch.no_grad()
    def canonical(self, X2: Tensor | None = None) -> Tensor:
        """Return η = k(X2, X)α + offset(X2) (Theorem 7), (m,) or (batch, m); X2 defaults to the fitted coordinates."""
        X, _, fit, single = self._fitted
        eta = fit.eta
        if X2 is not None:
            X2 = coordinates(X2, like=X)
            eta = fit.alpha @ self.kernel(X2, X).mT + self.offset_at(X2)
        return eta[0] if single else eta

    def predict(self, X2: Tensor | None = None) -> Tensor:
        """Return the mean response at X2, (m,) or (batch, m): the expectation of y, A′(η) where T(y) = y."""
        return self.family.response(self.canonical(X2))

    @torch.no_grad()
    def posterior(self, X2: Tensor) -> Posterior:
        """Return Laplace's approximation of f(X2), of covariance (k(X2,X2) − k(X2,X) S(λI + SKS)⁻¹S k(X,X2))/λ."""
        X, problem, fit, single = self._fitted
        X2 = coordinates(X2, like=X)
        s = problem.weights(fit.eta).sqrt()
        factor = scaled_factor(problem.K, s, self.lam)
        half = torch.linalg.solve_triangular(factor, (self.kernel(X2, X) * s[:, None, :]).mT, upper=False)
        covariance = (self.kernel(X2, X2) - half.mT @ half) / self.lam
        return Posterior(self.canonical(X2), covariance[0] if single else covariance, self.family)

    @torch.no_grad()
    def log_evidence(self) -> Tensor:
        """Return log ∫ p(Y | f) p(f) df by Laplace, less Σ log h(y), per data set, to choose kernel and λ by."""
        _, problem, fit, single = self._fitted
        if not self.prior.flat:
            raise ValueError("The evidence needs a normalised prior: it is available for the flat factor q only.")
        factor = scaled_factor(problem.K, problem.weights(fit.eta).sqrt(), self.lam)
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        evidence = -fit.objective[-1] - 0.5 * (log_det - problem.t.shape[-1] * math.log(self.lam))
        return evidence[0] if single else evidence

    @torch.no_grad()
    def as_equilibrium(self, X2: Tensor | None = None, *, convolutional: bool = False) -> KernelEquilibrium:
        """Return the equilibrium model Y ↦ f*(X2; X, Y) (Corollary 6), whose `.guarantee` says what holds.

        X2 defaults to the fitted coordinates. `convolutional` needs a `Truncated` kernel on all pixels of an image.
        """
        X, problem, _, _ = self._fitted
        if not convolutional:
            drive = problem.t @ problem.K / self.lam + problem.offset
            return self.layer(X, X if X2 is None else coordinates(X2, like=X), drive=drive)
        if not isinstance(self.kernel, Truncated) or X2 is not None:
            raise ValueError("The convolutional form needs a `Truncated` kernel and predicts at its own pixels.")
        K = self.kernel.filters().to(X)
        size = _image_size(X, len(K))
        m = self.offset_at(X).view(len(K), *size)
        return self._closed_form(K, K, m, m, size=size)

    @torch.no_grad()
    def layer(self, X: Tensor, X2: Tensor, *, drive: Tensor | None = None) -> KernelEquilibrium:
        """Return (7) and (8) of Theorem 3 for coordinates (n, d) and (m, d), any targets; `drive` as in `certify`."""
        m, m2 = self.offset_at(X), self.offset_at(X2)
        return self._closed_form(self.kernel(X, X), self.kernel(X2, X), m, m2, drive=drive)

    def _closed_form(
        self,
        K: Tensor,
        K2: Tensor,
        m: Tensor,
        m2: Tensor,
        size: tuple[int, int] | None = None,
        drive: Tensor | None = None,
    ) -> KernelEquilibrium:
        """Return the layer with W₁ = W₃ = −K/λ, W₂ = K/λ and V₁ = −K2/λ, V₂ = K2/λ, matrices or filters."""
        guarantee = certify(K, self.lam, self.family, self.prior, size=size, drive=drive)
        cell = GLMCell(K / self.lam, m, self.family, self.prior)
        return KernelEquilibrium(cell, K2 / self.lam, m2, guarantee)

    def covariance(self, X: Tensor, X2: Tensor) -> Tensor:
        """Return k(X, X2), (n, m); for batches of coordinates one matrix each, (batch, n, m)."""
        if X.ndim == X2.ndim == 2:
            return self.kernel(X, X2)
        return torch.stack([self.kernel(x, x2) for x, x2 in zip(X, X2, strict=True)])

    def offset_at(self, X: Tensor) -> Tensor:
        """Return offset(X), (n,) or (batch, n); zero where there is none."""
        if self.offset is None:
            return X.new_zeros(X.shape[:-1])
        return self.offset(X.flatten(0, -2)).reshape(X.shape[:-1])

    @property
    def _fitted(self) -> tuple[Tensor, Problem, Fit, bool]:
        if self._state is None:
            raise RuntimeError("This kernel GLM has no data yet; call `fit(X, Y)` first.")
        return self._state


def _image_size(X: Tensor, channels: int) -> tuple[int, int]:
    """Return height and width of the image whose pixels, all of them and in order, are the coordinates X."""
    height, width = (int(X[:, axis].max().clamp(min=-1).item()) + 1 for axis in (0, 1))
    if not torch.equal(X, pixels(height, width, channels).to(X)):
        order = "in the order of `kerneq.kglm.pixels(height, width, channels)`"
        raise ValueError(f"The convolutional form needs every pixel of an image as coordinates, {order}.")
    return height, width
