"""Gradient by the first terms of the Neumann series."""

import dataclasses
from typing import ClassVar, final

from torch import Tensor

from ..maps import Map, Point, as_map, linearise_at
from ..tensors import check_whole
from .base import AbstractGradient, attach_through_graph

ONCE = "`Neumann` can be differentiated once only; for second derivatives use `Phantom`, `Unrolled` or `Implicit`."


@final
@dataclasses.dataclass(frozen=True)
class Neumann(AbstractGradient):
    """u = g + Jᵀg + … + (Jᵀ)ᵏg, k = `terms`, in the place of (I − Jᵀ)⁻¹g, with J = ∂f/∂z at z* and g = ∂L/∂z*.

    `Neumann(0)`, u = g, is the Jacobian-free gradient (Fung et al., 2022). The error falls by the contraction of f
    with each term; where f does not contract it grows. The value stays z*. At an exact equilibrium it is the gradient
    of `Phantom(terms + 1, 1)`, with one evaluation of f in memory instead of all. Cost: a product with Jᵀ a term.
    """

    linearises: ClassVar[bool] = True

    terms: int = 5

    def __post_init__(self) -> None:
        check_whole("terms", self.terms, least=0)

    def attach(self, f: Map, at: Point) -> Point:
        system = linearise_at(as_map(f), at)

        def add_terms(g: Tensor) -> Tensor:
            u = g
            for _ in range(self.terms):
                u = g + system.vjp(u)
            return u

        return Point(attach_through_graph(system, at.z.detach(), add_terms, ONCE), backward=at.backward)
