"""Exponential families p(y | η) = h(y) exp(η T(y) − A(η)), kGLM's (10), and the prior factors q of (4) made of them."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from ..tensors import check_nonnegative, check_positive, check_whole


class AbstractFamily(abc.ABC):
    """A log-partition A, elementwise; what follows from it has a default, and a closed form where one is better.

    σ = A′ is the activation of the equilibrium layer. The equivalence needs only A convex and differentiable, so a
    family may also be a pure activation (`LeakyReLU`) that no density has. η may also be a vector per sample: see
    `Categorical`.
    """

    @property
    def vector(self) -> bool:
        """Whether η is a vector per sample, the last dimension of (…, n, classes); A is then (…, n)."""
        return False

    def for_targets(self, y: Tensor) -> "AbstractFamily":
        """Return the family with what only the targets can tell, such as the number of classes."""
        return self

    @abc.abstractmethod
    def log_partition(self, eta: Tensor) -> Tensor:
        """Return A(η)."""

    def mean(self, eta: Tensor) -> Tensor:
        """Return σ(η) = A′(η), the expectation of T."""
        return torch.func.grad(lambda e: self.log_partition(e).sum())(eta)

    def response(self, eta: Tensor) -> Tensor:
        """Return the expectation of y itself, in the units of the targets: σ(η) where T(y) = y."""
        return self.mean(eta)

    def variance(self, eta: Tensor) -> Tensor:
        """Return A″(η), the variance of T."""
        second = torch.func.grad(lambda e: self.mean(e).sum())(eta)
        return second.clamp(min=0)  # A is convex: less than 0 is rounding

    def variance_range(self, below: float = math.inf) -> tuple[float, float]:
        """Return the infimum and the supremum of A″ on (−∞, below]; the supremum may be infinite."""
        return 0.0, math.inf

    def statistic(self, y: Tensor) -> Tensor:
        """Return T(y); a ValueError where y is outside the support."""
        return y

    def check(self, y: Tensor, inside: Tensor, support: str) -> Tensor:
        """Return y; raise an error that names the first value outside the support."""
        if not bool(inside.all()):
            outside = y[~inside].flatten()[0].item()
            raise ValueError(f"{type(self).__name__} targets must be {support}, got {outside:g}.")
        return y


@final
@dataclasses.dataclass(frozen=True)
class Custom(AbstractFamily):
    """A family of your own, given by its log-partition alone; the derivatives come from autograd.

    >>> squared = Custom(lambda eta: 0.5 * eta.square(), bound=1.0)      # the Gaussian again
    """

    partition: Callable[[Tensor], Tensor]  # A, elementwise and differentiable twice
    bound: float = math.inf  # sup A″

    def log_partition(self, eta: Tensor) -> Tensor:
        return self.partition(eta)

    def variance_range(self, below: float = math.inf) -> tuple[float, float]:
        return 0.0, self.bound


@final
@dataclasses.dataclass(frozen=True)
class Gaussian(AbstractFamily):
    """Known variance s²: A = η²/2s², T = y/s². The kernel GLM is kernel ridge regression; σ is linear."""

    noise: float = 1.0  # s²

    def __post_init__(self) -> None:
        check_positive("noise", self.noise)

    def log_partition(self, eta: Tensor) -> Tensor:
        return eta.square() / (2 * self.noise)

    def mean(self, eta: Tensor) -> Tensor:
        return eta / self.noise

    def response(self, eta: Tensor) -> Tensor:
        return eta

    def variance_range(self, below: float = math.inf) -> tuple[float, float]:
        return 1 / self.noise, 1 / self.noise

    def statistic(self, y: Tensor) -> Tensor:
        return y / self.noise


@final
@dataclasses.dataclass(frozen=True)
class Binomial(AbstractFamily):
    """y successes of r trials: A = r log(1 + e^η), σ = r · logistic, A″ ≤ r/4."""

    trials: int = 1  # r

    def __post_init__(self) -> None:
        check_whole("trials", self.trials)

    def log_partition(self, eta: Tensor) -> Tensor:
        return self.trials * F.softplus(eta)

    def mean(self, eta: Tensor) -> Tensor:
        return self.trials * eta.sigmoid()

    def variance(self, eta: Tensor) -> Tensor:
        return self.trials * eta.sigmoid() * (-eta).sigmoid()

    def variance_range(self, below: float = math.inf) -> tuple[float, float]:
        return 0.0, self.trials / 4

    def statistic(self, y: Tensor) -> Tensor:
        inside = (y >= 0) & (y <= self.trials) & (y == y.round())
        return self.check(y, inside, f"whole numbers from 0 to {self.trials}")


def Bernoulli() -> Binomial:
    """Targets 0 and 1: kernel logistic regression."""
    return Binomial(1)


@final
@dataclasses.dataclass(frozen=True)
class Poisson(AbstractFamily):
    """Counts: A = σ = A″ = e^η. A″ is unbounded, so a contraction needs a bound on η."""

    def log_partition(self, eta: Tensor) -> Tensor:
        return eta.exp()

    mean = variance = log_partition

    def variance_range(self, below: float = math.inf) -> tuple[float, float]:
        return 0.0, math.exp(below) if below < 700 else math.inf

    def statistic(self, y: Tensor) -> Tensor:
        return self.check(y, (y >= 0) & (y == y.round()), "whole numbers from 0")


@final
@dataclasses.dataclass(frozen=True)
class Categorical(AbstractFamily):
    """Classes 0 … K − 1: A(η) = log Σ e^ηₖ of a vector η per sample, σ = softmax, T(y) = the y-th unit vector.

    η, T and σ are (…, n, K). Each canonical parameter is a function of its own in the kernel's space, with the same λ;
    the loss sees them together. A″ = diag(p) − ppᵀ ⪯ ½I, so Theorem 3 holds as for numbers (docs/kglm/index.md).
    """

    classes: int | None = None  # K; None: the largest label + 1

    def __post_init__(self) -> None:
        if self.classes is not None:
            check_whole("classes", self.classes, least=2)

    @property
    def vector(self) -> bool:
        return True

    def for_targets(self, y: Tensor) -> AbstractFamily:
        if self.classes is not None:
            return self
        classes = int(y.max()) + 1 if y.numel() and bool(y.isfinite().all()) else 0
        if classes < 2:
            raise ValueError("Categorical targets must be whole numbers from 0, of two classes at least.")
        return Categorical(classes)

    def log_partition(self, eta: Tensor) -> Tensor:
        return eta.logsumexp(-1)

    def mean(self, eta: Tensor) -> Tensor:
        return eta.softmax(-1)

    def variance(self, eta: Tensor) -> Tensor:
        """Return the diagonal of A″, p(1 − p)."""
        p = self.mean(eta)
        return p * (1 - p)

    def variance_range(self, below: float = math.inf) -> tuple[float, float]:
        """Return the range of the eigenvalues of A″: for orthogonal u, uᵀA″u is a variance of uₖ, at most ½‖u‖²."""
        return 0.0, 0.5

    def statistic(self, y: Tensor) -> Tensor:
        classes = self.classes or 0
        y = self.check(y, (y >= 0) & (y < classes) & (y == y.round()), f"whole numbers from 0 to {classes - 1}")
        dtype = y.dtype if y.is_floating_point() else torch.get_default_dtype()
        return F.one_hot(y.long(), classes).to(dtype)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Weighted(AbstractFamily):
    """A family whose samples count c times: A, T and σ are multiplied by the weights c; the response is not.

    The kernel GLM with weighted samples is so a kernel GLM, and its equilibrium an equilibrium: z = c·A′(η).
    """

    family: AbstractFamily
    weights: Tensor  # c ≥ 0, (n,); (n, 1) where η is a vector or has a column per output

    def __post_init__(self) -> None:
        if not bool(((self.weights >= 0) & self.weights.isfinite()).all()):
            raise ValueError("Weights of samples must be finite and not negative.")

    @property
    def vector(self) -> bool:
        return self.family.vector

    def log_partition(self, eta: Tensor) -> Tensor:
        weights = self.weights.to(eta)
        return (weights[:, 0] if self.vector else weights) * self.family.log_partition(eta)

    def mean(self, eta: Tensor) -> Tensor:
        return self.weights.to(eta) * self.family.mean(eta)

    def response(self, eta: Tensor) -> Tensor:
        return self.family.response(eta)

    def variance(self, eta: Tensor) -> Tensor:
        return self.weights.to(eta) * self.family.variance(eta)

    def variance_range(self, below: float = math.inf) -> tuple[float, float]:
        low, high = self.family.variance_range(below)
        return low * self.weights.min().item(), high * self.weights.max().item()

    def statistic(self, y: Tensor) -> Tensor:
        t = self.family.statistic(y)
        return self.weights.to(t) * t


@final
@dataclasses.dataclass(frozen=True)
class Ising(AbstractFamily):
    """Spins y = ±1 without interaction (12), at temperature t: A = log 2cosh(η/t), T = y/t, σ = tanh(η/t)/t (14)."""

    temperature: float = 1.0  # t

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)

    def log_partition(self, eta: Tensor) -> Tensor:
        x = (eta / self.temperature).abs()
        return x + torch.log1p((-2 * x).exp())

    def mean(self, eta: Tensor) -> Tensor:
        return self.response(eta) / self.temperature

    def response(self, eta: Tensor) -> Tensor:
        return (eta / self.temperature).tanh()

    def variance_range(self, below: float = math.inf) -> tuple[float, float]:
        return 0.0, 1 / self.temperature**2

    def statistic(self, y: Tensor) -> Tensor:
        return self.check(y, y.abs() == 1, "−1 or 1") / self.temperature


@final
@dataclasses.dataclass(frozen=True)
class Rectified(AbstractFamily):
    """A leaky ReLU that a density has: slope a far to the left, 1 far to the right, smooth between.

    y = √a·N + √(1−a)·|N| tilted, a Gaussian plus a half-Gaussian, gives A = aη²/2 + A₊(√(1−a) η) with
    A₊(u) = u²/2 + log Φ(u); so σ(η) = aη + √(1−a) m(√(1−a) η), m(u) = u + φ(u)/Φ(u), and 0 < A″ < 1.
    (Softplus itself is not admissible: exp(−Li₂(−x)) has a negative coefficient at x⁴, so no base measure.)
    """

    slope: float = 0.1  # a

    def __post_init__(self) -> None:
        if not 0 <= self.slope < 1:
            raise ValueError(f"`slope` must lie in [0, 1), got {self.slope}.")

    def log_partition(self, eta: Tensor) -> Tensor:
        u = math.sqrt(1 - self.slope) * eta
        return 0.5 * eta.square() + torch.special.log_ndtr(u)

    def mean(self, eta: Tensor) -> Tensor:
        root = math.sqrt(1 - self.slope)
        return self.slope * eta + root * _half_gaussian(root * eta)[0]

    def variance(self, eta: Tensor) -> Tensor:
        return self.slope + (1 - self.slope) * _half_gaussian(math.sqrt(1 - self.slope) * eta)[1]

    def variance_range(self, below: float = math.inf) -> tuple[float, float]:
        return self.slope, 1.0

    def statistic(self, y: Tensor) -> Tensor:
        if self.slope == 0:
            return self.check(y, y >= 0, "at least 0")
        return self.check(y, y.isfinite(), "finite")


def _half_gaussian(u: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of a half-Gaussian tilted by u: m = u + h and 1 − hm, h = φ(u)/Φ(u).

    Far to the left both are small differences of large numbers; there their series in 1/u² takes over.
    """
    edge = -40.0 if u.dtype == torch.float64 else -8.0
    hazard = torch.exp(-0.5 * u.square() - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(u))
    left = u.clamp(max=edge)  # so that the series is finite, and has a gradient, where it does not count
    w = left.square().reciprocal()
    mean = torch.where(u < edge, (-1 + 2 * w - 10 * w * w) / left, u + hazard)
    variance = torch.where(u < edge, w * (1 - 6 * w + 50 * w * w), 1 - hazard * (u + hazard))
    return mean, variance


