"""The basis of the exact fit: the functions k(·, xᵢ) of all n samples, whose matrix K has n² numbers.

`newton.py` minimises; here is what only linear algebra with K can do for it. Samples have their targets in batches, so
numbers per sample are (batch, n), or (batch, n, classes) where η is a vector.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from ..tensors import per_sample_dot

FACTORS = 2**29  # bytes of Cholesky factors at most: more data sets share one, of their mean weights
# r ↦ (p, ⟨r, p⟩), p about H⁻¹r in the inner product of the basis
Inverse = Callable[[Tensor], tuple[Tensor, Tensor]]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Curvature:
    """A″ + Q″ at η: a number per sample, or of vectors diag(z) − zzᵀ/c, z = c·softmax(η)."""

    weights: Tensor  # D, (batch, n); of vectors z, (batch, n, classes)
    vector: bool

    def times(self, u: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return (A″ + Q″)u of some samples."""
        D = self.weights[:, rows]
        if not self.vector:
            return D * u
        return D * (u - ((D * u).sum(-1) / self._total()[:, rows])[..., None])

    def mean(self) -> Tensor:
        """Return D; of vectors the mean of the eigenvalues that are not 0, (batch, n)."""
        if not self.vector:
            return self.weights
        c = self._total()
        return (c - self.weights.square().sum(-1) / c).clamp(min=0) / (self.weights.shape[-1] - 1)

    def _total(self) -> Tensor:
        return self.weights.sum(-1).clamp(min=1e-30)


def columns(v: Tensor) -> Tensor:
    """Return (batch, n, …) as a matrix (n, outputs)."""
    return v.movedim(1, 0).flatten(1)


