"""Plain backpropagation through the iterations: the reference for the other gradients."""

import dataclasses
from typing import final

import torch
from torch import Tensor

from ..equation import Map, as_map
from ..tensors import check_whole
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
        f, z = as_map(f), torch.zeros_like(z)
        for _ in range(self.steps):
            z = f.safe_step(z)
        return z
