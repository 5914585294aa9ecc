"""Kernels of the inner product t = ⟨a, z⟩: S = κ(t) + ½‖v‖².

Linear (OptEq, MOptEq), polynomial and sigmoid (GEQ, Table 4).
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar, final

import torch
from torch import Tensor

from ..tensors import check_nonnegative, check_whole, per_sample, per_sample_dot, per_sample_norm, working_dtype
from .base import AbstractKernel, AbstractParameters, Binding, KernelConstants, Number, Slope

TYPICAL = 1.25  # the root mean square of a, made by a batch norm, that few samples exceed


class AbstractInnerKernel(AbstractKernel):
    """S = κ(⟨a, z⟩) + ½‖v‖², so d(z) = κ′(t) a + WᵀWz, L = sup|κ″|·‖a‖² + ‖W‖² and μ = 1 − sup κ″·‖a‖² − ‖W‖².

    On feature maps t sums thousands of terms, so where κ is curved a enters in units of its length: n entries of root
    mean square `TYPICAL` become `max_length`, fewer less in proportion, more no longer. So samples keep their lengths
    relative to each other, κ′ differs between them, and yet with norm ≤ 1 there is one equilibrium, for every input
    (docs/theory.md, fact 8). z comes back in the same units: divided by `unit` it is of the size of Ux + b. A new
    kernel is κ, κ′ and a bound on |κ″|; one that is concave somewhere may say more.
    """

    in_state: ClassVar[bool] = True
    equation: ClassVar[str] = "z = relu(κ′(⟨a, z⟩)a + WᵀWz), a = Ux + b"
    operator_share: ClassVar[float] = 0.3  # ‖W‖² ≤ operator_share · norm²
    length_share: ClassVar[float] = 0.6  # |κ″|‖a‖² ≤ length_share · norm²; the rest, 0.1 for norm 1, is left of μ

    @abc.abstractmethod
    def value(self, t: Tensor) -> Tensor:
        """κ(t)."""

    @abc.abstractmethod
    def derivative(self, t: Tensor) -> Tensor:
        """κ′(t)."""

    def second(self, t: Tensor) -> Tensor:
        """κ″(t), without a graph; as the derivative of κ′ where a kernel does not say it itself."""
        with torch.enable_grad():
            leaf = t.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.derivative(leaf).sum(), leaf)
        return slope

    @property
    @abc.abstractmethod
    def curvature(self) -> float:
        """A bound on |κ″(t)| where iterates from z = 0 can be; 0 for the linear kernel."""

    @property
    def convex_curvature(self) -> float:
        """A bound on κ″(t) there, at least 0: only where κ is convex does it take from the convexity of E."""
        return self.curvature

    def max_length(self, norm: float) -> float:
        """How long a may be."""
        return norm * (self.length_share / self.curvature) ** 0.5

    def unit(self, norm: float, size: int) -> float:
        return self.max_length(norm) / (TYPICAL * size**0.5) if self.curvature else 1.0

    @property
    def through_features(self) -> bool:
        return self.curvature == 0

    def max_norm(self, norm: float) -> float:
        return norm * self.operator_share**0.5

    def bounds(self, square: Number, norm: float) -> tuple[Number, Number]:
        longest = self.max_length(norm) if self.curvature else 0.0
        return square + self.curvature * longest**2, 1 - square - self.convex_curvature * longest**2

    def bind(self, parameters: AbstractParameters | None, a: Tensor, norm: float) -> Binding:
        if self.curvature:
            longest, typical = self.max_length(norm), TYPICAL * math.prod(a.shape[1:]) ** 0.5
            a = a * per_sample(longest / per_sample_norm(a).clamp_min(typical), a).to(a.dtype)
        return Binding(a)

    def differentiate(self, at: Binding, z: Tensor | None, v: Tensor | None, value: bool) -> Slope:
        a = at.a
        if z is None:
            t = a.new_zeros(a.shape[0], dtype=working_dtype(a.dtype))
        elif self.curvature == 0 and not value:  # κ′ is a constant: no need of t
            return Slope(a, v)
        else:
            t = per_sample_dot(a, z)
        dz = a if self.curvature == 0 else per_sample(self.derivative(t), a).to(a.dtype) * a
        if not value:
            return Slope(dz, v)
        return Slope(dz, v, self.value(t) if v is None else self.value(t) + 0.5 * per_sample_dot(v, v))

    def hvp(self, at: Binding, v: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda y: y

    def state_hvp(self, at: Binding, z: Tensor) -> Callable[[Tensor], Tensor] | None:
        """w ↦ κ″(t)⟨a, w⟩a."""
        if self.curvature == 0:
            return None
        a = at.a.detach()
        t = per_sample_dot(a, z)
        second = functools.cache(lambda: self.second(t))  # once a solve, and not where nothing is differentiated
        return lambda w: per_sample(second() * per_sample_dot(a, w), a).to(a.dtype) * a


@final
@dataclasses.dataclass(frozen=True)
class Linear(AbstractInnerKernel):
    """κ(t) = t, the kernel of OptEq (GEQ (3), (4)) and MOptEq: d(z) = a + WᵀWz.

    L = ‖W‖² and E is strongly convex with μ = 1 − L; from L = 1 on it need not have a minimum.
    """

    equation: ClassVar[str] = "z = relu(Ux + b + WᵀWz)"
    operator_share: ClassVar[float] = 1.0

    def value(self, t: Tensor) -> Tensor:
        return t

    def derivative(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def constants(self, norm: float, hidden: float) -> KernelConstants:
        lipschitz, convexity = self.bounds(norm**2, norm)
        return KernelConstants(norm, 1.0, lipschitz, 1.0, convexity, 1 / convexity if norm < 1 else math.inf)

    @property
    def curvature(self) -> float:
        return 0.0


@final
@dataclasses.dataclass(frozen=True)
class Sigmoid(AbstractInnerKernel):
    """κ(t) = tanh t for t ≥ 0, continued by its tangent, κ(t) = t, for t < 0, where no equilibrium is if ‖W‖ < 1.

    (If z = σ(d(z)) and φ is least at 0, then ⟨d − z, z⟩ ≥ 0, so κ′(t)t ≥ ‖z‖² − ‖Wz‖² ≥ 0.) So the equilibria are
    those of tanh; but κ is concave, and E strongly convex with μ = 1 − ‖W‖² for every a: one equilibrium, however
    long a is, for norm < √2. Its length is bounded for the solver's sake only: |κ″| ≤ 4/(3√3).
    """

    equation: ClassVar[str] = "z = relu((1 − tanh²⟨a, z⟩)a + WᵀWz), a = Ux + b"
    operator_share: ClassVar[float] = 0.5

    def value(self, t: Tensor) -> Tensor:
        return torch.where(t > 0, torch.tanh(t), t)  # a sum of two clamps would have both their slopes at t = 0

    def derivative(self, t: Tensor) -> Tensor:
        return 1 - torch.tanh(t.clamp_min(0)) ** 2

    def second(self, t: Tensor) -> Tensor:
        tanh = torch.tanh(t.clamp_min(0))
        return 2 * tanh * (tanh**2 - 1)

    @property
    def curvature(self) -> float:
        return 4 / (3 * 3**0.5)

    @property
    def convex_curvature(self) -> float:
        return 0.0

    def max_length(self, norm: float) -> float:
        return 1.5 * norm


@final
@dataclasses.dataclass(frozen=True)
class Polynomial(AbstractInnerKernel):
    """κ(t) = (t + c)ᵏ.

    As published c = 0: then z = 0 is an equilibrium for every input, and the only one wherever the map contracts;
    with c = 1 the input speaks. For k = 2, κ″ = 2 everywhere. For k ≥ 3, κ″ grows and E is unbounded below far away:
    the bound then holds for |t| ≤ s, s = max(c, 1), a region that iterates from z = 0 never leave (see `max_length`).
    From a start outside of it another equilibrium may be found, of which `error_bound` does not know.
    """

    equation: ClassVar[str] = "z = relu(k(⟨a, z⟩ + c)ᵏ⁻¹a + WᵀWz), a = Ux + b"

    degree: int = 2  # k
    offset: float = 1.0  # c

    def __post_init__(self) -> None:
        check_whole("degree", self.degree, least=2)
        check_nonnegative("offset", self.offset)

    def value(self, t: Tensor) -> Tensor:
        return (t + self.offset) ** self.degree

    def derivative(self, t: Tensor) -> Tensor:
        return self.degree * (t + self.offset) ** (self.degree - 1)

    def second(self, t: Tensor) -> Tensor:
        return self.degree * (self.degree - 1) * (t + self.offset) ** (self.degree - 2)

    @property
    def region(self) -> float:
        """s: how large |t| may become."""
        return max(self.offset, 1.0)

    @property
    def curvature(self) -> float:
        k = self.degree
        return k * (k - 1) * (self.region + self.offset) ** (k - 2)

    def max_length(self, norm: float) -> float:
        """Short enough for L ≤ 0.9 norm² and, for k ≥ 3, for the region to be kept.

        In the ball ‖z‖ ≤ s/‖a‖, where |t| ≤ s: ‖f(z)‖ ≤ k(s + c)ᵏ⁻¹‖a‖ + ‖W‖²s/‖a‖ ≤ s/‖a‖ as soon as
        k(s + c)ᵏ⁻¹‖a‖² ≤ (1 − ‖W‖²)s.
        """
        length = super().max_length(norm)
        if self.degree == 2:
            return length
        left = 1 - self.operator_share * norm**2
        if left <= 0:
            most = self.operator_share**-0.5
            raise ValueError(
                f"A polynomial kernel of degree {self.degree} needs `norm` below {most:.3g}, got {norm:g}."
            )
        steepest = self.degree * (self.region + self.offset) ** (self.degree - 1)
        return min(length, (left * self.region / steepest) ** 0.5)
