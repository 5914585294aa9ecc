"""Covariance functions k(X, X2) of kernel GLMs: coordinates (n, d) and (m, d) → matrix (n, m); `+`, `*` compose them.

Not the kernels of `kerneq.kernels`, which define a layer's energy: these say how f(x) and f(x2) vary together.
"""

import abc
import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from ..tensors import check_nonnegative, check_positive, check_whole, is_transformed, needs_graph


class AbstractCovariance(abc.ABC):
    """A positive semi-definite function of two coordinates, evaluated on all pairs."""

    @abc.abstractmethod
    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        """Return k(X, X2), (n, m)."""

    def __add__(self, other: "AbstractCovariance") -> "AbstractCovariance":
        return Composite(torch.add, self, other)

    def __mul__(self, other: "AbstractCovariance | float") -> "AbstractCovariance":
        factor = Constant(float(other)) if isinstance(other, int | float) else other
        return Composite(torch.mul, self, factor)

    __rmul__ = __mul__


@final
@dataclasses.dataclass(frozen=True)
class Composite(AbstractCovariance):
    """The sum or the product of two kernels, entry by entry; written `k1 + k2`, `k1 * k2`, `2.0 * k1`."""

    operation: Callable[[Tensor, Tensor], Tensor]
    first: AbstractCovariance
    second: AbstractCovariance

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        return self.operation(self.first(X, X2), self.second(X, X2))


@final
@dataclasses.dataclass(frozen=True)
class Constant(AbstractCovariance):
    """k = v: a random level; as a factor, the variance of another kernel."""

    value: float = 1.0

    def __post_init__(self) -> None:
        check_nonnegative("value", self.value)

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        return X.new_full((X.shape[0], X2.shape[0]), self.value)


@final
@dataclasses.dataclass(frozen=True)
class White(AbstractCovariance):
    """k = v where the two coordinates are equal and 0 elsewhere: definite on distinct coordinates."""

    variance: float = 1e-8

    def __post_init__(self) -> None:
        check_nonnegative("variance", self.variance)

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        same = (X[:, None] == X2).all(-1)
        return self.variance * same.to(X.dtype)


@final
@dataclasses.dataclass(frozen=True)
class Scaled(AbstractCovariance):
    """k = s(x) k₀(x, x2) s(x2): the linear scaling of f in kGLM's Appendix H, for any deterministic function s.

    g = s·f has ‖g‖_k = ‖f‖_k₀, so the kernel GLM of k is the one with η = s(x)f(x) + m(x), f in the space of k₀.
    """

    kernel: Any  # k₀, as `KernelGLM` takes it
    scale: Callable[[Tensor], Tensor]  # s, (n, d) → (n,)

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        left, right = (self.scale(points).reshape(len(points)) for points in (X, X2))
        return left[:, None] * right * as_kernel(self.kernel)(X, X2)  # k(X, X) is exactly symmetric


@final
@dataclasses.dataclass(frozen=True)
class DotProduct(AbstractCovariance):
    """k = ⟨x, x2⟩: the kernel GLM is the ridge-penalised GLM."""

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        return X @ X2.mT


@final
@dataclasses.dataclass(frozen=True)
class SquaredExponential(AbstractCovariance):
    """k = exp(−‖x − x2‖² / 2ℓ²): infinitely smooth functions."""

    lengthscale: float = 1.0  # ℓ

    def __post_init__(self) -> None:
        check_positive("lengthscale", self.lengthscale)

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        return self.at(squared_distance(X, X2))

    def at(self, squared: Tensor) -> Tensor:
        """Return k where ‖x − x2‖² is `squared`."""
        exponent = squared * (-0.5 / self.lengthscale / self.lengthscale)
        return exponent.exp() if needs_graph(exponent) or is_transformed() else exponent.exp_()


@final
@dataclasses.dataclass(frozen=True)
class Periodic(AbstractCovariance):
    """k = exp(−2 Σ sin²(π(x − x2)/p) / ℓ²), summed over the axes; the paper's exp(−sin²(x − x2)) has p = π, ℓ = √2.

    The sine of ‖x − x2‖ would not be semi-definite on more than one axis.
    """

    period: float = math.pi  # p
    lengthscale: float = math.sqrt(2)  # ℓ

    def __post_init__(self) -> None:
        check_positive("period", self.period)
        check_positive("lengthscale", self.lengthscale)

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        angle = math.pi / self.period * (X[:, None] - X2)
        return (-2 * angle.sin().square().sum(-1) / self.lengthscale**2).exp()


