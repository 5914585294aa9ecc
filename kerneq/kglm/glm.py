"""The kernel GLM: an exponential family whose canonical parameter is a function in a kernel's space.

`KernelGLM` is the model: fit, prediction, posterior, evidence, and the equilibrium layer that is the same function.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor

from ..tensors import check_positive
from .equilibrium import FeatureEquilibrium, GLMCell, KernelEquilibrium
from .exact import Fit, LinearSolver, Posterior, Problem, cholesky, log_evidence, newton, posterior_covariance
from .families import FLAT, AbstractFamily, Prior, Weighted
from .guarantee import check_assumptions
from .kernels import FunctionKernel, Truncated, as_kernel, coordinates, pixels
from .lowrank import AbstractLowRank, Rows
from .reduced import (
    FitProgress,
    Group,
    Reduced,
    ReducedFit,
    ReducedProblem,
    minimise_reduced,
    offset_of,
    open_design,
)


@final
class KernelGLM:
    """p(y | x) from `family` with η = f(x) + offset(x), f the most probable under the prior (4), q(f) exp(−λ‖f‖²_k/2).

    >>> glm = KernelGLM(SquaredExponential(0.5), Bernoulli(), lam=0.1).fit(X, Y)
    >>> glm.predict(X2)                       # the mean response at X2
    >>> layer = glm.as_equilibrium(X2)        # the same function of Y, as an equilibrium model

    The offset is that of Appendix H, whose factor in front of f is the kernel `Scaled`. X is (n,) or (n, d). Y may be
    (n,) or (batch, n): many data sets on the same coordinates, fitted together. The kernel may be one of ours, of
    scikit-learn or of GPyTorch, or any k(X, X2). With a `Categorical` family predictions have a last dimension of
    classes: (n, classes) or (batch, n, classes).
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
        self._reduced: Reduced | None = None  # in place of `_state`, where the kernel has low rank

    def covariance(self, X: Tensor, X2: Tensor) -> Tensor:
        """Return k(X, X2), (n, m); for batches of coordinates one matrix each, (batch, n, m)."""
        if X.ndim == X2.ndim == 2:
            return self.kernel(X, X2)
        return torch.stack([self.kernel(x, x2) for x, x2 in zip(X, X2, strict=True)])

    def offset_at(self, X: Tensor) -> Tensor:
        """Return offset(X), (n,) or (batch, n); zero where there is none. For vectors (n, 1) or (n, classes)."""
        rows = X.shape[:-1]
        if self.offset is None:
            return X.new_zeros(*rows, *[1] * self.family.vector)
        found = self.offset(X.flatten(0, -2))
        return found.reshape(*rows, -1) if self.family.vector else found.reshape(rows)

    def pose(self, X: Tensor, Y: Tensor, weights: Tensor | None = None, offset: Tensor | None = None) -> Problem:
        """Return the inner problem of targets Y (batch, n) at X, (n, d) or (batch, n, d), with gradients.

        `weights` and `offset`, (n,), are those of `fit`.
        """
        n = X.shape[-2]
        if Y.ndim != 2 or Y.shape[1] != n:
            raise ValueError(f"Targets must be (n,) or (batch, n) with n = {n}, got {tuple(Y.shape)}.")
        Y = Y.to(X.dtype)
        if not bool(X.isfinite().all()) or not bool(Y.isfinite().all()):
            raise ValueError("Coordinates and targets must be finite: remove the samples with NaN or infinite values.")
        family, m = self.family.for_targets(Y), self.offset_at(X)
        if weights is not None:
            family = Weighted(family, self._per_sample("weights", weights, n, X))
        if offset is not None:
            m = m + self._per_sample("offset", offset, n, X)
        t = family.statistic(Y)
        return Problem(self.covariance(X, X), t, family, self.lam, self.prior, m)

    def _per_sample(self, name: str, values: Tensor, n: int, like: Tensor) -> Tensor:
        """Return one number per sample, (n,); (n, 1) for a family of vectors."""
        if values.shape != (n,) or not bool(values.isfinite().all()):
            raise ValueError(f"`{name}` must be {n} finite numbers, one per sample, got shape {tuple(values.shape)}.")
        return values.to(like)[:, None] if self.family.vector else values.to(like)

    @torch.no_grad()
    def fit(
        self,
        X: Rows,
        Y: Tensor,
        *,
        weights: Tensor | None = None,
        offset: Tensor | None = None,
        linear_solver: LinearSolver = cholesky,
        tol: float | None = None,
        max_steps: int = 100,
        group: Group | None = None,
        checkpoint: str | Path | None = None,
        progress: Callable[[FitProgress], object] | None = None,
    ) -> Self:
        """Fit by Newton's method from f = 0; refuse targets outside the family's support and indefinite kernels.

        `weights` (n,) count samples more or less than once; `offset` (n,) is added to η there, such as the logarithm
        of a Poisson count's exposure. The problem is solved in float64, whatever the dtype of X, which is that of the
        predictions (a kernel that is a function of your own is evaluated in the dtype of X). Where the solution is not
        found, or rounding makes it uncertain, as with an indefinite kernel or a λ of next to nothing, it warns.

        A kernel of low rank (`Nystrom`, `RandomFeatures`) is fitted in its features, in the dtype of X with sums in
        float64, and X may be a NumPy memmap, read block by block and not copied. Only there: with a `group` of
        `torch.distributed` every process has rows of its own; a fit that was interrupted goes on from the file
        `checkpoint`, which is written after every step; and `progress` is called then, for example `print`. `tol`
        bounds ‖r‖ of the exact fit (1e-12), the square root of what is left of J's fall of the other (1e-6).
        """
        self._state = self._reduced = None
        if len(X) == 0:
            raise ValueError("A fit needs one sample at least.")
        if isinstance(self.kernel, AbstractLowRank):
            problem = self._pose_reduced(self.kernel, X, Y, weights, offset, group)
            file = None if checkpoint is None else Path(checkpoint)
            tol = 1e-6 if tol is None else tol
            reduced = minimise_reduced(problem, tol=tol, max_steps=max_steps, checkpoint=file, progress=progress)
            self._reduced = Reduced(problem, reduced.warn_if_unsolved(), self.offset_at, Y.ndim == 1)
            return self
        if not isinstance(X, Tensor) or group is not None or checkpoint is not None or progress is not None:
            raise ValueError(
                "Arrays, `group`, `checkpoint` and `progress` need a kernel of low rank, such as `Nystrom`."
            )
        # copies: what is predicted later is about these numbers, whatever becomes of the caller's
        X, Y, single = coordinates(X).clone(), Y.clone(), Y.ndim == 1
        wide = X if isinstance(self.kernel, FunctionKernel) else X.double()
        posed = self.pose(wide, Y[None] if single else Y, weights, offset)
        K, t, m = posed.K.double(), posed.t.double(), torch.as_tensor(posed.offset).double()
        posed = dataclasses.replace(posed, K=K, t=t, offset=m)
        exact = newton(posed, linear_solver=linear_solver, tol=1e-12 if tol is None else tol, max_steps=max_steps)
        self._state = X, posed, exact.warn_if_unsolved(), single
        return self

    def _pose_reduced(
        self,
        plan: AbstractLowRank,
        X: Rows,
        Y: Tensor,
        weights: Tensor | None,
        offset: Tensor | None,
        group: Group | None,
    ) -> ReducedProblem:
        """Return the problem in features of the arguments of `fit`."""
        n, outputs = len(X), Y[None] if Y.ndim == 1 else Y
        if outputs.ndim != 2 or outputs.shape[1] != n or (self.family.vector and len(outputs) > 1):
            shape = "(n,)" if self.family.vector else "(n,) or (batch, n)"
            raise ValueError(f"Targets must be {shape} with n = {n}, got {tuple(Y.shape)}.")
        design = open_design(plan, X[:, None] if X.ndim == 1 else X, self.lam, group)
        Y = outputs.mT.to(design.like.device).double()
        if not bool(Y.isfinite().all()):
            raise ValueError("Targets must be finite: remove the samples with NaN or infinite values.")
        family = self.family.for_targets(design.largest(Y.max().reshape(1)))
        m = offset_of(design.X, design.like, self.offset_at)
        if weights is not None:
            family = Weighted(family, self._per_sample("weights", weights, n, Y).reshape(n, 1))
        if offset is not None:
            m = m + self._per_sample("offset", offset, n, Y).reshape(n, 1)
        t = family.statistic(Y[:, 0] if family.vector else Y)
        return ReducedProblem(design, t, family, self.lam, self.prior, m)

    @torch.no_grad()
    def refit(self, lam: float, *, max_steps: int = 100) -> "KernelGLM":
        """Return the kernel GLM of another λ for the same data, fitted from the solution that is known.

        The coordinates of a low-rank kernel, its features and, where they are kept, k(X, C) are those of this one.
        """
        other = KernelGLM(self.kernel, self.family, lam=lam, prior=self.prior, offset=self.offset)
        if self._reduced is not None:
            problem = dataclasses.replace(self._reduced.problem, lam=lam)
            fit = minimise_reduced(problem, start=self._reduced.fit.w, max_steps=max_steps).warn_if_unsolved()
            other._reduced = dataclasses.replace(self._reduced, problem=problem, fit=fit)
        else:
            X, posed, exact, single = self._fitted
            posed = dataclasses.replace(posed, lam=lam)
            other._state = X, posed, newton(posed, start=exact.alpha, max_steps=max_steps).warn_if_unsolved(), single
        return other

    def path(
        self,
        X: Rows,
        Y: Tensor,
        lams: Sequence[float],
        *,
        weights: Tensor | None = None,
        offset: Tensor | None = None,
        validation: tuple[Any, ...] | None = None,
        patience: int = 2,
    ) -> "FitPath":
        """Fit the regularisation path, from the largest λ down, each from the solution before.

        With held-out data, the arguments of `loss`, it ends early: once `patience` values of λ have not improved that.
        """
        models: list[KernelGLM] = []
        losses: list[float] = []
        for lam in sorted(lams, reverse=True):
            if models:
                models.append(models[-1].refit(lam))
            else:
                first = KernelGLM(self.kernel, self.family, lam=lam, prior=self.prior, offset=self.offset)
                models.append(first.fit(X, Y, weights=weights, offset=offset))
            if validation is not None:
                losses.append(models[-1].loss(*validation))
                if len(losses) - 1 - losses.index(min(losses)) >= patience:
                    break
        return FitPath(models, losses)

    @torch.no_grad()
    def loss(self, X2: Rows, Y2: Tensor, offset: Tensor | None = None) -> float:
        """Return the mean of −log p(y | f) over samples, less log h(y), at X2; the offset as in `canonical`."""
        eta = self.canonical(X2, offset=offset)
        family = self.family.for_targets(torch.arange(eta.shape[-1])) if self.family.vector else self.family
        t = family.statistic(Y2.to(eta.dtype))
        linear = (eta * t).sum(-1) if family.vector else eta * t
        return (family.log_partition(eta) - linear).mean().item()

    @property
    def _fitted(self) -> tuple[Tensor, Problem, Fit, bool]:
        """The coordinates, the problem, its solution, and whether the targets were those of one data set."""
        if self._reduced is not None:
            raise ValueError("A kernel of low rank has no exact problem of n × n numbers: ask `glm.reduced`.")
        if self._state is None:
            raise RuntimeError("This kernel GLM has no data yet; call `fit(X, Y)` first.")
        return self._state

    @property
    def reduced(self) -> Reduced:
        """The fit in features, of a kernel of low rank: `.features`, `.problem`, `.approximation()`."""
        if self._reduced is None:
            raise RuntimeError(
                "This kernel GLM has no fit in features: give it a `Nystrom` kernel and call `fit(X, Y)`."
            )
        return self._reduced

    @property
    def problem(self) -> Problem:
        """The inner problem at the fitted coordinates."""
        return self._fitted[1]

    @property
    def result(self) -> Fit | ReducedFit:
        """α, or w of the features, η, the objective's history and whether every sample converged."""
        if self._reduced is not None:
            return self._reduced.fit
        return self._fitted[2]

    @torch.no_grad()
    def canonical(self, X2: Rows | None = None, *, offset: Tensor | None = None) -> Tensor:
        """Return η = k(X2, X)α + offset(X2) (Theorem 7), (m,) or (batch, m); X2 defaults to the fitted coordinates.

        A further `offset`, (m,), is added as in `fit`; the fitted coordinates have theirs already.
        """
        if self._reduced is not None:
            eta = self._reduced.fit.eta if X2 is None else self._reduced.canonical(X2)
            if offset is not None:
                eta = eta + self._per_sample("offset", offset, len(eta), eta).reshape(-1, 1)
            return self._reduced.shape(eta)
        X, _, fit, single = self._fitted
        eta = fit.eta
        if X2 is not None:
            X2 = coordinates(torch.as_tensor(X2), like=X)
            across = self._across(X2, X)
            eta = across @ fit.alpha if self.family.vector else fit.alpha @ across.mT
            eta = eta + self.offset_at(X2)
        if offset is not None:
            eta = eta + self._per_sample("offset", offset, eta.shape[1], eta)
        return (eta[0] if single else eta).to(X.dtype)

    def _across(self, X2: Tensor, X: Tensor) -> Tensor:
        """Return k(X2, X) in float64, as `fit` evaluated k(X, X)."""
        if isinstance(self.kernel, FunctionKernel):
            return self.kernel(X2, X).double()
        return self.kernel(X2.double(), X.double())

    def predict(self, X2: Rows | None = None, *, offset: Tensor | None = None) -> Tensor:
        """Return the mean response at X2, (m,) or (batch, m): the expectation of y, A′(η) where T(y) = y.

        Of a `Categorical` family the probabilities, (m, classes) or (batch, m, classes). `offset` as in `canonical`.
        """
        return self.family.response(self.canonical(X2, offset=offset))

    @torch.no_grad()
    def posterior(self, X2: Tensor) -> Posterior:
        """Return Laplace's approximation of f(X2)."""
        if self.family.vector:
            raise ValueError("The posterior is available for families of one canonical parameter, not Categorical.")
        if self._reduced is not None:
            return self._reduced.posterior(X2)
        X, problem, fit, single = self._fitted
        X2 = coordinates(X2, like=X)
        covariance = posterior_covariance(problem, fit.eta, self._across(X2, X), self._across(X2, X2)).to(X.dtype)
        return Posterior(self.canonical(X2), covariance[0] if single else covariance, self.family)

    @torch.no_grad()
    def log_evidence(self) -> Tensor:
        """Return log ∫ p(Y | f) p(f) df by Laplace, less Σ log h(y), per data set, to choose kernel and λ by."""
        if not self.prior.flat:
            raise ValueError("The evidence needs a normalised prior: it is available for the flat factor q only.")
        if self._reduced is not None:
            return self._reduced.log_evidence()
        _, problem, fit, single = self._fitted
        evidence = log_evidence(problem, fit.eta, fit.objective[-1])
        return evidence[0] if single else evidence

    @torch.no_grad()
    def as_equilibrium(
        self, X2: Tensor | None = None, *, convolutional: bool = False
    ) -> KernelEquilibrium | FeatureEquilibrium:
        """Return the equilibrium model Y ↦ f*(Y; X, X2) (Corollary 6), whose `.guarantee` says what holds.

        X2 defaults to the fitted coordinates. `convolutional` needs a `Truncated` kernel on all pixels of an image. Of
        a kernel of low rank it is an equilibrium of r numbers, not of n.
        """
        if self._reduced is not None and not convolutional:
            return self._reduced.layer(X2)
        X, problem, _, _ = self._fitted
        m = torch.as_tensor(problem.offset).to(X)
        if not convolutional:
            X2 = X if X2 is None else coordinates(X2, like=X)
            drive = problem.times(problem.t) / self.lam + problem.offset
            m2 = m if X2 is X else self.offset_at(X2)
            return self._closed_form(self.kernel(X, X), self.kernel(X2, X), m, m2, family=problem.family, drive=drive)
        if not isinstance(self.kernel, Truncated) or X2 is not None or problem.family is not self.family:
            needs = "a `Truncated` kernel and one number per sample without weights, and predicts at its own pixels"
            raise ValueError(f"The convolutional form needs {needs}.")
        K = self.kernel.filters().to(X)
        size = _image_size(X, len(K))
        m = m.view(len(K), *size)
        return self._closed_form(K, K, m, m, family=self.family, size=size)

    @torch.no_grad()
    def layer(self, X: Tensor, X2: Tensor) -> KernelEquilibrium:
        """Return (7) and (8) of Theorem 3 for coordinates (n, d), (m, d)."""
        m, m2 = self.offset_at(X), self.offset_at(X2)
        return self._closed_form(self.kernel(X, X), self.kernel(X2, X), m, m2, family=self.family)

    def _closed_form(
        self,
        K: Tensor,
        K2: Tensor,
        m: Tensor,
        m2: Tensor,
        *,
        family: AbstractFamily,
        size: tuple[int, int] | None = None,
        drive: Tensor | None = None,
    ) -> KernelEquilibrium:
        """Return the layer with W₁ = W₃ = −K/λ, W₂ = K/λ and V₁ = −K2/λ, V₂ = K2/λ, matrices or filters."""
        guarantee = check_assumptions(K, self.lam, family, self.prior, size=size, drive=drive)
        cell = GLMCell(K / self.lam, m, family, self.prior)
        return KernelEquilibrium(cell, K2 / self.lam, m2, guarantee)


@final
@dataclasses.dataclass(frozen=True)
class FitPath:
    """Kernel GLMs of falling λ, and the held-out loss of each, if there was held-out data."""

    models: list[KernelGLM]
    losses: list[float]

    @property
    def best(self) -> KernelGLM:
        """The model of the least held-out loss; without held-out data the last."""
        return self.models[self.losses.index(min(self.losses))] if self.losses else self.models[-1]


def _image_size(X: Tensor, channels: int) -> tuple[int, int]:
    """Return height and width of the image whose pixels, all of them and in order, are the coordinates X."""
    height, width = (int(X[:, axis].max().clamp(min=-1).item()) + 1 for axis in (0, 1))
    if not torch.equal(X, pixels(height, width, channels).to(X)):
        order = "in the order of `kerneq.kglm.pixels(height, width, channels)`"
        raise ValueError(f"The convolutional form needs every pixel of an image as coordinates, {order}.")
    return height, width
