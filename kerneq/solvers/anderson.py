"""Anderson acceleration."""

import dataclasses
from typing import final

from torch import Tensor

from ..equation import AbstractMap, Evaluation
from ..fused.iterates import History
from ..tensors import check_nonnegative, check_share, check_whole, working_dtype
from .base import AbstractSolver


@final
@dataclasses.dataclass(frozen=True)
class Anderson(AbstractSolver[History]):
    """z ← Σ αⱼ ((1 − β) zⱼ + β f(zⱼ)), with α minimising ‖Σ αⱼ (f(zⱼ) − zⱼ)‖ and Σ αⱼ = 1 (Walker & Ni, 2011).

    Fast where f is smooth near its fixed point, contraction or not; no guarantee where it is not a contraction:
    `Proximal` is the safe form. Memory: 2m states a sample.
    """

    memory: int = 5  # m
    ridge: float = 1e-10  # relative to the Gram matrix of unit gaps; never below its rounding error
    relaxation: float = 1.0  # β

    def __post_init__(self) -> None:
        check_whole("memory", self.memory)
        check_nonnegative("ridge", self.ridge)
        check_share("relaxation", self.relaxation)

    def init(self, f: AbstractMap, z0: Tensor) -> History:
        beta = None if self.relaxation == 1 else z0.new_full((), self.relaxation, dtype=working_dtype(z0.dtype))
        return History.empty(z0, self.memory, beta)

    def step(self, f: AbstractMap, at: Evaluation, memory: History) -> tuple[Tensor, History]:
        return memory.extrapolate(at, self.ridge)
