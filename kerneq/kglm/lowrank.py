"""Covariances of low rank, k̃(x, x2) = φ(x)ᵀφ(x2) of r numbers φ: a million samples need no n × n matrix.

`Nystrom` projects a kernel's functions on those of m centres, `RandomFeatures` samples its spectrum. Both are plans:
`KernelGLM.fit` makes `Features` of them, with centres from its coordinates.
"""

import abc
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor

from ..tensors import check_whole
from .kernels import AbstractCovariance, Matern, SquaredExponential, as_kernel, coordinates

Rule = Literal["kmeans", "leverage", "uniform"]
ROUNDS = 5  # of k-means: more moves the centres little
CANDIDATES = 10  # rows per centre that k-means and leverage scores look at


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Features(AbstractCovariance):
    """φ(x) = Rᵀψ(x): `raw` is ψ, (n, d) → (n, p), and `root` is R, (p, r) in float64; None is the identity."""

    raw: Callable[[Tensor], Tensor]
    root: Tensor | None
    raws: int  # p
    kernel: AbstractCovariance  # what it approximates
    centres: Tensor | None = None  # (p, d), of `Nystrom`
    jitter: float = 0.0  # added to the diagonal of k(C, C), to make it definite in the dtype of the data

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        return self.map(X) @ self.map(X2).mT

    @property
    def rank(self) -> int:
        """The number of features, r."""
        return self.raws if self.root is None else self.root.shape[1]

    def map(self, X: Tensor) -> Tensor:
        """Return φ(X), (n, r)."""
        raw = self.raw(X)
        return raw if self.root is None else raw @ self.root.to(raw)

    def to_raw(self, w: Tensor) -> Tensor:
        """Return Rw: ψ(x)ᵀRw = φ(x)ᵀw."""
        return w if self.root is None else self.root @ w

    def from_raw(self, v: Tensor) -> Tensor:
        """Return Rᵀv."""
        return v if self.root is None else self.root.mT @ v


class AbstractLowRank(AbstractCovariance):
    """How to make features of a kernel. `memory` and `device` say where the fit computes."""

    memory: int | None  # bytes for k(X, C); None: a quarter of what the CPU has free, half of what a GPU has
    device: str | torch.device | None  # None: that of X, the CPU for arrays

    @abc.abstractmethod
    def candidates(self) -> int:
        """Return how many coordinates `choose` wants to see."""

    @abc.abstractmethod
    def choose(self, sample: Tensor, n: int, lam: float) -> "AbstractLowRank":
        """Return the plan with all that depends on the n coordinates, of which `sample` are some."""

    @abc.abstractmethod
    def prepare(self, like: Tensor) -> Features:
        """Return the features of a plan whose choices are made, for coordinates like these, (…, d)."""

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        raise ValueError("This covariance has features after `KernelGLM.fit` only: ask `glm.features`.")


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Nystrom(AbstractLowRank):
    """k̃(x, x2) = k(x, C) k(C, C)⁻¹ k(C, x2): functions that the m centres C span, the best of them for every norm.

    >>> KernelGLM(Nystrom(SquaredExponential(1.0), centres=2000), Poisson(), lam=1.0).fit(X, counts)

    `centres` is their number or the (m, d) centres themselves. A number is chosen from the data: "kmeans" (means of
    clusters; the best for coordinates in a few dimensions), "leverage" (samples drawn by how much the fit depends on
    them; finds rare ones) or "uniform" (samples drawn alike; the fastest).
    """

    kernel: Any  # as `KernelGLM` takes it
    centres: int | Tensor = 1000
    rule: Rule = "kmeans"
    seed: int = 0
    memory: int | None = None
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ValueError(f"`rule` must be one of {', '.join(get_args(Rule))}, got {self.rule!r}.")
        if isinstance(self.centres, Tensor):
            found = coordinates(self.centres)
            if not len(found) or not bool(found.isfinite().all()):
                raise ValueError("`centres` must be one finite coordinate at least.")
        else:
            check_whole("centres", self.centres)
        if self.memory is not None:
            check_whole("memory", self.memory)

    def candidates(self) -> int:
        if isinstance(self.centres, Tensor):
            return 1
        return self.centres if self.rule == "uniform" else CANDIDATES * self.centres

    def choose(self, sample: Tensor, n: int, lam: float) -> "Nystrom":
        if isinstance(self.centres, Tensor):
            return self
        return dataclasses.replace(self, centres=self._draw(as_kernel(self.kernel), sample, self.centres, n, lam))

    def prepare(self, like: Tensor) -> Features:
        assert isinstance(self.centres, Tensor), "`choose` comes first"
        kernel, centres = as_kernel(self.kernel), coordinates(self.centres, like=like).to(like.device)
        wide = centres.double()
        K = kernel(wide, wide)
        if not bool(K.isfinite().all()):
            raise ValueError("The kernel of the centres is not finite: check the kernel and the coordinates.")
        root, jitter = _inverse_root(K, torch.finfo(like.dtype).eps)
        raw = functools.partial(_against, kernel, centres)
        return Features(raw, root, len(centres), kernel, centres, jitter)

    def _draw(self, kernel: AbstractCovariance, sample: Tensor, m: int, n: int, lam: float) -> Tensor:
        """Return m centres; the distinct samples themselves where there are no more than m."""
        distinct = torch.unique(sample, dim=0)
        if len(distinct) <= m:
            if n < m:
                warnings.warn(f"{m} centres are more than the {n} samples: they are the centres.", stacklevel=6)
            return distinct
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(distinct), generator=generator).to(sample.device)
        if self.rule == "uniform":
            return distinct[order[:m]]
        if self.rule == "kmeans":
            return _cluster(distinct, distinct[order[:m]])
        few = order[:m]  # ridge leverage scores φᵀ(ΦᵀΦ + λI)⁻¹φ, by features of m uniform centres
        wide = distinct[few].double()
        root, _ = _inverse_root(kernel(wide, wide), torch.finfo(sample.dtype).eps)
        phi = kernel(distinct, distinct[few]).double() @ root
        gram = n / len(phi) * phi.mT @ phi
        gram.diagonal().add_(lam)
        scores = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), phi.mT, upper=False).square().sum(0)
        drawn = torch.multinomial(scores.cpu().clamp(min=1e-12), m, generator=generator)
        return distinct[drawn.to(sample.device)]


