"""Gradients by plain backpropagation through steps: a few at the equilibrium, or all from z = 0."""

import dataclasses
from typing import Any, final

import torch
from torch import Tensor

from ..equation import Equation
from ..maps import AbstractMap, Map, Point, as_map
from ..solvers import AbstractSolver, Picard, Proximal
from ..tensors import check_share, check_whole
from .base import AbstractGradient, AbstractSteps


@final
@dataclasses.dataclass(frozen=True)
class Phantom(AbstractGradient):
    """The gradient of z ← (1 − λ) z + λ f(z), `steps` times from z*, with a graph (Geng et al., 2021).

    The default is that of the 5 steps of 0.2 z + 0.8 f(z) in GEQ's Algorithm 1. It tends to `Implicit` as steps grow;
    `steps=1, relaxation=1` is the Jacobian-free gradient (Fung et al., 2022). Memory grows with the steps, not with the
    solve. The value is z*, of which status and residual speak. With `advance`, as in Algorithm 1, it is the last of
    these steps: they are taken in the presence of gradients only, and where f does not contract they lead away from z*.
    """

    steps: int = 5
    relaxation: float = 0.8  # λ
    advance: bool = False

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)
        check_share("relaxation", self.relaxation)

    def attach(self, f: Map, at: Point) -> Point:
        z = at.z.detach()
        for _ in range(self.steps):
            fz = f(z)
            z = fz if self.relaxation == 1 else torch.lerp(z.to(fz.dtype), fz, self.relaxation)
        value = z if self.advance else _Replaced.apply(z, at.z)  # type: ignore[no-untyped-call]
        return Point(value, backward=at.backward)


class _Replaced(torch.autograd.Function):
    """Has the value of another tensor, and the gradients of z: where the steps ran away, their value is not used."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, value: Tensor) -> Tensor:
        return value.to(z.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


@final
@dataclasses.dataclass(frozen=True)
class Unrolled(AbstractSteps):
    """`steps` steps from z = 0, all of them differentiated.

    For an equation from a cell these are proximal steps, which converge for any weights; for a plain function they
    are z ← f(z). They are the value of a layer with and without gradients, in the place of its solver: `steps=1` is
    a network of one step. Memory and time grow with the steps: a reference, not a method.
    """

    steps: int

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)

    def attach(self, f: Map, at: Point) -> Point:
        f, z = as_map(f), torch.zeros_like(at.z)
        solver = self.choose_solver(f)
        space = solver.space(f)
        for _ in range(self.steps):
            z, _ = solver.step(space, space.evaluate(z), None)
        return Point(z, backward=at.backward)

    def choose_solver(self, f: AbstractMap) -> AbstractSolver[Any]:
        return Proximal(memory=0) if isinstance(f, Equation) else Picard()
