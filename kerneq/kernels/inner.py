"""Kernels of the inner product t = ⟨a, z⟩: S = κ(t) + ½‖v‖².

Linear (OptEq, MOptEq), polynomial and sigmoid (GEQ, Table 4).
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, final

import torch
from torch import Tensor

from ..operators import limited
from ..tensors import check_nonnegative, check_whole, per_sample, per_sample_dot, per_sample_norm, working_dtype
from .base import AbstractKernel, AbstractParameters, Binding, Slope


class AbstractInnerKernel(AbstractKernel):
    """S = κ(⟨a, z⟩) + ½‖v‖², so d(z) = κ′(t) a + WᵀWz, L = max|κ″|·‖a‖² + ‖W‖² and μ = 1 − L.

    On feature maps t sums thousands of terms, so where κ is curved a is shortened, per sample, to ‖a‖ ≤ `max_length`:
    half of norm² is left to it and half to W, and with norm ≤ 1 the equilibrium exists and is unique (docs/facts.md,
    fact 8). A new kernel is κ, κ′ and a bound on |κ″|.
    """

    in_state: ClassVar[bool] = True
    hvp_sign: ClassVar[int] = 1

    @abc.abstractmethod
    def value(self, t: Tensor) -> Tensor:
        """κ(t)."""

    @abc.abstractmethod
    def derivative(self, t: Tensor) -> Tensor:
        """κ′(t)."""

    @property
    @abc.abstractmethod
    def curvature(self) -> float:
        """A bound on |κ″(t)| where iterates from z = 0 can be; 0 for the linear kernel."""

    def max_length(self, norm: float) -> float:
        """How long a may be."""
        return norm / (2 * self.curvature) ** 0.5 if self.curvature else math.inf

    @property
    def through_features(self) -> bool:
        return self.curvature == 0

    def parameters(self, features: int, conv: bool) -> None:
        return None

    def bind(self, parameters: AbstractParameters | None, a: Tensor, norm: float, operator_norm: Tensor) -> Binding:
        longest = self.max_length(norm)
        scale = limited(operator_norm, norm if self.curvature == 0 else norm / 2**0.5)
        lipschitz = (operator_norm * scale).detach() ** 2
        if self.curvature:
            a = a * per_sample(longest / per_sample_norm(a).clamp_min(longest), a).to(a.dtype)
            lipschitz = lipschitz + self.curvature * longest**2
        return Binding(a, operator_norm, scale, lipschitz, 1 - lipschitz)

    def differentiate(self, at: Binding, z: Tensor | None, v: Tensor | None, value: bool) -> Slope:
        a = at.a
        if z is None:
            t = a.new_zeros(len(a), dtype=working_dtype(a.dtype))
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


@final
@dataclasses.dataclass(frozen=True)
class Linear(AbstractInnerKernel):
    """κ(t) = t, the kernel of OptEq and MOptEq: d(z) = a + WᵀWz.

    L = ‖W‖² and E is strongly convex with μ = 1 − L; from L = 1 on it need not have a minimum.
    """

    def value(self, t: Tensor) -> Tensor:
        return t

    def derivative(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    @property
    def curvature(self) -> float:
        return 0.0


@final
@dataclasses.dataclass(frozen=True)
class Sigmoid(AbstractInnerKernel):
    """κ(t) = tanh t. |tanh″| ≤ 4/(3√3), so E is strongly convex if (4/3√3)‖a‖² + ‖W‖² < 1."""

    def value(self, t: Tensor) -> Tensor:
        return torch.tanh(t)

    def derivative(self, t: Tensor) -> Tensor:
        return 1 - torch.tanh(t) ** 2

    @property
    def curvature(self) -> float:
        return 4 / (3 * 3**0.5)


@final
@dataclasses.dataclass(frozen=True)
class Polynomial(AbstractInnerKernel):
    """κ(t) = (t + c)ᵏ.

    As published c = 0: then z = 0 is an equilibrium for every input, and the only one wherever the map contracts;
    with c = 1 the input speaks. For k = 2, κ″ = 2 everywhere. For k ≥ 3, κ″ grows and E is unbounded below far away:
    the bound then holds for |t| ≤ s, s = max(c, 1), a region that iterates from z = 0 never leave (see `max_length`).
    """

    degree: int = 2  # k
    offset: float = 1.0  # c

    def __post_init__(self) -> None:
        check_whole("degree", self.degree, least=2)
        check_nonnegative("offset", self.offset)

    def value(self, t: Tensor) -> Tensor:
        return (t + self.offset) ** self.degree

    def derivative(self, t: Tensor) -> Tensor:
        return self.degree * (t + self.offset) ** (self.degree - 1)

    @property
    def region(self) -> float:
        """s: how large |t| may become."""
        return max(self.offset, 1.0)

    @property
    def curvature(self) -> float:
        k = self.degree
        return k * (k - 1) * (self.region + self.offset) ** (k - 2)

    def max_length(self, norm: float) -> float:
        """Short enough for L ≤ norm² and, for k ≥ 3, for the region to be kept.

        In the ball ‖z‖ ≤ s/‖a‖, where |t| ≤ s: ‖f(z)‖ ≤ k(s + c)ᵏ⁻¹‖a‖ + ‖W‖²s/‖a‖ ≤ s/‖a‖ as soon as
        k(s + c)ᵏ⁻¹‖a‖² ≤ (1 − ‖W‖²)s, and ‖W‖² ≤ norm²/2 here.
        """
        length = norm / (2 * self.curvature) ** 0.5
        if self.degree == 2:
            return length
        if norm**2 >= 2:
            raise ValueError(f"A polynomial kernel of degree {self.degree} needs `norm` below √2, got {norm}.")
        room = (1 - norm**2 / 2) * self.region
        steepest = self.degree * (self.region + self.offset) ** (self.degree - 1)
        return min(length, (room / steepest) ** 0.5)
