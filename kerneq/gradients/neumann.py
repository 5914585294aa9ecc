"""Gradient by the first terms of the Neumann series."""

import dataclasses
from typing import Any, final

import torch
from torch import Tensor

from ..maps import Linearisation, Map, Point, as_map, linearise
from ..tensors import check_whole
from .base import AbstractGradient, once

ONCE = "`Neumann` can be differentiated once only; for second derivatives use `Phantom`, `Unrolled` or `Implicit`."


@final
@dataclasses.dataclass(frozen=True)
class Neumann(AbstractGradient):
    """u = g + Jᵀg + … + (Jᵀ)ᵏg, k = `terms`, in the place of (I − Jᵀ)⁻¹g, with J = ∂f/∂z at z* and g = ∂L/∂z*.

    `Neumann(0)`, u = g, is the Jacobian-free gradient (Fung et al., 2022). The error falls by the contraction of f
    with each term; where f does not contract it grows. The value stays z*. At an exact equilibrium it is the gradient
    of `Phantom(terms + 1, 1)`, with one evaluation of f in memory instead of all. Cost: a product with Jᵀ a term.
    """

    terms: int = 5

    def __post_init__(self) -> None:
        check_whole("terms", self.terms, least=0)

    def attach(self, f: Map, at: Point) -> Point:
        system = linearise(as_map(f), at.z.detach())
        z = _Series.apply(system.image, at.z.detach(), system, self.terms)  # type: ignore[no-untyped-call]
        return Point(z, backward=at.backward)


class _Series(torch.autograd.Function):
    """Forward: z as it was found. Backward: g ↦ u, handed to the graph of f(z)."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, z: Tensor, system: Linearisation, terms: int) -> Tensor:
        ctx.system, ctx.terms = system, terms
        return z.view_as(z).to(image.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            u = g
            for _ in range(ctx.terms):
                u = g + ctx.system.vjp(u)
        return once(u, g, ctx.system.image, ONCE) if torch.is_grad_enabled() else u, None, None, None
