"""The kernel GLM: an exponential family whose canonical parameter is a function in a kernel's space."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self, final

import torch
from torch import Tensor

from .equilibrium import KernelEquilibrium, convolutional_form, dense_form
from .families import AbstractFamily
from .kernels import Truncated, as_kernel, coordinates
from .problem import FLAT, Fit, LinearSolver, Prior, Problem, cholesky, newton, scaled_factor


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
        """A′ at the mode: the response of the most probable f, (…, m)."""
        return self.family.mean(self.mode)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval of the mean response: A′ is monotone, so it carries quantiles over exactly."""
        if not 0 < level < 1:
            raise ValueError(f"`level` must lie between 0 and 1, got {level}.")
        width = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=self.mode.dtype)).item() * self.deviation
        return self.family.mean(self.mode - width), self.family.mean(self.mode + width)


@final
class KernelGLM:
    """p(y | x) from `family` with η = f(x) + offset(x), f the most probable under q(f) exp(−λ‖f‖²_k/2).

    >>> glm = KernelGLM(SquaredExponential(0.5), Bernoulli(), lam=0.1).fit(X, Y)
    >>> glm.predict(X2)                       # the mean response A′(f(X2))
    >>> layer = glm.as_equilibrium(X2)        # the same function of Y, as an equilibrium model

    X is (n,) or (n, d). Y may be (n,) or (batch, n): many data sets on the same coordinates, fitted together. The
    kernel may be one of ours, of scikit-learn or of GPyTorch, or any function k(X, X2).
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
        if not 0 < lam < math.inf:
            raise ValueError(f"`lam` must be positive and finite, got {lam}.")
        self.kernel, self.family, self.lam = as_kernel(kernel), family, float(lam)
        self.prior, self.offset = prior, offset
        self._state: tuple[Tensor, Problem, Fit, bool] | None = None

    @torch.no_grad()
    def fit(
        self,
        X: Tensor,
        Y: Tensor,
        *,
        linear_solver: LinearSolver = cholesky,
        tol: float = 1e-12,
        max_steps: int = 50,
    ) -> Self:
        """Newton's method from f = 0; refuses targets outside the family's support and indefinite kernels."""
        X = coordinates(X)
        single, Y = Y.ndim == 1, (Y[None] if Y.ndim == 1 else Y).to(X.dtype)
        if Y.ndim != 2 or Y.shape[1] != X.shape[0]:
            raise ValueError(f"Targets must be (n,) or (batch, n) with n = {X.shape[0]}, got {tuple(Y.shape)}.")
        m = None if self.offset is None else self._offset(X)
        problem = Problem(self.kernel(X, X), self.family.statistic(Y), self.family, self.lam, self.prior, m)
        fit = newton(problem, linear_solver=linear_solver, tol=tol, max_steps=max_steps)
        self._state = X, problem, fit, single
        return self

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
        """η = k(X2, X)α + offset(X2), (m,) or (batch, m); X2 defaults to the fitted coordinates."""
        X, _, fit, single = self._fitted
        eta = fit.eta
        if X2 is not None:
            X2 = coordinates(X2).to(X.dtype)
            eta = fit.alpha @ self.kernel(X2, X).mT + self._offset(X2)
        return eta[0] if single else eta

    def predict(self, X2: Tensor | None = None) -> Tensor:
        """The mean response A′(η) at X2, (m,) or (batch, m)."""
        return self.family.mean(self.canonical(X2))

    @torch.no_grad()
    def posterior(self, X2: Tensor) -> Posterior:
        """Laplace's approximation of f(X2): covariance (k(X2,X2) − k(X2,X) S(λI + SKS)⁻¹S k(X,X2)) / λ."""
        X, problem, fit, single = self._fitted
        X2 = coordinates(X2).to(X.dtype)
        s = problem.weights(fit.eta).sqrt()
        factor = scaled_factor(problem.K, s, self.lam)
        half = torch.linalg.solve_triangular(factor, (self.kernel(X2, X) * s[:, None, :]).mT, upper=False)
        covariance = (self.kernel(X2, X2) - half.mT @ half) / self.lam
        return Posterior(self.canonical(X2), covariance[0] if single else covariance, self.family)

    @torch.no_grad()
    def log_evidence(self) -> Tensor:
        """log ∫ p(Y | f) p(f) df by Laplace, less Σ log h(y), per data set: to choose kernel and λ by."""
        _, problem, fit, single = self._fitted
        if not self.prior.flat:
            raise ValueError("The evidence needs a normalised prior: it is available for the flat factor q only.")
        factor = scaled_factor(problem.K, problem.weights(fit.eta).sqrt(), self.lam)
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        evidence = -fit.objective[-1] - 0.5 * (log_det - problem.t.shape[-1] * math.log(self.lam))
        return evidence[0] if single else evidence

    @torch.no_grad()
    def as_equilibrium(self, X2: Tensor | None = None, *, convolutional: bool = False) -> KernelEquilibrium:
        """The equilibrium model Y ↦ f*(X2; X, Y) with the closed-form weights; `.guarantee` says what holds.

        X2 defaults to the fitted coordinates. `convolutional` needs a `Truncated` kernel on all pixels of an image.
        """
        X, problem, _, _ = self._fitted
        if convolutional:
            if not isinstance(self.kernel, Truncated) or X2 is not None:
                raise ValueError("The convolutional form needs a `Truncated` kernel and predicts at its own pixels.")
            return convolutional_form(problem, self.kernel, X)
        X2 = X if X2 is None else coordinates(X2).to(X.dtype)
        return dense_form(problem, self.kernel(X2, X), self._offset(X2))

    def _offset(self, X: Tensor) -> Tensor:
        """offset(X), (n,); zero where there is none."""
        return X.new_zeros(len(X)) if self.offset is None else self.offset(X).reshape(-1)

    @property
    def _fitted(self) -> tuple[Tensor, Problem, Fit, bool]:
        if self._state is None:
            raise RuntimeError("This kernel GLM has no data yet; call `fit(X, Y)` first.")
        return self._state
