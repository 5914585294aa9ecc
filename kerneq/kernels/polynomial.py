"""The polynomial kernel (GEQ, Table 4)."""

import dataclasses
from typing import final

from torch import Tensor

from ..solution import check_whole
from .inner import AbstractInnerKernel


@final
@dataclasses.dataclass(frozen=True)
class Polynomial(AbstractInnerKernel):
    """S = (⟨a, z⟩ + c)ᵏ + ½‖v‖².

    As published c = 0: then z = 0 is an equilibrium for every input, and the only one wherever the map contracts;
    with c = 1 the input speaks. For k = 2, κ″ = 2 everywhere. For k ≥ 3, κ″ grows and E is unbounded below far away:
    the bound then holds for |t| ≤ s, s = max(c, 1), a region that iterates from z = 0 never leave (see `reach`).
    """

    degree: int = 2  # k
    offset: float = 1.0  # c

    def __post_init__(self) -> None:
        check_whole("degree", self.degree, least=2)
        if not self.offset >= 0:
            raise ValueError(f"`offset` must not be negative, got {self.offset}.")

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

    def reach(self, norm: float) -> float:
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
