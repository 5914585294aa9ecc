"""Plain backpropagation through the iterations: the reference for the other gradients."""

import dataclasses
from typing import final

import torch
from torch import Tensor

from ..equation import AbstractEquation
from ..solution import check_whole
from ..solvers.base import Map
from ..solvers.proximal import descend, safe_step
from .base import AbstractGradient


@final
@dataclasses.dataclass(frozen=True)
class Unrolled(AbstractGradient):
    """`steps` steps from z = 0, all of them differentiated.

    For an equation from a cell these are proximal steps, which converge for any weights; for a plain function they
    are z ← f(z). Memory and time grow with the steps: a reference, not a method.
    """

    steps: int

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)

    def attach(self, f: Map, z: Tensor) -> Tensor:
        z = torch.zeros_like(z)
        for _ in range(self.steps):
            if isinstance(f, AbstractEquation):
                z = descend(f.evaluate(z, energy=False), f.prox, safe_step(f.bound))
            else:
                z = f(z)
        return z