@final
@dataclasses.dataclass(frozen=True)
class Matern(AbstractCovariance):
    """Smoothness ν = ½, 3/2 or 5/2: with r = √(2ν)‖x − x2‖/ℓ, e^{−r} times 1, 1 + r or 1 + r + r²/3."""

    lengthscale: float = 1.0  # ℓ
    smoothness: float = 1.5  # ν

    def __post_init__(self) -> None:
        check_positive("lengthscale", self.lengthscale)
        if self.smoothness not in (0.5, 1.5, 2.5):
            raise ValueError(f"`smoothness` must be 0.5, 1.5 or 2.5, got {self.smoothness}.")

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        return self.at(squared_distance(X, X2))

    def at(self, squared: Tensor) -> Tensor:
        """Return k where ‖x − x2‖² is `squared`."""
        # a root has no gradient at 0, as on the diagonal of K(X, X): there it is 0
        distance = torch.where(squared > 0, squared, 1.0).sqrt() * (squared > 0)
        r = math.sqrt(2 * self.smoothness) * distance / self.lengthscale
        polynomial = 1 + (self.smoothness > 1) * r + (self.smoothness > 2) * r.square() / 3
        return polynomial * (-r).exp()


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Truncated(AbstractCovariance):
    """Squared exponentials of their own length per pair of channels, cut off beyond `radius` pixels, (18) and (19).

    k(x, x′) = w(Δ₁) w(Δ₂) exp(−‖Δ‖² / 2ℓ²_ab) for coordinates x = (row, column, channel), Δ the pixel offset, a and b
    the channels; its matrix on all pixels of an image is a convolution (Corollary 11). As published (Appendix E, F),
    w(Δ) is the indicator of |Δ| ≤ r, and k is not a kernel: that indicator is not positive semi-definite (its Fourier
    transform is negative in places), nor is a matrix of ones of different lengths per pair. `definite` repairs both:
    w = 1 − |Δ|/(r + 1), and each pair of channels a ≠ b enters as a 2 × 2 block of ones.
    """

    squared_lengthscales: Tensor  # ℓ², (…, c, c), symmetric; a batch has filters but no k(X, X2)
    radius: int = 2  # r; filters are (2r + 1) × (2r + 1)
    definite: bool = False

    def __post_init__(self) -> None:
        lengths = self.squared_lengthscales
        if lengths.ndim < 2 or not torch.equal(lengths, lengths.mT) or not bool((lengths > 0).all()):
            raise ValueError("`squared_lengthscales` must be a symmetric matrix (c, c) of positive numbers.")
        check_whole("radius", self.radius, least=0)

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        offset = (X[:, None, :2] - X2[:, :2]).abs()
        table = self.filters().to(X)
        inside = (offset <= self.radius).all(-1)
        i, j = (offset.clamp(max=self.radius).long() + self.radius).unbind(-1)
        first, second = X[:, None, 2].long(), X2[:, 2].long()
        return table[first, second, i, j] * inside

    def filters(self) -> Tensor:
        """Return (…, c, c, 2r + 1, 2r + 1): C ∗ image equals k(X, X) @ image for X = `pixels(h, w, c)`."""
        lengths = self.squared_lengthscales
        offset = torch.arange(-self.radius, self.radius + 1, dtype=lengths.dtype, device=lengths.device)
        distance = offset[:, None].square() + offset[None, :].square()
        table = torch.exp(-0.5 * distance / lengths[..., None, None])
        if not self.definite:
            return table
        taper = 1 - offset.abs() / (self.radius + 1)
        table = table * (taper[:, None] * taper[None, :])
        same = torch.eye(table.shape[-3], dtype=torch.bool, device=table.device)[:, :, None, None]
        # the diagonal collects a block from every pair its channel is in
        return torch.where(same, table.sum(-3, keepdim=True), table)


def random_lengthscales(channels: int, generator: torch.Generator, *, batch: tuple[int, ...] = ()) -> Tensor:
    """Draw ℓ² ~ U(0, 4) for each unordered pair of channels, (*batch, c, c), as Appendix F draws them."""
    draw = (torch.rand(*batch, channels, channels, generator=generator) * 4.0).clamp(min=1e-3)
    return draw.tril() + draw.tril(-1).mT


