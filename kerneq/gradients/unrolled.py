"""Gradients by plain backpropagation through steps: a few at the equilibrium, or all from z = 0."""

import dataclasses
from typing import Any, final

import torch

from ..equation import Equation
from ..maps import AbstractMap, Map, Point, as_map
from ..solvers import AbstractSolver, Picard, Proximal
from ..tensors import check_share, check_whole
from .base import AbstractGradient, AbstractSteps


@final
@dataclasses.dataclass(frozen=True)
class Phantom(AbstractGradient):
    """z ← (1 − λ) z + λ f(z), `steps` times from z*, with a graph (Geng et al., 2021).

    The default is exactly the 5 steps of 0.2 z + 0.8 f(z) in GEQ's Algorithm 1. It tends to `Implicit` as steps grow;
    `steps=1, relaxation=1` is the Jacobian-free gradient (Fung et al., 2022). Memory grows with the steps, not with the
    solve.
    """

    steps: int = 5
    relaxation: float = 0.8  # λ

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)
        check_share("relaxation", self.relaxation)

    def attach(self, f: Map, at: Point) -> Point:
        z = at.z.detach()
        for _ in range(self.steps):
            fz = f(z)
            z = fz if self.relaxation == 1 else torch.lerp(z.to(fz.dtype), fz, self.relaxation)
        return Point(z, backward=at.backward)


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
