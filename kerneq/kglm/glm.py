"""The kernel GLM: an exponential family whose canonical parameter is a function in a kernel's space."""

import math
from collections.abc import Callable
from typing import Any, Self, final

import torch
from torch import Tensor

from kerneq.kglm import closed_form
from kerneq.kglm import posterior as laplace
from kerneq.kglm.adapter import as_kernel
from kerneq.kglm.convolution import Truncated
from kerneq.kglm.family import AbstractFamily
from kerneq.kglm.kernels import coordinates
from kerneq.kglm.layer import KernelEquilibrium
from kerneq.kglm.newton import Fit, newton
from kerneq.kglm.posterior import Posterior
from kerneq.kglm.prior import FLAT, AbstractPrior
from kerneq.kglm.problem import Problem
from kerneq.kglm.system import CHOLESKY, AbstractSystem

Mean = Callable[[Tensor], Tensor]


@final
class KernelGLM:
    """p(y | x) from `family` with η = f(x) + offset(x), f the most probable under q(f) exp(−λ‖f‖²_k/2).

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
        prior: AbstractPrior = FLAT,
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
        system: AbstractSystem = CHOLESKY,
        tol: float = 1e-12,
        max_steps: int = 50,
    ) -> Self:
        """Newton's method from f = 0; refuses targets outside the family's support and indefinite kernels."""
        X = coordinates(X)
        single, Y = Y.ndim == 1, (Y[None] if Y.ndim == 1 else Y).to(X.dtype)
        if Y.ndim != 2 or Y.shape[1] != X.shape[0]:
            raise ValueError(f"Targets must be (n,) or (batch, n) with n = {X.shape[0]}, got {tuple(Y.shape)}.")
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
        """Laplace's approximation of log p(Y) less Σ log h(y), to choose kernel and λ by."""
        evidence = laplace.log_evidence(self.problem, self.result)
        return evidence[0] if self._fitted[3] else evidence

    @torch.no_grad()
    def as_equilibrium(self, X2: Tensor | None = None, *, convolutional: bool = False) -> KernelEquilibrium:
        """The equilibrium model Y ↦ f*(X2; X, Y) with the closed-form weights; `.guarantee` says what holds.

        X2 defaults to the fitted coordinates. `convolutional` needs a `Truncated` kernel on all pixels of
        an image.
        """
        X, problem, _, _ = self._fitted
        if convolutional:
            if not isinstance(self.kernel, Truncated) or X2 is not None:
                raise ValueError("The convolutional form needs a `Truncated` kernel and predicts at its own pixels.")
            size = closed_form.grid_size(X, len(self.kernel.squared_lengthscales))
            return closed_form.convolutional(problem, self.kernel, size)
        X2 = X if X2 is None else coordinates(X2).to(X.dtype)
        offset = X2.new_zeros(len(X2)) if self.offset is None else self.offset(X2).reshape(-1)
        return closed_form.dense(problem, self.kernel(X2, X), offset)

    @property
    def _fitted(self) -> tuple[Tensor, Problem, Fit, bool]:
        if self._state is None:
            raise RuntimeError("This kernel GLM has no data yet; call `fit(X, Y)` first.")
        return self._state