def pixels(height: int, width: int, channels: int) -> Tensor:
    """Return the pixels of an image as coordinates (17), (row, column, channel) in the order of `image.flatten()`."""
    grid = torch.cartesian_prod(torch.arange(channels), torch.arange(height), torch.arange(width))
    return grid[:, [1, 2, 0]].double()


@final
@dataclasses.dataclass(frozen=True)
class FunctionKernel(AbstractCovariance):
    """Any callable k(X, X2) on tensors that returns a tensor, an array or a GPyTorch lazy matrix; or scikit-learn's."""

    function: Callable[..., Any]

    def __call__(self, X: Tensor, X2: Tensor) -> Tensor:
        scikit = sys.modules.get("sklearn.gaussian_process.kernels")  # not imported: then it is not one of them
        if scikit is not None and isinstance(self.function, scikit.Kernel):
            first, second = X.numpy(force=True), X2.numpy(force=True)
            # its white noise counts where two coordinates are equal, as `White` does, whichever others are beside them
            same = (first[:, None] == second[None]).all(-1)
            values = np.where(same, self.function.diag(first)[:, None], self.function(first, second))
        else:
            values = self.function(X, X2)
        if not isinstance(values, np.ndarray):
            values = values.to_dense()  # a tensor stays as it is, a lazy matrix becomes one
        elif torch.is_grad_enabled() and (X.requires_grad or X2.requires_grad):
            raise ValueError("A kernel of arrays has no gradient in the coordinates: use a `kglm` one, or detach them.")
        matrix = torch.as_tensor(values, dtype=X.dtype, device=X.device)
        if matrix.shape != (X.shape[0], X2.shape[0]):
            wanted = f"a matrix ({X.shape[0]}, {X2.shape[0]})"
            raise ValueError(f"The kernel must return {wanted}, got shape {tuple(matrix.shape)}.")
        return matrix


def as_kernel(kernel: Any) -> AbstractCovariance:
    """Return `kernel` itself if it is ours; a kernel of scikit-learn or GPyTorch, or a function k(X, X2), adapted."""
    if isinstance(kernel, AbstractCovariance):
        return kernel
    if callable(kernel):
        return FunctionKernel(kernel)
    raise TypeError(f"A kernel must be callable as k(X, X2), got {type(kernel).__name__}.")


def coordinates(X: Tensor, like: Tensor | None = None) -> Tensor:
    """Return X as a matrix (n, d) of floating-point coordinates, d and dtype as in `like`; a vector means d = 1."""
    if X.ndim not in (1, 2):
        raise ValueError(f"Coordinates must be (n,) or (n, d), got shape {tuple(X.shape)}.")
    found = X[:, None] if X.ndim == 1 else X
    if like is None:
        return found if X.is_floating_point() else found.to(torch.get_default_dtype())
    d = like.shape[1]
    if found.shape[1] != d:  # broadcasting would make numbers of it
        hint = "pass a single point x as x[None]" if X.ndim == 1 else f"give every point {d} of them"
        raise ValueError(f"Coordinates must be (m, {d}), as the others are, got shape {tuple(X.shape)}: {hint}.")
    return found.to(like.dtype)


def squared_distance(X: Tensor, X2: Tensor) -> Tensor:
    """Return ‖xᵢ − x2ⱼ‖², symmetric and 0 on the diagonal; `torch.cdist` can be differentiated once only."""
    if needs_graph(X, X2) or is_transformed():
        return (X[:, None] - X2).square().sum(-1)
    if X.is_cuda and X is not X2:
        return distance_by_products(X, X2)
    return torch.cdist(X, X2, compute_mode="donot_use_mm_for_euclid_dist").square_()


def distance_by_products(X: Tensor, X2: Tensor) -> Tensor:
    """Return ‖xᵢ − x2ⱼ‖² by a matrix product, the fast way on a GPU, with a rounding of ε times the spread squared."""
    centre = X2.mean(0)
    X, X2 = X - centre, X2 - centre
    squares = X.square().sum(1)[:, None] + X2.square().sum(1)
    return torch.addmm(squares, X, X2.mT, alpha=-2).clamp_(min=0)
