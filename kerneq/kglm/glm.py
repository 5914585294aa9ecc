"""The kernel GLM: an exponential family whose canonical parameter is a function in a reproducing kernel space."""

import math
from collections.abc import Callable
from typing import Any, Self, final

import torch
from torch import Tensor

from kerneq.kglm import posterior as laplace
from kerneq.kglm.adapter import as_kernel
from kerneq.kglm.family import AbstractFamily
from kerneq.kglm.kernels import coordinates
from kerneq.kglm.newton import Fit, newton
from kerneq.kglm.posterior import Posterior
from kerneq.kglm.prior import AbstractPrior, Flat
from kerneq.kglm.problem import Problem
from kerneq.kglm.system import AbstractSystem, Cholesky

Mean = Callable[[Tensor], Tensor]


@final
class KernelGLM:
    """p(y | x) from `family` with η = f(x) + offset(x), f the maximum a posteriori under q(f) exp(−λ‖f‖²_k/2).

    >>> glm = KernelGLM(SquaredExponential(0.5), Bernoulli(), lam=0.1).fit(X, Y)
    >>> glm.predict(X2)                       # the mean response A′(f(X2))
    >>> layer = glm.as_equilibrium(X2)        # the same function of Y, as an equilibrium model

    Y may be (n,) or (batch, n): many data sets on the same coordinates, fitted together.
    """

    def __init__(
        self,
        kernel: Any,
        family: AbstractFamily,
        *,
        lam: float,
        prior: AbstractPrior = Flat(),
        offset: Mean | None = None,
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
        system: AbstractSystem = Cholesky(),
        tol: float = 1e-12,
        max_steps: int = 50,
    ) -> Self:
        """Newton's method from f = 0; raises only if the data are outside the family's support or the kernel indefinite."""
        X = coordinates(X)
        single, Y = Y.ndim == 1, torch.atleast_2d(Y).to(X.dtype)
        if Y.ndim != 2 or Y.shape[1] != X.shape[0]:
            raise ValueError(
                f"Targets must be (n,) or (batch, n) with n = {X.shape[0]}, got {tuple(Y.shape)}."
            )
        K = self.kernel(X, X)
        m = None if self.offset is None else self.offset(X).reshape(-1)
        problem = Problem(K, self.family.statistic(Y), self.family, self.lam, self.prior, m)
        self._state = X, problem, newton(problem, system=system, tol=tol, max_steps=max_steps), single
        return self

    @property
    def coordinates(self) -> Tensor:
        return self._fitted[0]

    @property
    def problem(self) -> Problem:
        return self._fitted[1]

    @property
    def result(self) -> Fit:
        """α, η, the objective's history and whether every sample converged."""
        return self._fitted[2]

    @torch.no_grad()
    def canonical(self, X2: Tensor | None = None) -> Tensor:
        """η at X2 (default: at the fitted coordinates), k(X2, X)α + offset(X2)."""
        X, _, fit, single = self._fitted
        if X2 is None:
            eta = fit.eta
        else:
            X2 = coordinates(X2).to(X.dtype)
            eta = fit.alpha @ self.kernel(X2, X).mT
            eta = eta if self.offset is None else eta + self.offset(X2).reshape(-1)
        return eta[0] if single else eta

    def predict(self, X2: Tensor | None = None) -> Tensor:
        """The mean response A′(η) at X2."""
        return self.family.mean(self.canonical(X2))

    @torch.no_grad()
    def posterior(self, X2: Tensor) -> Posterior:
        """Laplace's approximation of f(X2); for the Gaussian family the Gaussian-process posterior itself."""
        X, problem, fit, single = self._fitted
        X2 = coordinates(X2).to(X.dtype)
        cov = laplace.covariance(problem, fit, self.kernel(X2, X), self.kernel(X2, X2))
        return Posterior(self.canonical(X2), cov[0] if single else cov, self.family)

    @torch.no_grad()
    def log_evidence(self) -> Tensor:
        """Laplace's approximation of log p(Y) less Σ log h(y): larger is better, for choosing kernel and λ."""
        evidence = laplace.log_evidence(self.problem, self.result)
        return evidence[0] if self._fitted[3] else evidence

    @property
    def _fitted(self) -> tuple[Tensor, Problem, Fit, bool]:
        if self._state is None:
            raise RuntimeError("This kernel GLM has no data yet; call `fit(X, Y)` first.")
        return self._state
