"""Gradient by the inverse Jacobian that Broyden's method has learnt on its way to the equilibrium."""

import dataclasses
from typing import ClassVar, final

from torch import Tensor

from ..maps import Map, Point, as_map, linearise_at
from ..solvers.anderson import flatten_sample, unflatten_sample
from ..solvers.broyden import Broyden, Secants
from ..tensors import check_whole
from .base import AbstractGradient, attach_through_graph

ONCE = "`Shine` can be differentiated once only; for second derivatives use `Phantom`, `Unrolled` or `Implicit`."


@final
@dataclasses.dataclass(frozen=True)
class Shine(AbstractGradient):
    """u = Hᵀg in the place of (I − Jᵀ)⁻¹g, H ≈ (I − J)⁻¹ what the solver `Broyden` ended with (Ramzi et al., 2022).

    No backward solve: only the inner products of g with Broyden's memory. H is right along the steps that were taken,
    so how far off u is depends on g, and has no bound. A restart of `Broyden` forgets what it has learnt: give it a
    `memory` of as many steps as a solve takes. `refine` products with Jᵀ, u ← Jᵀu + g, make the error smaller by the
    contraction of f each. The value stays z*. For functions; samples stay in the computation until the last one has
    converged.
    """

    linearises: ClassVar[bool] = True

    refine: int = 0

    def __post_init__(self) -> None:
        check_whole("refine", self.refine, least=0)

    def attach(self, f: Map, at: Point) -> Point:
        system = linearise_at(as_map(f), at)
        memory = at.memory if isinstance(at.memory, Secants) else None  # None: it converged where it started

        def multiply(g: Tensor) -> Tensor:
            u = g
            if memory is not None:
                flat = memory.apply(memory.v, memory.u, flatten_sample(g, memory.channels_last).to(memory.u.dtype))
                u = unflatten_sample(flat.to(g.dtype), g, memory.channels_last)
            for _ in range(self.refine):
                u = g + system.vjp(u)
            return u

        return Point(attach_through_graph(system, at.z.detach(), multiply, ONCE), backward=at.backward)

    def check_solver(self, solver: object) -> None:
        """Raise unless the solver learns what this rule needs."""
        if not isinstance(solver, Broyden):
            raise TypeError(f"The gradient `Shine` reuses what the solver `Broyden` has learnt, got {solver!r}.")