@final
@dataclasses.dataclass(frozen=True)
class RandomFeatures(AbstractLowRank):
    """φ(x) = (cos xΩ, sin xΩ)/√D, Ω drawn from the spectrum of a `SquaredExponential` or a `Matern` (Rahimi and Recht).

    Unbiased, k(x, x) exact, and an error of 1/√D everywhere: for many dimensions, where m centres see little.
    """

    kernel: SquaredExponential | Matern
    frequencies: int = 1000  # D; r = 2D
    seed: int = 0
    memory: int | None = None
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        check_whole("frequencies", self.frequencies)
        if not isinstance(self.kernel, SquaredExponential | Matern):
            raise TypeError(
                "Random features are those of a `SquaredExponential` or a `Matern`; for others use `Nystrom`."
            )

    def candidates(self) -> int:
        return 1

    def choose(self, sample: Tensor, n: int, lam: float) -> "RandomFeatures":
        return self

    def prepare(self, like: Tensor) -> Features:
        generator = torch.Generator().manual_seed(self.seed)
        omega = torch.randn(like.shape[-1], self.frequencies, generator=generator, dtype=torch.float64)
        if isinstance(self.kernel, Matern):  # its spectrum is Student's t with 2ν degrees of freedom
            freedom = round(2 * self.kernel.smoothness)
            normal = torch.randn(freedom, self.frequencies, generator=generator, dtype=torch.float64)
            omega = omega * (freedom / normal.square().sum(0)).sqrt()
        omega = (omega / self.kernel.lengthscale).to(like)
        return Features(functools.partial(_waves, omega), None, 2 * self.frequencies, self.kernel)


def _against(kernel: AbstractCovariance, centres: Tensor, X: Tensor) -> Tensor:
    return kernel(X, centres)


def _waves(omega: Tensor, X: Tensor) -> Tensor:
    phase = X @ omega
    return torch.cat([phase.cos(), phase.sin()], 1) / math.sqrt(omega.shape[1])


def _inverse_root(K: Tensor, eps: float) -> tuple[Tensor, float]:
    """Return R with RRᵀ = (K + jI)⁻¹ and the jitter j, the least of 10ᵏ·m·eps·K̄ᵢᵢ that makes a Cholesky factor.

    eps is that of the dtype of k(X, C): a smaller j would amplify its rounding. Duplicate centres need the jitter too.
    """
    factor, jitter = jittered_cholesky(0.5 * (K + K.mT), len(K) * eps)
    eye = torch.eye(len(K), dtype=K.dtype, device=K.device)
    return torch.linalg.solve_triangular(factor, eye, upper=False).mT.contiguous(), jitter


def jittered_cholesky(K: Tensor, share: float) -> tuple[Tensor, float]:
    """Return a Cholesky factor of K + jI, K (…, r, r), and j, the least of 10ᵏ·share·K̄ᵢᵢ for which there is one."""
    scale = K.diagonal(dim1=-2, dim2=-1).mean().clamp(min=torch.finfo(K.dtype).tiny).item()
    while share <= 1e-2:
        matrix = K.clone()
        matrix.diagonal(dim1=-2, dim2=-1).add_(share * scale)
        factor, info = torch.linalg.cholesky_ex(matrix)
        if not bool(info.any()):
            return factor, share * scale
        share *= 10
    raise ValueError("The kernel is not positive semi-definite on the centres: use a definite kernel, or add White(…).")


def _cluster(X: Tensor, centres: Tensor) -> Tensor:
    """Return the means of clusters of X, by some rounds of k-means; a centre that loses all its points stays."""
    for _ in range(ROUNDS):
        nearest = torch.cat([torch.cdist(block, centres).argmin(1) for block in torch.split(X, 8192)])
        counts = torch.bincount(nearest, minlength=len(centres)).to(X)
        sums = torch.zeros_like(centres).index_add_(0, nearest, X)
        centres = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), centres)
    return torch.unique(centres, dim=0)