def uncolumns(matrix: Tensor, like: Tensor) -> Tensor:
    """Return a matrix (m, outputs) as (batch, m, …), batch and … those of `like`."""
    return matrix.reshape(len(matrix), len(like), *like.shape[2:]).movedim(0, 1)


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
    """Return b ↦ (λI + S K S)⁻¹b, (batch, n, …); samples that share K and S share one factor."""
    if K.ndim == 2 and bool((s == s[:1]).all()):
        shared = scaled_factor(K, s[:1], lam)[0]
        upper = shared.mT

        def solve(b: Tensor) -> Tensor:  # `torch.cholesky_solve` would copy the factor
            half = torch.linalg.solve_triangular(shared, columns(b), upper=False)
            return uncolumns(torch.linalg.solve_triangular(upper, half, upper=True), b)

        return solve
    factor = scaled_factor(K, s, lam)
    return lambda b: torch.cholesky_solve(b.flatten(2) if b.ndim > 2 else b[..., None], factor).view_as(b)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Gram:
    """f = Σ αᵢ k(·, xᵢ) of coefficients α, (batch, n) or (batch, n, classes), with ‖f‖² = αᵀKα."""

    K: Tensor  # (n, n), symmetric positive semi-definite; (batch, n, n) where every data set has its own coordinates

    def tolerance(self, tol: float | None) -> float:
        """Return `tol`, 1e-12 by default."""
        return 1e-12 if tol is None else tol

    def zero(self, t: Tensor) -> Tensor:
        """Return the coefficients of f = 0."""
        return torch.zeros_like(t)

    def lift(self, alpha: Tensor) -> Tensor:
        """Return f at the samples, Kα; K is symmetric."""
        if alpha.ndim == 3:
            return self.K @ alpha
        return alpha @ self.K if self.K.ndim == 2 else (alpha[:, None, :] @ self.K)[:, 0, :]

    def project(self, u: Tensor, exactly: bool = False) -> Tensor:
        """Return the coefficients of Σ uᵢ k(·, xᵢ), which is the gradient of Σ uᵢ f(xᵢ)."""
        return u

    def square(self, alpha: Tensor, f: Tensor) -> Tensor:
        """Return ‖f‖², per data set, from the coefficients and f at the samples."""
        return (alpha * f).flatten(1).sum(-1)

    def hessian(self, curvature: Curvature, lam: float) -> Inverse:
        """Return p ↦ (Hp, ⟨p, Hp⟩): H = λI + DK in α, the Hessian of J in the inner product of K."""

        def apply(p: Tensor) -> tuple[Tensor, Tensor]:
            lifted = self.lift(p)
            image = lam * p + curvature.times(lifted)
            return image, per_sample_dot(lifted, image)

        return apply

    def invert(self, curvature: Curvature, lam: float) -> Inverse:
        """Return H⁻¹r = (r − S(λI + SKS)⁻¹S K r)/λ, D = S²: no inverse of K is needed.

        Of vectors all classes share D, the mean eigenvalue of A″: near H, and one factor instead of one per class.
        """
        weights = curvature.mean()
        if self.K.ndim == 2 and weights.numel() * weights.shape[1] * weights.element_size() > FACTORS:
            weights = weights.mean(0, keepdim=True)
        s = weights.sqrt()
        solve = factorise(self.K, s, lam)
        s = s[..., None] if curvature.vector else s

        def apply(r: Tensor) -> tuple[Tensor, Tensor]:
            lifted = self.lift(r)
            p = (r - s * solve(s * lifted)) / lam
            return p, per_sample_dot(lifted, p)

        return apply

    def solve(self, curvature: Curvature, lam: float, r: Tensor) -> Tensor:
        """Return H⁻¹r, exactly and with a gradient in r.

        Of vectors p = (r − G(b − x))/λ, b = Kr, x = (Σ G)⁻¹ Σ G b, with the factors of `_vector_factors`.
        """
        if not curvature.vector:
            return self.invert(curvature, lam)(r)[0]
        roots, factors, total = self._vector_factors(curvature, lam)

        def apply(b: Tensor) -> Tensor:
            parts = zip(b.unbind(-1), roots, factors, strict=True)
            return torch.stack([s * torch.cholesky_solve((s * v)[..., None], L)[..., 0] for v, s, L in parts], -1)

        Gb = apply(self.lift(r))
        x = torch.cholesky_solve(Gb.sum(-1, keepdim=True), total)
        return (r - Gb + apply(x.expand_as(r))) / lam

    def _vector_factors(self, curvature: Curvature, lam: float) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Return per class S = diag(z)^½ and the factor of λI + SKS, and the factor of Σ G, G = S(λI + SKS)⁻¹S.

        As A″ is diag(z) − zzᵀ/c, each class has its own n × n matrix, and one more joins them (Rasmussen and Williams,
        2006, algorithm 3.3).
        """
        roots = [s for s in curvature.weights.clamp(min=1e-30).sqrt().unbind(-1)]
        factors = [scaled_factor(self.K, s, lam) for s in roots]
        halves = (
            torch.linalg.solve_triangular(L, torch.diag_embed(s), upper=False)
            for s, L in zip(roots, factors, strict=True)
        )
        total = sum(half.mT @ half for half in halves)  # a third of the time of `torch.cholesky_inverse`
        return roots, factors, torch.linalg.cholesky(torch.as_tensor(total))

    def log_det(self, curvature: Curvature, lam: float) -> Tensor:
        """Return log |I + KD/λ|, (batch,)."""
        n = self.K.shape[-1]
        if not curvature.vector:
            return _log_det(scaled_factor(self.K, curvature.weights.sqrt(), lam)) - n * math.log(lam)
        _, factors, total = self._vector_factors(curvature, lam)  # Π|I + SKS/λ| · |λ Σ G| / Πc
        counts = curvature.weights.sum(-1).clamp(min=1e-30).log().sum(-1)
        each = sum(_log_det(factor) - n * math.log(lam) for factor in factors)
        return each + _log_det(total) + n * math.log(lam) - counts

    def covariance(self, curvature: Curvature, lam: float, across: Tensor, prior: Tensor) -> Tensor:
        """Return Laplace's covariance of f at m points, (prior − across S(λI + SKS)⁻¹S acrossᵀ)/λ, (batch, m, m).

        `across`, (m, n), are the functions of the basis there, and `prior`, (m, m), is the kernel.
        """
        s = curvature.weights.sqrt()
        factor = scaled_factor(self.K, s, lam)
        half = torch.linalg.solve_triangular(factor, (across * s[:, None, :]).mT, upper=False)
        return (prior - half.mT @ half) / lam

    def sum(self, t: Tensor) -> Tensor:
        """Return the sum over the processes: there is one."""
        return t

    largest = sum
    passes = 0
    inner = 0.05, 1e-6  # residual of the first and of the later linear systems, relative
    leads = True


def _log_det(factor: Tensor) -> Tensor:
    """Return log det of the matrix with this Cholesky factor."""
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
