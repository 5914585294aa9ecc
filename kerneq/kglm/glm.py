"""The kernel GLM: an exponential family whose canonical parameter is a function in a kernel's space.

`KernelGLM` is the model: fit, prediction, posterior, evidence, and the equilibrium layer that is the same function.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor

from ..tensors import check_positive
from .design import BLOCK, Approximation, Design, Group, open_design
from .equilibrium import FeatureCell, FeatureEquilibrium, GLMCell, KernelEquilibrium
from .exact import Gram
from .families import FLAT, AbstractFamily, Prior, Weighted
from .guarantee import check_assumptions
from .kernels import FunctionKernel, Truncated, as_kernel, coordinates, pixels
from .lowrank import AbstractLowRank, Features
from .newton import Fit, FitProgress, Posterior, Problem, newton
from .rows import Rows, read_rows


@final
@dataclasses.dataclass(frozen=True)
class Fitted:
    """What a fit leaves behind."""

    X: Rows
    problem: Problem
    fit: Fit
    single: bool  # whether the targets were those of one data set

    @property
    def like(self) -> Tensor:
        """A tensor (0, d) with the dtype and the device of predictions."""
        return self.problem.basis.like if isinstance(self.problem.basis, Design) else torch.as_tensor(self.X)[:0]

    def unbatch(self, values: Tensor) -> Tensor:
        """Return numbers of each data set, (batch, …), as the targets were given."""
        return values[0] if self.single else values


@final
@dataclasses.dataclass(frozen=True)
class Reduced:
    """The fit of a kernel of low rank: its features, and what they miss."""

    design: Design
    problem: Problem
    fit: Fit

    @property
    def features(self) -> Features:
        """φ."""
        return self.design.features

    def approximation(self, samples: int = 1000) -> Approximation:
        """Return the errors of k̃ and of the fit, from a sample of the rows; exact where it is all of them."""
        gap, error = self.problem.gap(self.fit.eta), self.fit.error.norm().item()
        return self.design.approximate(gap, self.problem.lam, error, samples)


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
        if family.vector and not prior.flat:
            raise ValueError("A Categorical family takes the flat prior factor q only.")
        self.kernel, self.family, self.lam = as_kernel(kernel), family, float(lam)
        self.prior, self.offset = prior, offset
        self._state: Fitted | None = None

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
        if not bool(X.isfinite().all()):
            raise ValueError("Coordinates must be finite: remove the samples with NaN or infinite values.")
        _check_targets(Y, X.shape[-2])
        return self._pose(Gram(self.covariance(X, X)), Y.to(X), self.offset_at(X), weights, offset)

    def _pose(
        self, basis: Gram | Design, Y: Tensor, m: Tensor, weights: Tensor | None, offset: Tensor | None
    ) -> Problem:
        """Return the problem in a basis, for targets (batch, n) and offset(X)."""
        family = self.family.for_targets(basis.largest(Y.max().reshape(1)))
        if weights is not None:
            family = Weighted(family, self._per_sample("weights", weights, Y.shape[1], Y))
        if offset is not None:
            m = m + self._per_sample("offset", offset, Y.shape[1], Y)
        return Problem(basis, family.statistic(Y), family, self.lam, self.prior, m)

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
        found, or rounding makes it uncertain, as with an indefinite kernel or a λ of next to nothing, it warns. A fit
        that was interrupted goes on from the file `checkpoint`, which is written after every step; `progress` is called
        then, for example `print`. `tol` is the square root of what may be left of J's fall (1e-12; of low rank 1e-6).

        A kernel of low rank (`Nystrom`, `RandomFeatures`) is fitted in its features, in the dtype of X with sums in
        float64, and X may be a NumPy memmap, read block by block and not copied. With a `group` of `torch.distributed`
        every process has rows of its own.
        """
        self._state = None
        if len(X) == 0:
            raise ValueError("A fit needs one sample at least.")
        single = Y.ndim == 1
        targets = (Y[None] if single else Y).clone()
        if isinstance(self.kernel, AbstractLowRank):
            _check_targets(targets, len(X))
            X = X[:, None] if X.ndim == 1 else X
            design = open_design(self.kernel, X, self.lam, group)
            targets = targets.to(design.like.device).double()
            problem = self._pose(design, targets, self._offset_of(X, design.like), weights, offset)
        elif group is not None:
            raise ValueError("A `group` of processes needs a kernel of low rank, such as `Nystrom`.")
        else:
            # a copy: what is predicted later is about these numbers, whatever becomes of the caller's
            X = coordinates(torch.as_tensor(X)).clone()
            problem = self.pose(X if isinstance(self.kernel, FunctionKernel) else X.double(), targets, weights, offset)
            problem = problem.double()
        file = None if checkpoint is None else Path(checkpoint)
        fit = newton(problem, tol=tol, max_steps=max_steps, checkpoint=file, progress=progress)
        self._state = Fitted(X, problem, fit.warn_if_unsolved(), single)
        return self

    @torch.no_grad()
    def refit(self, lam: float, *, max_steps: int = 100) -> "KernelGLM":
        """Return the kernel GLM of another λ for the same data, fitted from the solution that is known.

        The coordinates of a low-rank kernel, its features and, where they are kept, k(X, C) are those of this one.
        """
        other = KernelGLM(self.kernel, self.family, lam=lam, prior=self.prior, offset=self.offset)
        problem = dataclasses.replace(self._fitted.problem, lam=lam)
        fit = newton(problem, start=self._fitted.fit.coefficients, max_steps=max_steps).warn_if_unsolved()
        other._state = dataclasses.replace(self._fitted, problem=problem, fit=fit)
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
    def _fitted(self) -> Fitted:
        if self._state is None:
            raise RuntimeError("This kernel GLM has no data yet; call `fit(X, Y)` first.")
        return self._state

    @property
    def problem(self) -> Problem:
        """The inner problem at the fitted coordinates."""
        return self._fitted.problem

    @property
    def result(self) -> Fit:
        """The coefficients, η, the objective's history, an error and whether every data set converged."""
        return self._fitted.fit

    @property
    def reduced(self) -> Reduced:
        """The fit in features, of a kernel of low rank: `.features`, `.approximation()`."""
        if self._state is None or not isinstance(self._state.problem.basis, Design):
            raise RuntimeError(
                "This kernel GLM has no fit in features: give it a `Nystrom` kernel and call `fit(X, Y)`."
            )
        return Reduced(self._state.problem.basis, self._state.problem, self._state.fit)

    @torch.no_grad()
    def canonical(self, X2: Rows | None = None, *, offset: Tensor | None = None) -> Tensor:
        """Return η = k(X2, X)α + offset(X2) (Theorem 7), (m,) or (batch, m); X2 defaults to the fitted coordinates.

        A further `offset`, (m,), is added as in `fit`; the fitted coordinates have theirs already.
        """
        state = self._fitted
        eta, c = state.fit.eta, state.fit.coefficients
        if X2 is not None:
            X2 = self._points(X2)
            parts = [self._functions(block) for block in _blocks(X2, state.like, c.shape[1])]
            lifted = [across @ c if self.family.vector else c @ across.mT for across in parts]
            eta = torch.cat(lifted, 1) + self._offset_of(X2, state.like)
        if offset is not None:
            eta = eta + self._per_sample("offset", offset, eta.shape[1], eta)
        return state.unbatch(eta).to(state.like.dtype)

    def _points(self, X2: Rows) -> Rows:
        """Return X2 as (m, d), d that of the data; a vector means d = 1."""
        like = self._fitted.like
        if not isinstance(X2, Tensor) and X2.ndim == 2 and X2.shape[1] == like.shape[1]:
            return X2  # may be a memmap
        return coordinates(torch.as_tensor(X2), like=like)

    def _functions(self, X2: Tensor) -> Tensor:
        """Return the functions of the basis at X2, in float64: φ(X2), or k(X2, X) as `fit` evaluated k(X, X)."""
        basis, X = self.problem.basis, self._fitted.X
        if isinstance(basis, Design):
            return basis.features.map(X2).double()
        return self._evaluate(X2, torch.as_tensor(X))

    def _evaluate(self, X: Tensor, X2: Tensor) -> Tensor:
        """Return k(X, X2) in float64, of the kernel that a low-rank one approximates."""
        if isinstance(self.problem.basis, Design):
            return self.problem.basis.features.kernel(X, X2).double()
        if isinstance(self.kernel, FunctionKernel):
            return self.kernel(X, X2).double()
        return self.kernel(X.double(), X2.double())

    def _offset_of(self, X: Rows, like: Tensor) -> Tensor:
        """Return the offset of all rows in float64, block by block."""
        return torch.cat([self.offset_at(block) for block in _blocks(X, like, 2**7)]).double()

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
        state, problem = self._fitted, self.problem
        X2 = coordinates(X2, like=state.like)
        curvature, across = problem.curvature(state.fit.eta), self._functions(X2)
        covariance = problem.basis.covariance(curvature, self.lam, across, self._evaluate(X2, X2)).to(X2.dtype)
        return Posterior(self.canonical(X2), state.unbatch(covariance), self.family)

    @torch.no_grad()
    def log_evidence(self) -> Tensor:
        """Return log ∫ p(Y | f) p(f) df by Laplace, less Σ log h(y), per data set, to choose kernel and λ by."""
        if not self.prior.flat:
            raise ValueError("The evidence needs a normalised prior: it is available for the flat factor q only.")
        fit = self._fitted.fit
        return self._fitted.unbatch(self.problem.log_evidence(fit.eta, fit.objective[-1]))

    @torch.no_grad()
    def as_equilibrium(
        self, X2: Tensor | None = None, *, convolutional: bool = False
    ) -> KernelEquilibrium | FeatureEquilibrium:
        """Return the equilibrium model Y ↦ f*(Y; X, X2) (Corollary 6), whose `.guarantee` says what holds.

        X2 defaults to the fitted coordinates. `convolutional` needs a `Truncated` kernel on all pixels of an image. Of
        a kernel of low rank it is an equilibrium of r numbers, not of n.
        """
        state, problem = self._fitted, self.problem
        X, like = state.X, state.like
        m = torch.as_tensor(problem.offset).to(like)
        if not convolutional:
            X2 = None if X2 is None else coordinates(X2, like=like)
            m2 = m if X2 is None else self.offset_at(X2)
            if isinstance(problem.basis, Design):
                return self._in_features(problem, problem.basis, m, X2, m2)
            X = torch.as_tensor(X)
            drive = problem.basis.lift(problem.t) / self.lam + problem.offset
            K2 = self.kernel(X if X2 is None else X2, X)
            return self._closed_form(self.kernel(X, X), K2, m, m2, family=problem.family, drive=drive)
        if not isinstance(self.kernel, Truncated) or X2 is not None or problem.family is not self.family:
            needs = "a `Truncated` kernel and one number per sample without weights, and predicts at its own pixels"
            raise ValueError(f"The convolutional form needs {needs}.")
        K = self.kernel.filters().to(like)
        size = _image_size(torch.as_tensor(X), len(K))
        m = m.view(len(K), *size)
        return self._closed_form(K, K, m, m, family=self.family, size=size)

    def _in_features(
        self, problem: Problem, design: Design, m: Tensor, X2: Tensor | None, m2: Tensor
    ) -> FeatureEquilibrium:
        """Return Y ↦ f*(X2) as an equilibrium of the r numbers w = Φᵀ(T − z)/λ, whose Φ are its weights."""
        Phi = design.matrix()
        guarantee = check_assumptions(Phi.mT.double() @ Phi.double(), self.lam, problem.family, self.prior)
        guarantee = dataclasses.replace(guarantee, smallest=0.0)  # of K̃ = ΦΦᵀ, whose other eigenvalues are ΦᵀΦ's
        cell = FeatureCell(Phi, m, problem.family, self.lam, self.prior)
        return FeatureEquilibrium(cell, Phi if X2 is None else design.features.map(X2), m2, guarantee)

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


def _check_targets(Y: Tensor, n: int) -> None:
    if Y.ndim != 2 or Y.shape[1] != n:
        raise ValueError(f"Targets must be (n,) or (batch, n) with n = {n}, got {tuple(Y.shape)}.")
    if not bool(Y.isfinite().all()):
        raise ValueError("Targets must be finite: remove the samples with NaN or infinite values.")


def _blocks(X: Rows, like: Tensor, functions: int) -> Iterator[Tensor]:
    """Give the rows of X, as many at once as so many functions of float64 may take."""
    rows = max(1, BLOCK // (8 * functions))
    for start in range(0, max(1, len(X)), rows):
        yield read_rows(X, slice(start, start + rows), like)


def _image_size(X: Tensor, channels: int) -> tuple[int, int]:
    """Return height and width of the image whose pixels, all of them and in order, are the coordinates X."""
    height, width = (int(X[:, axis].max().clamp(min=-1).item()) + 1 for axis in (0, 1))
    if not torch.equal(X, pixels(height, width, channels).to(X)):
        order = "in the order of `kerneq.kglm.pixels(height, width, channels)`"
        raise ValueError(f"The convolutional form needs every pixel of an image as coordinates, {order}.")
    return height, width