@final
@dataclasses.dataclass(frozen=True)
class LeakyReLU(AbstractFamily):
    """σ = max(η, aη), A = ½ηmax(η, aη). A log-partition is analytic and this A is not: no density has it.

    Slope 0 is the ReLU, which has a canonical parameter for no negative mean.
    """

    slope: float = 0.1  # a

    def __post_init__(self) -> None:
        if not 0 <= self.slope <= 1:
            raise ValueError(f"`slope` must lie in [0, 1], got {self.slope}.")

    def log_partition(self, eta: Tensor) -> Tensor:
        return 0.5 * eta * self.mean(eta)

    def mean(self, eta: Tensor) -> Tensor:
        return torch.where(eta > 0, eta, self.slope * eta)

    def variance_range(self, below: float = math.inf) -> tuple[float, float]:
        return self.slope, 1.0


@final
@dataclasses.dataclass(frozen=True)
class Prior:
    """The factor q of the prior p(f) ∝ q(f(X)) exp(−λ‖f‖²/2): Q = −log q = νA_q(η), convex and elementwise.

    A_q is the log-partition of a family, `Custom` for a penalty of your own; q is that family's conjugate prior after
    ν observations of mean 0. ρ = Q′ ∘ (A′)⁻¹ is the second activation of the equilibrium.
    """

    family: AbstractFamily
    weight: float = 1.0  # ν; with 0 the prior is the Gaussian process alone, and ρ = 0

    def __post_init__(self) -> None:
        check_nonnegative("weight", self.weight)

    @property
    def flat(self) -> bool:
        """Whether q = 1."""
        return self.weight == 0

    def penalty(self, eta: Tensor) -> Tensor:
        """Return Q(η)."""
        return self.weight * self.family.log_partition(eta)

    def slope(self, eta: Tensor) -> Tensor:
        """Return Q′(η)."""
        return self.weight * self.family.mean(eta)

    def curvature(self, eta: Tensor) -> Tensor:
        """Return Q″(η)."""
        return self.weight * self.family.variance(eta)

    def max_curvature(self) -> float:
        """Return sup Q″."""
        return 0.0 if self.flat else self.weight * self.family.variance_range()[1]


def Normal(precision: float) -> Prior:
    """q a Gaussian of precision p at every coordinate: Q = pη²/2."""
    check_nonnegative("precision", precision)
    return Prior(Gaussian(), precision)


def Logistic(scale: float = 1.0) -> Prior:
    """q a logistic density of scale s: Q = 2 log 2cosh(η/2s), a Laplace prior without its kink."""
    check_positive("scale", scale)
    return Prior(Ising(2 * scale), 2.0)


FLAT = Normal(0.0)
