"""Solving for the features v = Wz instead of z: on the largest branch of GEQ they are a quarter of the state."""

import dataclasses
from typing import Any, final

from torch import Tensor

from ..equation import Equation
from ..maps import AbstractMap
from .anderson import Anderson
from .base import AbstractSolver, AbstractSpace, Evaluation, StateSpace
from .newton import Newton
from .proximal import FeatureSpace, Proximal


@final
@dataclasses.dataclass(frozen=True)
class InFeatures(AbstractSolver[Any]):
    """Let `solver` iterate the features (fact 6): forward as the solver of a layer, backward as that of `Implicit`.

    Forward it solves v = Wσ(Wᵀm(v) + ∂S/∂z), whose σ(…) is z; a sample has converged when that z has, in the
    equation itself. Backward it solves y = WDg + WDWᵀNy, with w = D(g + WᵀNy) after it. For kernels through which z
    acts by v = Wz alone, the radial ones and the linear one; forward, `solver` iterates z with any other. Forward it
    pays where the solver remembers states.
    """

    solver: AbstractSolver[Any] = Anderson(memory=3)  # `Picard()` is cheaper and enough where the equation contracts

    def __post_init__(self) -> None:
        if not isinstance(self.solver, AbstractSolver) or isinstance(self.solver, InFeatures | Newton | Proximal):
            raise TypeError(f"`solver` must be Picard, Anderson or Broyden in the features, got {self.solver!r}.")

    @property
    def steady(self) -> bool:
        return self.solver.steady

    def space(self, f: AbstractMap) -> AbstractSpace:
        return FeatureSpace(f) if isinstance(f, Equation) and f.kernel.through_features else StateSpace(f)

    def init(self, space: AbstractSpace, z0: Tensor) -> Any:
        return self.solver.init(space, z0)

    def step(self, space: AbstractSpace, at: Evaluation, memory: Any) -> tuple[Tensor, Any]:
        return self.solver.step(space, at, memory)
